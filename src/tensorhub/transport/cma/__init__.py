"""A reader on the same host copies out of a source's process by `process_vm_readv`."""
