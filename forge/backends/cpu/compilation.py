"""Kernels become machine code here, once per machine: where compiled code is kept, and how stale code is never run.
A wheel brings the code for common processors (`ahead`), and nothing is compiled there.

Two front ends, one back end. Numba turns the kernels that are written in Python (`@kernel`) into LLVM's intermediate
code, `tiles.py` generates that of the tiles itself, and from there on both go the same way: `llvm_compiler` makes an
object file of each for the processor in use (or for the one that a forced instruction set stands for), and
`object_file` loads it. A process that finds all object files loads neither Numba nor LLVM.

Object files are kept in a folder whose *name* holds a digest of everything that code depends on: all source files of
this package, the versions of Python, NumPy, Numba and llvmlite, the processor, and the instruction set. Anything
different is another folder. (Numba's own cache would not do for kernels: it looks at one function's file and at nothing
that the function uses.) Each file starts with the digest of its contents; what does not fit its digest is compiled
again. If no folder can be written, code is kept in memory. What a wheel brings is kept in the same form, in a folder
whose name holds the digest of the sources: no more decides what that code computes, since it is made for the least
processor of an instruction set, and is loaded by one that has all of this processor's features.
"""

import contextlib
import ctypes
import gc
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import llvmlite
import numpy as np

from forge.backends.cpu import object_file
from forge.backends.cpu.processor import (
    InstructionSet,
    choose_instruction_set,
    host_features,
    host_model,
    is_forced,
    usable_cpus,
)
from forge.backends.cpu.tiles import AMX, MAX_ROWS, PAIR, TileLayout, pairs_tiles

if TYPE_CHECKING:
    import llvmlite.binding as llvm

CompileProgress = Callable[[int, int], None]
"""Called with (kernels ready, kernels in all) while code is being compiled."""

_SLOWEST = "attention"
"""The kernel that takes a third of the time of all. It comes first, so that the others are compiled beside it."""
_ITEMS_PER_HELPER = 4
"""Kernels to compile for which another process is worth its start, which takes as long as one of them."""
KERNEL_BYTES = 4 << 20
"""About what the compiled code of all kernels takes."""
SHIPPED = Path(__file__).parent / "shipped"
"""The code that a wheel brings: a folder for each instruction set."""
KEEP_SECONDS = 30 * 86_400
_DIGEST_BYTES = hashlib.sha256().digest_size


@cache
def instruction_set() -> InstructionSet:
    """Return the instruction set of this process, chosen once before anything is compiled. Raises `UsageError` as in
    `processor`."""
    return choose_instruction_set()


@cache
def shipped_folder() -> Path | None:
    """Return the folder of the code that a wheel brings for this processor; None if there is none."""
    isa = instruction_set()
    folder = SHIPPED / shipped_name(isa)
    return folder if isa.target_needs <= host_features() and folder.is_dir() else None


def shipped_name(isa: InstructionSet) -> str:
    """Return the name of the folder of code that is made from these sources for any processor with `isa`."""
    return f"{sys.platform}-{platform.machine().lower()}-{isa.name}-{_sources().hexdigest()[:16]}"


@cache
def cache_folder() -> Path | None:
    """Return the folder of compiled code; None if nothing can be written."""
    try:
        return _made_folder()
    except OSError:
        return None


def cache_problem() -> str | None:
    """Say why compiled code cannot be kept, and what to do; None if it can."""
    try:
        with tempfile.TemporaryFile(dir=_made_folder()) as file:
            file.write(bytes(KERNEL_BYTES))  # a disk that is full takes an empty file
    except OSError as error:
        why = f"{error.filename or cache_root()}: {error.strerror or error}"
        return f"the kernels are compiled at each start, as no folder keeps them ({why}); " + (
            "make room, or set XDG_CACHE_HOME to a folder that can be written"
        )
    return None


def cache_root() -> Path:
    """Return the folder of everything that forge can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge"


def _made_folder() -> Path:
    """Return the folder of compiled code, and make it if needed. Raises `OSError` if it cannot be written."""
    root = cache_root()
    folder = root / f"kernels-{_digest()}"
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        os.utime(folder)
    if is_new:
        forget_unused(root.glob("kernels-*"))  # compiled code of other versions
    return folder


def forget_unused(paths: Iterable[Path]) -> None:
    """Remove the files and folders that have not been used for a month."""
    for path in paths:
        if time.time() - path.stat().st_mtime > KEEP_SECONDS:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(path: Path, buffering: int = -1) -> Iterator[IO[bytes]]:
    """Open a file that appears as `path` only once it is whole, though other processes may write it too. Raises
    `OSError`, and leaves nothing behind, if it cannot be written."""
    with tempfile.NamedTemporaryFile(
        buffering=buffering, dir=path.parent, prefix=".", suffix=".tmp", delete=False
    ) as file:
        try:
            yield file
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _sources() -> "hashlib._Hash":
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest


def _numba_version() -> str:
    """Return Numba's version, from the name of the folder beside it: to import `importlib.metadata` takes 20 ms, and
    Numba 300."""
    spec = find_spec("numba")
    if spec is not None and spec.origin is not None:
        for folder in Path(spec.origin).parents[1].glob("numba-*.dist-info"):
            return folder.name
    from importlib.metadata import version

    return version("numba")


def _digest() -> str:
    digest = _sources()
    host = (host_model(), sorted(host_features()))
    versions = (sys.version, np.__version__, _numba_version(), llvmlite.__version__, platform.machine())
    target = instruction_set().target_cpu if is_forced() else None
    digest.update(repr((versions, host, instruction_set().name, target)).encode())
    return digest.hexdigest()[:16]


class MachineCode:
    """Functions compiled into one object file, which a wheel brings or the cache folder keeps."""

    def __init__(self, name: str):
        self._compiling = threading.Lock()
        self.name = name
        self._code: bytes | None = None
        self._find: object_file.Find | None = None

    @property
    def is_cached(self) -> bool:
        """True if using it needs no compiling."""
        folders = (shipped_folder, cache_folder)
        self._code = self._code or next(filter(None, (_read_object(folder(), self.name) for folder in folders)), None)
        return self._code is not None

    def compile(self) -> None:
        """Make it ready to run: from the wheel or the cache folder, or by compiling it now and keeping it there."""
        if self._find is not None:
            return
        with self._compiling:  # engines on other threads may ask for it at once
            if self._find is not None:
                return
            if not self.is_cached:
                from forge.backends.cpu.llvm_compiler import compile_module

                self._code = compile_module(self._module(), instruction_set())
                _write_object(self.name, self._code)
            assert self._code is not None
            find = object_file.load(self._code)
            if find is None:
                from forge.backends.cpu.llvm_compiler import load

                find = load(self._code, instruction_set())
            self._find = find  # from here on other threads take addresses from it

    def _address(self, name: str) -> int:
        assert self._find is not None, "it is compiled"
        return self._find(name)

    def _module(self) -> "llvm.ModuleRef":
        """Return its intermediate code."""
        raise NotImplementedError


class Kernel(MachineCode):
    """A Python function of one of this package's modules that becomes a C function on first use.

    It is known by name, and neither its module nor Numba is loaded unless it has to be compiled: a process that finds
    its code in the cache folder starts in half the time.
    """

    def __init__(self, module: str, name: str, arguments: tuple[str | np.dtype, ...], result: str = "void"):
        """arguments: for each, the name of a number's type, or the layout of the structure that it points to."""
        super().__init__(name)
        self._module_name, self._arguments, self._result = module, arguments, result

    @property
    def address(self) -> int:
        """The address of the machine code."""
        self.compile()
        return self._address(self.name)

    def function(self, prototype: Callable[..., Any] = ctypes.CFUNCTYPE) -> Callable[..., Any]:
        """Return it as a Python function, which releases the interpreter's lock while it runs unless `prototype` is
        `ctypes.PYFUNCTYPE`."""
        result = None if self._result == "void" else ctypes.c_int64
        function: Callable[..., Any] = prototype(result, *[ctypes.c_int64] * len(self._arguments))(self.address)
        return function

    def _module(self):
        from forge.backends.cpu.numba_internals import c_function  # loads Numba

        function = getattr(import_module(f"{__package__}.{self._module_name}"), self.name)
        return c_function(self.name, function, self._arguments, self._result)


class TileSet(MachineCode):
    """The tiles of one layout, for 1 to `MAX_ROWS` rows, and a pair of tiles, compiled as one object file."""

    def __init__(self, layout: TileLayout):
        super().__init__(f"tiles_{layout.name}")
        self.layout = layout
        self.addresses = np.zeros(MAX_ROWS + 2, np.int64)
        """`addresses[rows]` is the tile function for that many rows, once compiled; `addresses[PAIR]` that for a pair,
        or 0 where single tiles are as fast; `addresses[AMX]` that by AMX, or 0 without it."""

    def compile(self) -> None:
        super().compile()
        if pairs_tiles(instruction_set(), self.layout):
            self.addresses[PAIR] = self._address("pair")
        if instruction_set().has_amx:
            self.addresses[AMX] = self._address("amx")
        for rows in range(1, MAX_ROWS + 1):
            self.addresses[rows] = self._address(f"tile_{rows}")

    def _module(self):
        from forge.backends.cpu.llvm_compiler import tile_module

        return tile_module(instruction_set(), self.layout)


tile_set = cache(TileSet)
"""Returns the one `TileSet` of a layout."""


def compile_all(items: Iterable[Kernel | TileSet], on_progress: CompileProgress | None = None) -> None:
    """Compile the items that are in no cache, and load them all. Calls `on_progress` only if it compiles something."""
    items = list(dict.fromkeys(items))
    missing = deque(sorted((item for item in items if not item.is_cached), key=lambda item: item.name != _SLOWEST))
    queued, total = tuple(missing), len(missing)
    if missing and (problem := cache_problem()) is not None:
        logging.getLogger("forge").warning("forge: %s", problem)
    tell = on_progress if on_progress is not None and missing else lambda done, total: None
    tell(0, total)
    helpers = [_Helper(missing) for _ in range(_helpers_for(total))]
    collects = gc.isenabled()
    gc.disable()  # Numba makes many objects and keeps them: looking through them takes a tenth of the time
    try:
        while missing:
            with contextlib.suppress(IndexError):  # a helper took the last one
                missing.popleft().compile()
            if missing:
                tell(sum(item.is_cached for item in queued), total)
        for helper in helpers:
            helper.join()
    finally:
        missing.clear()
        if collects:
            gc.enable()
    tell(total, total)
    for item in items:
        item.compile()


def _helpers_for(missing: int) -> int:
    """Return how many processes help: one per other CPU, if there is enough to do and a folder for the results."""
    return min(usable_cpus() - 1, missing // _ITEMS_PER_HELPER) if cache_folder() is not None and sys.executable else 0


class _Helper(threading.Thread):
    """Another process that compiles items of a queue and leaves them in the cache folder.

    Threads would not help: Numba and llvmlite hold a lock while they compile. If the process fails, what it was asked
    for is still missing and is compiled here.
    """

    def __init__(self, queue: "deque[Kernel | TileSet]"):
        super().__init__(name="forge-compile", daemon=True)
        self._queue = queue
        self.start()

    def run(self) -> None:
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-c", "from forge.backends.cpu.kernel_table import run; run()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with (
            contextlib.suppress(OSError, IndexError),
            subprocess.Popen(command, env=environment, **pipes) as process,  # type: ignore[call-overload]
        ):
            while True:
                print(self._queue.popleft().name, file=process.stdin, flush=True)
                if not process.stdout.readline():
                    break


def _read_object(folder: Path | None, name: str) -> bytes | None:
    """Read a kept object file; None if there is none or it is incomplete."""
    if folder is None:
        return None
    try:
        kept = (folder / f"{name}.o").read_bytes()
    except OSError:
        return None
    digest, code = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write_object(name: str, code: bytes) -> None:
    """Keep an object file. A full disk is ignored."""
    if (folder := cache_folder()) is not None:
        with contextlib.suppress(OSError), whole_file(folder / f"{name}.o") as file:
            file.write(hashlib.sha256(code).digest() + code)
