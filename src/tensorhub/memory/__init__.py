"""Memory that holds weights: the caller's tensors, a file's bytes, and memory that is allocated to be filled.

    tensors      the caller's tensors as bytes, in place; what a `Memory` is
    resolving    which tensors a module or a mapping has; `describing`: what is in the way of one
    sampling     whether tensors were written
    files        safetensors files, served where they are; `safetensors`, `checkpoint`, `json_pieces`: their formats
    file_target  files that a fetch fills; `allocated`: tensors that it fills; `host`: host copies
    chunks       a manifest's chunks as pieces of any of these

Not responsible for how bytes get from one memory to another (`transport`), nor for who may read them when (`worker.owner`).
"""
