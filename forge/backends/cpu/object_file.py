"""Loads the object files of kernels without LLVM, whose library has 180 MB: a process whose kernels are compiled never
opens it.

What LLVM makes of a kernel on x86-64 is an ELF file (System V ABI, chapter 4; processor supplement, 4.4) whose sections
are never written and refer to one another by distance. Any other file is LLVM's to load: that of another processor or
system, or one that needs more than this.
"""

import ctypes
import mmap
import platform
import sys
from collections.abc import Callable
from struct import iter_unpack, pack_into, unpack_from

Find = Callable[[str], int]
"""Returns the address of a function by its name."""

_ELF = b"\x7fELF\x02\x01\x01"
"""64 bits, little-endian, version 1."""
_SECTION, _SYMBOL, _RELOCATION = "<IIQQQQIIQQ", "<IBBHQQ", "<QIIq"
"""The entries of three tables."""
_SECTION_BYTES = 64
_CONTENTS, _SYMBOLS, _RELOCATIONS = 1, 2, 4
"""Types of sections."""
_WRITTEN, _IN_MEMORY = 1, 2
"""Flags of sections."""
_DISTANCES = (2, 4)
"""R_X86_64_PC32 and R_X86_64_PLT32: from a place to a symbol, in 32 bits."""
_UNDEFINED = 0
"""The section of a symbol that another library has."""
_CALLED = {"sched_yield"}
"""Functions of the C library that kernels call."""
_JUMP = b"\xff\x25\x02\x00\x00\x00\x90\x90"
"""Jump to the address that the next 8 bytes hold."""
_ALIGNMENT = 64


def load(code: bytes) -> Find | None:
    """Link an object file into memory that can be run; return what finds its functions. None for a file that is LLVM's
    to load.

    The memory stays until the process ends: until then, a thread may be inside.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64") or not code.startswith(_ELF):
        return None
    linked = _link(code)
    if linked is None or (start := _executable(linked[0])) is None:
        return None
    addresses = {name: start + place for name, place in linked[1].items()}
    return addresses.__getitem__


def _link(code: bytes) -> tuple[bytearray, dict[str, int]] | None:
    """Return an object file's code and constants as they lie in memory, and the places of its symbols in them."""
    (table,), (num_sections,) = unpack_from("<Q", code, 40), unpack_from("<H", code, 60)
    sections = list(iter_unpack(_SECTION, code[table : table + num_sections * _SECTION_BYTES]))
    image, starts, symbols, names = bytearray(), dict[int, int](), [], b""
    for number, (_, kind, flags, _, offset, size, names_of, _, alignment, _) in enumerate(sections):
        if kind == _CONTENTS and flags & _IN_MEMORY:
            if flags & _WRITTEN or alignment > _ALIGNMENT:
                return None
            starts[number] = len(image)
            image += code[offset : offset + size] + bytes(-size % _ALIGNMENT)
        elif kind == _SYMBOLS:
            symbols, names = list(iter_unpack(_SYMBOL, code[offset : offset + size])), code[sections[names_of][4] :]
    places, named = dict[int, int](), dict[str, int]()
    for number, (name_at, _, _, section, value, _) in enumerate(symbols):
        name = names[name_at : names.index(0, name_at)].decode()
        if section in starts:
            places[number] = named[name] = starts[section] + value
        elif section == _UNDEFINED and name in _CALLED:
            places[number] = len(image)
            address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
            image += _JUMP + (address or 0).to_bytes(8, "little")
    for _, kind, _, _, offset, size, _, section, _, _ in sections:
        if kind == _RELOCATIONS and section in starts:
            for at, how, symbol, addend in iter_unpack(_RELOCATION, code[offset : offset + size]):
                if how not in _DISTANCES or symbol not in places:
                    return None
                place = starts[section] + at
                pack_into("<i", image, place, places[symbol] + addend - place)
    return image, named


def _executable(image: bytearray) -> int | None:
    """Copy code into memory of its own that can be run, and no longer be written; return its address. None where the
    system allows no such memory."""
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start: int = library.mmap(None, len(image), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if start == ctypes.c_void_p(-1).value:
        return None
    ctypes.memmove(start, bytes(image), len(image))
    return None if library.mprotect(start, len(image), mmap.PROT_READ | mmap.PROT_EXEC) else start
