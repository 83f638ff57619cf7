"""Memory that holds weights: tensors in place (`tensors`), a file's bytes (`files`), what is allocated when it is filled.

Responsible for finding out what a caller has registered, for its bytes as writable views, and for files in the format of
safetensors. Not responsible for how bytes get from one memory to another (`transport`), nor for who may read them when
(`worker.owner`).
"""
