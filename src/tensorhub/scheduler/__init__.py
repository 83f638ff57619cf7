"""Which reader reads which chunks from which source: pure functions and state machines over plain
values.

    links      how far apart two locations are (site, rack, host), and what links carry
    choice     which source a reader is sent to; `sources` keeps them in order
    pull       which chunks a reader asks of which source next, and what happens when a read fails

Not responsible for granting leases (`tensorhub.coordinator`), for reading (`tensorhub.transport`)
or for measuring time: callers report what came in how many seconds.
"""
