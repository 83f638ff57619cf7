"""Files that a version does not have, such as a model's configuration and its tokenizer, from a
local directory.

Weights in that directory are left out, because they are not the version's.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from tensorhub.errors import InvalidValue
from tensorhub.memory.safetensors import open_file

FILES_MAX = 10_000
WEIGHTS = tuple(".safetensors .bin .pt .pth .ckpt .h5 .msgpack .gguf .onnx .index.json".split())


class LocalFiles:
    """Those of a directory and of the directories in it, by their path there ("/" between names). A
    link to a file is that file, wherever it is: Hugging Face's cache has such links.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        """InvalidValue: it is no directory that can be read, or has more than `FILES_MAX` files."""
        self.files: dict[str, Path] = {}
        if directory is None:
            return
        root = Path(directory)
        if not root.is_dir():
            raise InvalidValue(
                f"files={str(root)!r}: give a directory, of a configuration and a tokenizer"
            )
        for path, directories, names in os.walk(root, onerror=_raise):
            directories[:] = [name for name in directories if not name.startswith(".")]
            for name in names:
                file = Path(path, name)
                if not name.endswith(WEIGHTS) and file.is_file():
                    self.files[file.relative_to(root).as_posix()] = file
            if len(self.files) > FILES_MAX:
                raise InvalidValue(
                    f"files={str(root)!r} has more than {FILES_MAX} files: give a model's directory"
                )

    def sizes(self) -> dict[str, int]:
        """The bytes of each file that is still there."""
        found = {}
        for name, file in self.files.items():
            with suppress(OSError):
                found[name] = file.stat().st_size
        return found

    def open(self, name: str) -> int:
        """A descriptor to read it by. FileNotFoundError: it is no file any more."""
        descriptor = open_file(self.files[name])
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "it is no file any more", name)
        return descriptor


def _raise(error: OSError) -> None:
    raise InvalidValue(f"files: {error.filename}: {error.strerror}") from error
