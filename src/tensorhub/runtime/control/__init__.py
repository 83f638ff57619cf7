"""The control plane: the coordinator's server and store, and a worker's link to it."""
