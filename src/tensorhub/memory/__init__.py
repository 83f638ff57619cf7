"""Memory that holds weights: the caller's tensors, a file's bytes, and memory that is allocated to
be filled.

    tensors      the caller's tensors as bytes, in place, and whether they were written
    resolving    which tensors a module or a mapping has; `describing`: why a tensor cannot be registered
    files        safetensors files, served where they are; `safetensors`, `checkpoint`, `json_pieces`: their formats
    file_target  files that a fetch fills; `allocated`: tensors that it fills; `host`: host copies
    chunks       a manifest's chunks as pieces of any of these

Not responsible for moving bytes from one memory to another (`transport`), nor for the right to read
them (`worker.owner`).
"""  # noqa: E501 - a table
