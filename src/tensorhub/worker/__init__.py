"""A worker's own side of the protocol: events in, actions out.

Responsible for regions and their generations, publish and unpublish, the drain and handover of what a
worker holds, membership in a group operation, and re-announcing after a lost connection. It alone decides
when memory may change.

Not responsible for moving bytes (`tensorhub.transport`), for choosing sources (`tensorhub.scheduler`) or
for clocks, tasks and tensors (`tensorhub.runtime` and `tensorhub.hub`).
"""
