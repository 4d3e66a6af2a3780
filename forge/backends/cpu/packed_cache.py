"""Packed weights in a file beside the compiled kernels: written once, then mapped by every process that runs the model.

Repacking reads and writes every weight: seconds for a large model, at each start, into memory that no other process
shares. The packed form depends on the model's file and on the layouts alone, so the first start keeps it and the next
ones map it: they load in the time of some page faults, and two processes share one copy in the page cache.

    magic, 8 bytes | length of the header u64 | SHA-256 of the header | header, JSON | arrays, each at a multiple of 64

A file is named after what it was made from: size, time and sampled pages of each of the model's files, the type that
floats were quantized to, and the code that packs. It appears under its name only once it is whole. One whose size or
header is not as stated is removed and made again; one that was not used for a month goes too.

`FORGE_PACKED_WEIGHTS=off` does without: nothing is written and nothing is mapped. Small models, and those that would
take more than half of the free disk, are not kept either.

The pages of a mapped file are huge ones where the file system has such and memory was in one piece when they were read.
Where they are not, weights are copied into memory whose pages are.

Ledger, 512 MB on ext4 of Linux 6.18: mapped pages are huge ones, as `Arena`'s are, and stream equally fast (28 GB/s);
the first pass over them takes 20 ms. Another day 22 % of 618 MB were not, after programs had filled the memory: a 0.6B
model decoded 20 to 22 tokens/s, and 30 from memory of its own.
"""

import hashlib
import json
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from forge.backends.choices import packed_weights_wanted
from forge.backends.cpu import packing, tiles
from forge.backends.cpu.compilation import cache_root, forget_unused, whole_file
from forge.backends.cpu.packing import LINE, FloatMatrix, PackedMatrix, QuantizedMatrix, padded
from forge.backends.cpu.tiles import TileLayout

LEAST_BYTES = 64 << 20
"""Of tensors: repacking fewer takes less time than can be noticed."""
SAMPLED_PAGES = 64
_PAGE = 4096
_WRITTEN_AT_ONCE = 32 << 20
"""Large writes make large pages of the page cache."""
_MAGIC = b"FORGEPW1"
LEAST_HUGE = 0.9
"""The share of a mapping in huge pages below which it is copied: 0.94 to 0.98 are, where memory is in one piece."""
LEAST_COPIED = 32 << 20
"""A smaller mapping stays as it is."""
_MADV_POPULATE_READ = 22
"""From Linux's asm-generic/mman-common.h; since 5.14."""
_SMAPS, _ENABLED = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
_START = struct.Struct("<8sQ32s")


class PackedCache:
    """The packed matrices of one model while it is loaded."""

    def __init__(self, path: Path | None = None):
        """path: the file; None keeps nothing."""
        self._path = path
        self._mapped = {} if path is None else _map(path)
        self._made: dict[str, PackedMatrix] = {}

    def packed(self, name: str, pack: Callable[[], PackedMatrix]) -> PackedMatrix:
        """Return the mapped packed form of the tensor `name`, or what `pack` makes, which is kept for `write`."""
        packed = self._mapped.get(name)
        if packed is None:
            packed = pack()
            if self._path is not None:
                self._made[name] = packed
        return packed

    def write(self) -> None:
        """Write the new matrices. A full or write-protected disk is silently ignored."""
        if self._path is None or self._mapped or not self._made:
            return
        needed = sum(packed.nbytes for packed in self._made.values())
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            forget_unused(self._path.parent.iterdir())
            if 2 * needed < shutil.disk_usage(self._path.parent).free:
                _write(self._path, self._made)


@contextmanager
def packed_cache(path: Path | None, nbytes: int, quantize: str | None) -> Iterator[PackedCache]:
    """Open the cache of the model at `path`, whose tensors take `nbytes`; it is written if the block ends without an
    exception. If nothing is to be kept, it has no file."""
    file = None
    if path is not None and nbytes >= LEAST_BYTES and packed_weights_wanted():
        file = cache_root() / "weights" / f"{_key(path, quantize)}.packed"
    cache = PackedCache(file)
    yield cache
    cache.write()


def _key(path: Path, quantize: str | None) -> str:
    """Return a digest of everything that the packed form of a model depends on."""
    digest = hashlib.sha256(repr(quantize).encode())
    for module in (packing, tiles):
        digest.update(Path(module.__file__ or "").read_bytes())
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        status = file.stat()
        digest.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode())
        with file.open("rb") as stream:
            for page in range(SAMPLED_PAGES + 1):
                stream.seek(max(0, status.st_size - _PAGE) * page // SAMPLED_PAGES)
                digest.update(stream.read(_PAGE))
    return digest.hexdigest()[:32]


def _arrays(packed: PackedMatrix) -> dict[str, np.ndarray]:
    members = {field.name: getattr(packed, field.name) for field in fields(packed)}
    return {name: value for name, value in members.items() if isinstance(value, np.ndarray)}


def _write(path: Path, matrices: dict[str, PackedMatrix]) -> None:
    entries: dict[str, Any] = {}
    pieces: list[np.ndarray] = []
    offset = 0
    for name, packed in matrices.items():
        entry: dict[str, Any] = {"rows": packed.rows, "columns": packed.columns, "arrays": {}}
        entry |= {"kind": packed.kind} if isinstance(packed, FloatMatrix) else {"layout": asdict(packed.layout)}
        for field, array in _arrays(packed).items():
            entry["arrays"][field] = [offset, list(array.shape), array.dtype.str]
            pieces.append(array)
            offset += padded(array.nbytes, LINE)
        entries[name] = entry
    header = json.dumps({"bytes": offset, "matrices": entries}).encode()
    start = padded(_START.size + len(header), _PAGE)
    with whole_file(path, _WRITTEN_AT_ONCE) as file:
        file.write(_START.pack(_MAGIC, len(header), hashlib.sha256(header).digest()) + header)
        file.seek(start)
        for array in pieces:
            file.write(np.ascontiguousarray(array).data.cast("B"))
            file.write(bytes(-array.nbytes % LINE))


def _map(path: Path) -> dict[str, PackedMatrix]:
    """Map the matrices of a kept file; none if it does not exist. An incomplete file is removed."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.utime(path)
    except (OSError, ValueError):
        return {}
    try:
        magic, length, digest = _START.unpack_from(buffer)
        header = buffer[_START.size : _START.size + length]
        start = padded(_START.size + length, _PAGE)
        if magic != _MAGIC or hashlib.sha256(header).digest() != digest:
            raise ValueError("another kind of file")
        stated = json.loads(header)
        if start + stated["bytes"] != len(buffer):
            raise ValueError("not whole")
    except (struct.error, ValueError):
        path.unlink(missing_ok=True)
        return {}
    near = _in_huge_pages(buffer)
    return {name: _matrix(near, start, entry) for name, entry in stated["matrices"].items()}


def _in_huge_pages(buffer: mmap.mmap) -> mmap.mmap | np.ndarray:
    """Return a mapped file, or a copy of it where most of its pages are small and those of a copy are not."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or len(buffer) < LEAST_COPIED:
        return buffer
    mapped = np.frombuffer(buffer, np.uint8)
    with suppress(OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.madvise(_MADV_POPULATE_READ)
        share = _huge_share(mapped.ctypes.data, len(mapped))
        if share < LEAST_HUGE and "[never]" not in _ENABLED.read_text():
            copy = packing.huge_pages(len(mapped))[: len(mapped)]
            copy[:] = mapped
            copy.flags.writeable = False
            return copy
    return buffer


def _huge_share(address: int, size: int) -> float:
    """Return the share of a mapped file's `size` bytes that lies in huge pages. Raises `OSError` where Linux does not
    say."""
    is_there = False
    for line in _SMAPS.read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):  # a mapping's addresses
            first, _, last = name.partition("-")
            is_there = int(first, 16) <= address < int(last, 16)
        elif is_there and name == "FilePmdMapped:":
            return int(value.split()[0]) * 1024 / size
    raise OSError("no such mapping, or a kernel that does not count its huge pages")


def _matrix(buffer: mmap.mmap | np.ndarray, start: int, entry: dict[str, Any]) -> PackedMatrix:
    arrays: dict[str, Any] = {
        field: np.frombuffer(buffer, np.dtype(dtype), int(np.prod(shape)), start + offset).reshape(shape)
        for field, (offset, shape, dtype) in entry["arrays"].items()
    }
    if "kind" in entry:
        return FloatMatrix(entry["rows"], entry["columns"], entry["kind"], **arrays)
    layout = TileLayout(**entry["layout"])
    return QuantizedMatrix(entry["rows"], entry["columns"], layout, **{"minimums": None} | arrays)
