"""What `import tensorhub` shows: the hub, handles of weights, the embedded coordinator, and what
their calls return.
"""
