"""Ways to move chunks from a source's memory into a reader's."""
