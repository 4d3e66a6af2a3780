"""A model file mapped into memory, read-only: what both readers, GGUF and safetensors, look through.

A mapping costs nothing until its pages are read, and then they count as this process's memory although the system could
drop them at any moment. `drop_pages` gives them back at once: a loader that has turned a tensor into its own layout
calls it, so that it never holds the file twice.
"""

import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

from forge.errors import ForgeError


def map_file(path: Path, refuse: Callable[[str], ForgeError]) -> mmap.mmap:
    """The whole file, read-only; `refuse` makes the error to raise from a problem in words.

    What is not an ordinary file is refused before it is opened: a pipe would block.
    """
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise refuse("is a directory")
        if not stat.S_ISREG(status.st_mode):
            raise refuse("is not an ordinary file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise refuse("is empty; the download or conversion did not finish")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise refuse("does not exist") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise refuse(f"cannot be read: {reason}") from None


def drop_pages(buffer: mmap.mmap, offset: int, nbytes: int) -> None:
    """Give back the memory of `nbytes` bytes at `offset`, and of the pages that they share with others.

    Nothing is lost: reading there again gives the same bytes from the file. Does nothing where the system has no
    `madvise`, or the mapping is closed.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or buffer.closed:
        return
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = min(offset + nbytes, len(buffer)) - start
    if length > 0:
        buffer.madvise(mmap.MADV_DONTNEED, start, length)
