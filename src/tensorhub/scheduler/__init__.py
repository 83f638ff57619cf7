"""Who reads what from whom: pure functions and state machines over plain values.

Responsible for the topology (site, rack, host), the choice of sources, the chunk plan, and the reader's
pull machine, which decides what to read next and what to do when a read fails.

Not responsible for granting leases (`tensorhub.coordinator`), for reading (`tensorhub.transport`) or for
measuring time: the bandwidths that it learns from are given to it.
"""
