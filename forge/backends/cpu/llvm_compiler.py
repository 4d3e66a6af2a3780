"""LLVM makes machine code here: from intermediate code to object files, for the processor in use or that of a forced
instruction set. Its library is loaded with this module, so a process whose kernels are compiled does not import it.
"""

from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

from forge.backends.cpu.amx_tiles import AmxTileCode
from forge.backends.cpu.llvm_code import F32, HALF, I64, float_to_half, half_to_float
from forge.backends.cpu.object_file import Find
from forge.backends.cpu.processor import InstructionSet, is_arm, is_forced
from forge.backends.cpu.tiles import (
    AMX_ROWS,
    MAX_ROWS,
    PAIR_ROWS,
    TILE_ARGUMENTS,
    PairCode,
    TileCode,
    TileLayout,
    pairs_tiles,
)


def target_machine(isa: InstructionSet, triple: str | None = None) -> llvm.TargetMachine:
    """Create an LLVM code generator: for this processor, or for the set's own target if it is forced or foreign."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for_host = triple is None and not (is_forced() and isa.target_cpu)
    foreign_cpu = isa.target_cpu if triple is None or triple.startswith("x86_64") else None
    cpu = llvm.get_host_cpu_name() if for_host else foreign_cpu or ""
    features = _own_features(isa) if for_host else isa.target_features
    # LLVM's default code model aborts under qemu-user, which maps code and data far apart; the JIT's does not.
    code_model = "jitdefault" if triple is None and is_arm() else "default"
    target = llvm.Target.from_triple(triple or llvm.get_process_triple())
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel=code_model, jit=triple is None
    )


def _own_features(isa: InstructionSet) -> str:
    """List this processor's features for LLVM, with those of `isa` that it has and LLVM does not report."""
    features = llvm.get_host_cpu_features().flatten().split(",")
    return ",".join(
        [*features, *(feature for feature in isa.target_features.split(",") if is_arm() and feature not in features)]
    )


def compile_module(module: llvm.ModuleRef, isa: InstructionSet) -> bytes:
    """Make an object file of intermediate code. No fast-math flag is set anywhere."""
    machine = target_machine(isa)
    optimize(module, machine)
    code: bytes = machine.emit_object(module)
    return code


def optimize(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """Optimize intermediate code for a machine, in place."""
    module.triple = machine.triple
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def tile_module(isa: InstructionSet, layout: TileLayout) -> llvm.ModuleRef:
    """Return the intermediate code of a layout's tiles, for 1 to `MAX_ROWS` rows, and of a pair and by AMX where they
    are taken."""
    module = ir.Module(f"tiles_{layout.name}")
    signature = ir.FunctionType(ir.VoidType(), [I64] * len(TILE_ARGUMENTS))
    codes: list[tuple[str, int]] = [(f"tile_{rows}", rows) for rows in range(1, MAX_ROWS + 1)]
    codes += [("pair", PAIR_ROWS)] * pairs_tiles(isa, layout) + [("amx", AMX_ROWS)] * isa.has_amx
    for name, rows in codes:
        function = ir.Function(module, signature, name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        kind = AmxTileCode if name == "amx" else TileCode
        tile = kind(builder, isa, layout, rows, dict(zip(TILE_ARGUMENTS, function.args, strict=True)))
        (PairCode(tile) if name == "pair" else tile).emit()
        builder.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return parsed


def load(code: bytes, isa: InstructionSet) -> Find:
    """Load an object file of any processor and system that LLVM knows; return what finds the address of a function. The
    code is there as long as that is."""
    if isa.converts_half_by_call:
        _provide_half_conversions()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(isa))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    find: Find = engine.get_function_address
    return find


_HALF_CONVERSIONS = {
    "__extendhfsf2": (HALF, F32, half_to_float),
    "__truncsfhf2": (F32, HALF, float_to_half),
}
"""Functions that LLVM calls to convert a number where the processor has no instruction for it, with the types of their
argument and result, and their code. Few C libraries have them."""


@cache
def _provide_half_conversions() -> llvm.ExecutionEngine:
    """Let compiled code find `_HALF_CONVERSIONS`. Returns the engine, which must stay alive."""
    module = ir.Module()
    for name, (argument, result, emit) in _HALF_CONVERSIONS.items():
        function = ir.Function(module, ir.FunctionType(result, [argument]), f"forge{name}")
        builder = ir.IRBuilder(function.append_basic_block())
        builder.ret(emit(builder, function.args[0]))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    # For the least of processors: how a float16 is passed must not depend on what this one has.
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(reloc="pic", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    for name in _HALF_CONVERSIONS:
        llvm.add_symbol(name, engine.get_function_address(f"forge{name}"))
    return engine
