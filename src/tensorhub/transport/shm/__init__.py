"""A reader on the same host maps the memory in which a source's tensors are."""
