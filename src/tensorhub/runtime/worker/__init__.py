"""A worker's shell: its handles, its host copies, its questions. Carries out what `tensorhub.worker` decides."""
