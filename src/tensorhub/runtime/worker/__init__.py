"""A worker's shell: its handles, host copies and questions. It carries out what `tensorhub.worker`
decides.
"""
