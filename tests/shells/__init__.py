"""The async shells and the lanes under seeds: real hubs, coordinators, loops and threads, of which
one at a time goes on, in virtual time, over sockets that fail. See docs/simulation.md.
"""
