"""A version as a directory, for any loader: `tensorhub://HOST:PORT/MODEL/VERSION/FILE` (fsspec), or
mounted (`tensorhub mount`).
"""

from tensorhub.fs.filesystem import TensorHubFileSystem

__all__ = ["TensorHubFileSystem"]
