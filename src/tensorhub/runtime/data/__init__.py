"""The data plane in a worker's threads: owners that serve, lanes that read, and which transport
each pair uses.
"""
