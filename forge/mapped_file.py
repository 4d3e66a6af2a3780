"""A model file mapped into memory, read-only: what both readers, GGUF and safetensors, have in common.

A mapping costs nothing until its pages are read, and then they count as this process's memory although the system could
drop them at any moment. `MappedFile.release` gives them back at once: a loader that has turned a tensor into its own
layout calls it, so that it never holds the file twice.

A `ModelFileError` names the file, the field and the byte where the file went wrong. Everything in it that came out of
the file went through `printable` first: a hostile name can neither write terminal escapes nor fill the screen.
"""

import mmap
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np

from forge.errors import ForgeError

MAX_PRINTED_CHARACTERS = 64
_READ_AHEAD_FROM = 1 << 18
"""Tensors of so many bytes and more are read ahead."""
WHOLE_FILE = "file"
"""The `field` of an error that is not about a place in the file: it is missing, empty, a directory."""
OTHER_KINDS_OF_FILE = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint?), not a {kind} file",
    b"vers": "perhaps a Git LFS pointer in place of the file; fetch the file itself",
    b"<!do": "a web page, not a {kind} file; the download went wrong",
    b"<!DO": "a web page, not a {kind} file; the download went wrong",
}
"""Files that people have in place of a model, by their first four bytes."""


class ModelFileError(ForgeError):
    """A model file is missing, malformed, or of a kind that forge does not run.

    `path` is the file, `field` what in it is wrong (`metadata count`, `tensor 'blk.0.attn_q.weight' offset`), `offset`
    the byte at which that field begins, or None where no position applies (a tensor that is not there).
    """

    def __init__(self, path: Path | str, field: str, problem: str, offset: int | None = None):
        self.path = Path(path)
        self.field = field
        self.offset = offset
        self.problem = problem
        where = "" if offset is None else f"at byte {offset}, "
        subject = "" if field == WHOLE_FILE else f"{field}: "
        super().__init__(f"{shown_path(path)}: {where}{subject}{problem}")


class PlacedTensor(Protocol):
    """A tensor that knows where in its file it lies."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


TensorT = TypeVar("TensorT", bound=PlacedTensor)


class MappedFile(ABC, Generic[TensorT]):
    """An open file: its `tensors` by name, in the file's order, and its `size` in bytes. Made by `open`; a context
    manager."""

    error_type: ClassVar[type[ModelFileError]]
    tensors: Mapping[str, TensorT]

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path = path
        self.size = len(buffer)
        self._buffer = buffer
        self._read_header()

    @abstractmethod
    def _read_header(self) -> None:
        """Read the header into `tensors` and the format's other fields. Raises `error_type`."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the file and read its header. Raises `error_type` for whatever is wrong with it, a missing file
        included."""
        path = Path(path)
        buffer = cls._map(path)
        try:
            file = cls(path, buffer)
        except BaseException:
            buffer.close()
            raise
        if hasattr(mmap, "MADV_RANDOM"):
            buffer.madvise(mmap.MADV_RANDOM)  # `tensor_bytes` says where reading ahead pays
        return file

    @classmethod
    def _map(cls, path: Path) -> mmap.mmap:
        """Map the whole file, read-only. Only an ordinary file is opened: a pipe would block."""
        try:
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                raise cls.error_type(path, WHOLE_FILE, "is a directory; name the file in it")
            if not stat.S_ISREG(status.st_mode):
                raise cls.error_type(path, WHOLE_FILE, "is not an ordinary file")
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size == 0:
                    raise cls.error_type(path, WHOLE_FILE, "is empty; the download or conversion did not finish")
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise cls.error_type(path, WHOLE_FILE, "does not exist") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise cls.error_type(path, WHOLE_FILE, f"cannot be read: {reason}") from None

    def close(self) -> None:
        """Close the mapping. Arrays from `raw()` stay valid: the file is unmapped when the last of them is freed."""
        try:
            self._buffer.close()
        except BufferError:  # views are still in use
            pass

    def release(self, name: str) -> None:
        """Give back the memory of the pages that hold the tensor called `name`, and of those that they share with
        others; it can be read again all the same. Nothing happens where the system has no `madvise`."""
        if not hasattr(mmap, "MADV_DONTNEED") or self._buffer.closed:
            return
        tensor = self.tensors[name]
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = min(tensor.offset + tensor.nbytes, self.size) - start
        if length > 0:
            self._buffer.madvise(mmap.MADV_DONTNEED, start, length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def tensor_bytes(buffer: mmap.mmap, offset: int, nbytes: int) -> np.ndarray:
    """Return a read-only view of a tensor's bytes, uint8 `[nbytes]`, which keeps the mapping alive.

    The system reads ahead in a large tensor alone. Behind small ones it would read half of a file whose matrices are
    all kept in another one (`packed_cache`).
    """
    if nbytes >= _READ_AHEAD_FROM and hasattr(mmap, "MADV_NORMAL"):
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        buffer.madvise(mmap.MADV_NORMAL, start, offset + nbytes - start)
    return np.frombuffer(buffer, np.uint8, nbytes, offset)


def printable(text: Any) -> str:
    """Quote text or bytes on one line, cut to `MAX_PRINTED_CHARACTERS`, with what is not printable escaped; convert
    another value to its text."""
    text = text if isinstance(text, bytes) else str(text)
    shown = repr(text[:MAX_PRINTED_CHARACTERS])
    return shown if len(text) <= MAX_PRINTED_CHARACTERS else f"{shown}... ({len(text)} long)"


def shown_path(path: Path | str) -> str:
    """Return `path` fit for one line of a terminal."""
    text = str(path)
    return text if text.isprintable() else repr(text)
