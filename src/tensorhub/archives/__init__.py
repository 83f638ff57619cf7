"""Versions in object storage: kept there, and read from there without a worker that holds them.

    store       a bucket or a directory, by its URL; store_faults: its errors
    catalogue   which versions there are: a small manifest for each
    claim       the right to write, which one process has at a time
    anchors     a version as an ordinary Hugging Face checkpoint
    writing     versions on their way into the archive: anchors and deltas
    reading     the bytes of any chunk of any version
    chains      whether a version becomes an anchor or a delta. PURE
    retention   which versions go, and in which order. PURE
    checkpoints any checkpoint in a store, as memory that is published

Below the path of a model:

    writers/2.json                       the process that writes; the highest number holds
    versions/<version>.<n>.json          a version is visible while its manifest is there; of several, the highest n counts
    anchors/<version>-<try>/             config.json, model-00001-of-00002.safetensors, ..., model.safetensors.index.json
    data/<version>-<try>/                index (digests and lengths of frames), frames, and what no checkpoint can hold
    parts/<id>                           manifests and descriptions of layouts, by their hash, shared by versions

Every object but a manifest is there before the manifest that names it, and goes after it. No object
is ever changed.
"""  # noqa: E501 - a table
