"""A worker's own side of the protocol: events in, actions out.

Responsible for registered memory and its generations, for publish and unpublish, for draining and
handing over what a worker holds, for its part in a group operation, for its host copies, and for
announcing what it holds after a lost connection. The worker alone decides when its memory may
change.

Not responsible for moving bytes (`tensorhub.transport`), for choosing sources
(`tensorhub.scheduler`), nor for clocks, tasks and tensors (`tensorhub.runtime`,
`tensorhub.api.hub`).
"""
