"""Pure scheduling: which source a reader is sent to, and which chunks it asks for."""
