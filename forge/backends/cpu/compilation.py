"""Kernels become machine code here, once per machine: where compiled code is kept, and how stale code is never run.

Two compilers share one cache folder. Numba compiles the kernels that are written in Python (`@kernel`); llvmlite, which
is Numba's own back end, compiles the tiles that `tiles.py` generates.

Numba's on-disk cache looks at one function's own file and at nothing that the function uses. A changed helper, another
instruction set or another version would silently run old code. So the folder's *name* holds a digest of everything that
code depends on: all source files of this package, the versions of Python, NumPy, Numba and llvmlite, the processor, and
the instruction set. Anything different is another folder. If no folder can be written, code is kept in memory.
"""

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types

from forge.backends.cpu.features import choose_instruction_set, is_forced
from forge.backends.cpu.instruction_sets import InstructionSet
from forge.backends.cpu.tiles import MAX_ROWS, TILE_ARGUMENTS, TileLayout, emit_tile

CompileProgress = Callable[[int, int], None]
"""Called with (kernels ready, kernels in all) while code is being compiled."""

KERNEL_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)
"""Every kernel: (address of its operation, address of the batch context, thread number, number of threads)."""


@cache
def instruction_set() -> InstructionSet:
    """The instruction set of this process. Chosen once, before anything is compiled."""
    chosen = choose_instruction_set()
    if is_forced() and chosen.target_cpu is not None:
        # Compile everything as that machine would, not only the dot product.
        numba.config.CPU_NAME = chosen.target_cpu
        numba.config.CPU_FEATURES = ""
    return chosen


@cache
def cache_folder() -> Path | None:
    """Where compiled code is kept, or None if nothing can be written."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "forge" / f"kernels-{_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    numba.config.CACHE_DIR = str(folder)
    return folder


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    host = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    versions = (sys.version, np.__version__, numba.__version__, llvmlite.__version__, platform.machine())
    digest.update(repr((versions, host, instruction_set().name, is_forced())).encode())
    return digest.hexdigest()[:16]


class Kernel:
    """A Python function that Numba compiles to a C function on first use."""

    def __init__(self, function):
        self.function = function
        self.name = function.__name__
        self._compiled = None

    @property
    def is_cached(self) -> bool:
        """Whether using it needs no compiling."""
        return self._compiled is not None or _marked(self.name)

    def compile(self) -> None:
        if self._compiled is None:
            self._compiled = numba.cfunc(KERNEL_SIGNATURE, cache=cache_folder() is not None)(self.function)
            _mark(self.name)

    @property
    def address(self) -> int:
        """Where the machine code starts."""
        self.compile()
        return self._compiled.address

    @property
    def assembly(self) -> str:
        self.compile()
        return self._compiled._library.get_asm_str()


def kernel(function) -> Kernel:
    """Decorator: a kernel, compiled when it is first needed. Must be a function of a module, not a closure."""
    return Kernel(function)


class TileSet:
    """The tiles of one layout, for 1 to `MAX_ROWS` rows, compiled as one object file."""

    def __init__(self, layout: TileLayout):
        self.layout = layout
        self.name = f"tiles_{layout.name}"
        self._engine = None
        self.addresses = np.zeros(MAX_ROWS + 1, np.int64)
        """`addresses[rows]` is the tile function for that many rows; entry 0 is unused."""

    @property
    def is_cached(self) -> bool:
        return self._engine is not None or _marked(self.name)

    def compile(self) -> None:
        if self._engine is not None:
            return
        code = self._cached_object() or self._compile_object()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(instruction_set()))
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        for rows in range(1, MAX_ROWS + 1):
            self.addresses[rows] = engine.get_function_address(f"tile_{rows}")
        self._engine = engine

    def _cached_object(self) -> bytes | None:
        folder = cache_folder()
        try:
            return (folder / f"{self.name}.o").read_bytes() if folder and _marked(self.name) else None
        except OSError:
            return None

    def _compile_object(self) -> bytes:
        machine = target_machine(instruction_set())
        code = machine.emit_object(optimized_tiles(instruction_set(), self.layout, machine))
        folder = cache_folder()
        if folder is not None:
            temporary = folder / f"{self.name}.{os.getpid()}.tmp"
            temporary.write_bytes(code)
            temporary.replace(folder / f"{self.name}.o")
            _mark(self.name)
        return code

    @property
    def assembly(self) -> str:
        return tile_assembly(instruction_set(), self.layout)


def target_machine(isa: InstructionSet, triple: str | None = None) -> llvm.TargetMachine:
    """An LLVM code generator: for the processor in use, or as the set itself says when it is forced or foreign."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    own = triple is None and not (is_forced() and isa.target_cpu)
    cpu = llvm.get_host_cpu_name() if own else isa.target_cpu or ""
    features = llvm.get_host_cpu_features().flatten() if own else isa.target_features
    target = llvm.Target.from_triple(triple or llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="default", jit=triple is None)


def optimized_tiles(isa: InstructionSet, layout: TileLayout, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """The tile functions of a layout as an optimized LLVM module. No fast-math flag is set anywhere."""
    module = ir.Module(f"tiles_{layout.name}")
    module.triple = machine.triple
    integer = ir.IntType(64)
    for rows in range(1, MAX_ROWS + 1):
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [integer] * len(TILE_ARGUMENTS)), f"tile_{rows}")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        emit_tile(builder, isa, layout, rows, dict(zip(TILE_ARGUMENTS, function.args, strict=True)))
        builder.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(parsed, llvm.create_pass_builder(machine, options))
    return parsed


def tile_assembly(isa: InstructionSet, layout: TileLayout, triple: str | None = None) -> str:
    """The assembly of a layout's tiles, also for a machine that is not this one."""
    machine = target_machine(isa, triple)
    return machine.emit_assembly(optimized_tiles(isa, layout, machine))


@cache
def tile_set(layout: TileLayout) -> TileSet:
    """The one `TileSet` of a layout."""
    return TileSet(layout)


def compile_all(wanted: Iterable[Kernel | TileSet], on_progress: CompileProgress | None = None) -> None:
    """Make all of `wanted` ready. `on_progress` is called only if something really has to be compiled."""
    wanted = list(dict.fromkeys(wanted))
    cache_folder()
    missing = [item for item in wanted if not item.is_cached]
    for done, item in enumerate(missing):
        if on_progress is not None:
            on_progress(done, len(missing))
        item.compile()
    if missing and on_progress is not None:
        on_progress(len(missing), len(missing))
    for item in wanted:
        item.compile()


def _marked(name: str) -> bool:
    folder = cache_folder()
    return folder is not None and (folder / f"{name}.ready").exists()


def _mark(name: str) -> None:
    folder = cache_folder()
    if folder is not None:
        (folder / f"{name}.ready").touch()
