"""Chunks over the reader's own connection, by blocking sockets: works everywhere."""
