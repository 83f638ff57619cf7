"""The coordinator's decisions: events in, actions out.

Responsible for versions, replicas, leases, groups, retention, lineages, and for the bounded story of each
of them. `Coordinator.step(event, now)` returns the actions, `next_deadline()` says when it wants to be
called again.

Not responsible for clocks, sockets, disks or tasks: time and randomness are arguments, and what must be
durable is an action that `tensorhub.runtime` carries out. It never sees a byte of a weight.
"""
