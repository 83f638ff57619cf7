"""A reader reads a source's registered memory by NIXL."""
