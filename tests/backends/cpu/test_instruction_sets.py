"""Every instruction set that this machine can run gives the same bits, and a forced one runs its own instructions."""

import ctypes
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from forge.backends.cpu import compilation, llvm_compiler
from forge.backends.cpu.llvm_code import I64, V_F32, V_I32, load, store
from forge.backends.cpu.llvm_compiler import optimize, target_machine, tile_module
from forge.backends.cpu.packing import LAYOUT_OF_TYPE, Q4, Q5M, Q6K, Q8
from forge.backends.cpu.processor import INSTRUCTION_SETS, runnable
from forge.backends.cpu.tiles import TILE_ARGUMENTS, TileCode
from tests.backends.cpu.models import run_python
from tests.slow import mostly_slow

LAYOUTS = sorted(set(LAYOUT_OF_TYPE.values()), key=lambda layout: layout.name)
PATHS = runnable()
X86 = platform.machine().lower() in ("x86_64", "amd64")
x86_only = pytest.mark.skipif(not X86, reason="what is looked for are x86 instructions")

MODELS = ["Q8_0", "Q4_1/bfloat16", "Q6_K", "F16/float32", "Q8_0/int8"]
"""Tensor type and dtype of keys and values: both widths of weights, with and without minimum, groups of 16, floats."""


@pytest.fixture(scope="module")
def forced_runs(tmp_path_factory) -> dict[str, dict]:
    """For each path a process of its own: what it printed, and its folder of compiled code."""
    cache = tmp_path_factory.mktemp("kernels") if _cache_is_unknown() else None

    def run(path: str) -> dict:
        environment = {"FORGE_CPU_KERNEL": path}
        if cache is not None:
            environment["XDG_CACHE_HOME"] = str(cache)
        result = run_python(["-m", "tests.backends.cpu.digests", *MODELS], **environment)
        assert result.returncode == 0, result.stderr
        name, folder, *digests = result.stdout.split("\n")
        return {"name": name, "folder": folder, "digests": digests}

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PATHS, pool.map(run, PATHS), strict=True))


def _cache_is_unknown() -> bool:
    """Without a folder for this process there is none for others; then they get one of the test's."""
    return compilation.cache_folder() is None


def test_there_is_always_a_path_and_portable_is_the_last():
    assert PATHS[-1] == "portable"


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_forced_path_is_the_one_in_use(forced_runs, path):
    assert forced_runs[path]["name"] == path


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_every_path_gives_the_same_bits(forced_runs, path):
    assert forced_runs[path]["digests"] == forced_runs["portable"]["digests"]
    assert len({line.split()[1] for line in forced_runs[path]["digests"] if line}) == len(MODELS)


def machine_code(folder: str, tmp_path: Path) -> dict[str, str]:
    """The disassembly of every object file in a folder of compiled code, by name."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed; test_the_assembly_of_tiles_… looks at the same code before it is stored")
    code = {}
    for kept in sorted(Path(folder).glob("*.o")):
        plain = tmp_path / kept.name
        plain.write_bytes(kept.read_bytes()[32:])  # after the digest
        command = ["objdump", "-d", "--no-show-raw-insn", str(plain)]
        code[kept.stem] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return code


@pytest.mark.slow
@x86_only
@pytest.mark.parametrize("path", PATHS)
def test_what_a_forced_path_ran_is_its_own_instructions(forced_runs, path, tmp_path):
    """Of the very bytes that were executed: kernels and tiles."""
    code = machine_code(forced_runs[path]["folder"], tmp_path)
    tiles = {name: text for name, text in code.items() if name.startswith("tiles_")}
    assert len(tiles) >= 3
    assert {"attention", "rms_norm", "matmul_quantized", "gate_up_swiglu", "matmul_f16", "norm_rope_store"} <= set(code)
    everything = "\n".join(code.values())
    if path != "portable":
        for text in tiles.values():
            assert INSTRUCTION_SETS[path].instruction in text
    if path.startswith(("avx512", "amx")):
        assert all(re.search(r"vpdpbusd .*zmm", text) for text in tiles.values())
        assert "%zmm" in code["attention"]
        assert ("vdpbf16ps" in everything) == (path != "avx512-vnni")
        assert all(("tdpb" in text) == path.startswith("amx") for text in [*tiles.values(), code["attention"]])
        return
    assert "%zmm" not in everything
    assert not re.search(r"%k[0-7]\b", everything)
    saturates = [name for name, text in code.items() if "vpmaddubsw" in text]
    assert path == "avx2" or not saturates
    assert not any(name.startswith("tiles_q8b128") for name in saturates), "weights of 8 bits do not fit"
    if path in ("avx-vnni", "avx2"):
        assert all("%ymm" in code[name] for name in ("attention", "rms_norm", *tiles))
    if path == "avx2":
        assert "vpdpbusd" not in everything
    if path == "portable":
        assert "%ymm" not in everything
        assert not re.search(r"\tv[a-z0-9]+ .*%xmm", everything), "AVX encodings"
        assert "pdpbusd" not in everything


def foreign_assembly(name: str, layout, triple: str | None = None) -> str:
    """The assembly of a layout's tiles, for this or another machine."""
    isa = INSTRUCTION_SETS[name]()
    machine = target_machine(isa, triple)
    module = tile_module(isa, layout)
    optimize(module, machine)
    return machine.emit_assembly(module)


@x86_only
@pytest.mark.parametrize("layout", mostly_slow([Q8, Q4], quick=[Q8]), ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", ["avx512-vnni", "avx-vnni", "avx2"])
def test_the_assembly_of_tiles_has_the_instruction_that_the_path_is_named_for(name, layout, monkeypatch):
    """Also of paths that this machine cannot run: compiled for the processor that they stand for."""
    monkeypatch.setattr(llvm_compiler, "is_forced", lambda: True)

    assembly = foreign_assembly(name, layout)

    assert INSTRUCTION_SETS[name].instruction in assembly
    assert ("zmm" in assembly) == (name == "avx512-vnni")
    assert ("vpmaddubsw" in assembly) == (name == "avx2" and layout.bits < 8), "it saturates with weights of 8 bits"


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, quick=[Q8, Q4]), ids=lambda layout: layout.name)
def test_neon_tiles_compile_for_arm_with_its_dot_product(layout):
    assembly = foreign_assembly("neon-dot", layout, "aarch64-linux-gnu")
    for rows in range(1, 9):
        assert re.search(rf"^tile_{rows}:", assembly, re.MULTILINE)
    # 8 lines of 4 quarters per row and group.
    assert len(re.findall(r"\bsdot\b", assembly)) >= sum(32 * rows for rows in range(1, 9))
    assert not re.search(r"\bbl\t", assembly), "a call out of a tile"


@pytest.mark.slow
def test_portable_tiles_compile_for_arm():
    assembly = foreign_assembly("portable", Q4, "aarch64-linux-gnu")
    assert "sdot" not in assembly
    assert "fmla" in assembly


# Sums that would saturate


class OneTile:
    """The tile of one layout and number of rows for one instruction set, called through ctypes."""

    def __init__(self, name: str, layout, rows: int):
        module = ir.Module("one_tile")
        integer = ir.IntType(64)
        signature = ir.FunctionType(ir.VoidType(), [integer] * len(TILE_ARGUMENTS))
        function = ir.Function(module, signature, "tile")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        arguments = dict(zip(TILE_ARGUMENTS, function.args, strict=True))
        TileCode(builder, INSTRUCTION_SETS[name](), layout, rows, arguments).emit()
        builder.ret_void()
        machine = target_machine(INSTRUCTION_SETS[name]())
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
        self.engine.finalize_object()
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(TILE_ARGUMENTS))
        self.function = prototype(self.engine.get_function_address("tile"))

    def __call__(self, **arguments: int) -> None:
        self.function(*(arguments.get(name, 0) for name in TILE_ARGUMENTS))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", [Q8, Q6K, Q5M, Q4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("activation", [127, -127, -128])
@pytest.mark.parametrize("weight", ["largest", "smallest", "alternating"])
def test_extreme_weights_times_extreme_activations_are_exact(path, layout, weight, activation):
    """255 * 127 twice does not fit into 16 bits: an instruction that adds pairs there would saturate."""
    top = layout.greatest
    fill = top if layout.bits == 8 else 255
    quants = _aligned(np.full((layout.bits, 64), 0 if weight == "smallest" else fill, np.uint8))
    unsigned = np.full((16, 32), 0 if weight == "smallest" else top, np.int64)
    if weight == "alternating":
        quants[:, 1::2] = unsigned[:, 1::2] = 0
    scales, minimums = _scales_of_one(layout)
    rows = 5
    x = np.full((rows, 32), activation, np.int8)
    x[1, ::2] = 1  # another pattern beside it
    x_scales, out = np.ones((rows, 2), np.float32), np.full((rows, 16), np.nan, np.float32)
    x_sums = x.astype(np.int32).reshape(rows, 2, 16).sum(axis=2, dtype=np.int32)

    OneTile(path, layout, rows)(
        weights=quants.ctypes.data,
        scales=scales.ctypes.data,
        minimums=minimums.ctypes.data,
        x=x.ctypes.data,
        x_scales=x_scales.ctypes.data,
        x_sums=x_sums.ctypes.data,
        out=out.ctypes.data,
        num_groups=1,
        x_stride=32,
        out_stride=16,
    )

    want = x.astype(np.int64) @ (unsigned - layout.bias).T
    np.testing.assert_array_equal(out, want.astype(np.float32))


def _scales_of_one(layout) -> tuple[np.ndarray, np.ndarray]:
    """Scales of 1 and minimums of 0 of one group for 16 weight rows."""
    ones, zeros = np.ones(16, np.float16), np.zeros(16, np.float16)
    if layout.scale_kind == "f16":
        return _aligned(ones), _aligned(zeros)
    factors = [ones, zeros] if layout.has_minimum else [ones]
    integers = np.zeros((256 // layout.group, layout.integer_bytes), np.int8)
    integers[:, :16] = 1
    superblock = np.concatenate([factor.view(np.uint8) for factor in factors] + [integers.view(np.uint8).reshape(-1)])
    assert superblock.size == layout.superblock_bytes
    return _aligned(superblock), _aligned(zeros)


def _aligned(array: np.ndarray) -> np.ndarray:
    from forge.backends.cpu.packing import aligned_empty

    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


# Products of pairs, which attention takes of int8 and of bfloat16 values


def pairs_module(isa, operation: str = "dot_pairs") -> ir.Module:
    """A module with `pairs(sums, a, b)`: each an address of 16 numbers of 32 bits, the last two of as many pairs."""
    module = ir.Module("pairs")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), "pairs")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    kinds = V_I32 if operation == "dot_pairs" else V_F32, V_I32, V_I32
    vectors = [load(builder, address, kind) for address, kind in zip(function.args, kinds, strict=True)]
    store(builder, function.args[0], getattr(isa, operation)(builder, *vectors))
    builder.ret_void()
    return module


def add_pairs(path: str, operation: str, sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """sums `[N, 16]` += the products of pairs `[N, 16, 2]`, by that instruction set."""
    isa = INSTRUCTION_SETS[path]()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(pairs_module(isa, operation))), target_machine(isa))
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(engine.get_function_address("pairs"))
    for rows in zip(sums, a, b, strict=True):
        function(*(row.ctypes.data for row in rows))


@pytest.mark.parametrize("path", PATHS)
def test_sums_of_products_of_extreme_pairs_are_exact(path):
    extremes = [-32767, -128, -1, 0, 1, 127, 32767]
    a, b = (np.resize(np.array(extremes * step, np.int16), (7, 16, 2)) for step in (1, 3))
    b = np.ascontiguousarray(b[::-1])
    sums = np.full((7, 16), -5, np.int32)

    add_pairs(path, "dot_pairs", sums, a, b)

    want = (a.astype(np.int64) * b).sum(axis=2) - 5
    assert np.abs(want).max() > 2**30
    np.testing.assert_array_equal(sums, want)


@pytest.mark.parametrize("path", PATHS)
def test_sums_of_bfloat16_products_are_rounded_alike_on_every_path(path):
    """The second product is added first, each sum rounded once; from 2^-50 on no result is subnormal."""
    rng = np.random.default_rng(7)
    a, b = (_bfloats(rng, (400, 16, 2)) for _ in range(2))
    sums = np.ldexp(rng.standard_normal((400, 16), np.float32), rng.integers(-60, 60, (400, 16)))
    want = sums.copy()
    for number in (1, 0):
        exact = [
            [Fraction(float(x)) for x in rows.ravel()] for rows in (want, _wide(a[..., number]), _wide(b[..., number]))
        ]
        rounded = [_float32(total + x * y) for total, x, y in zip(*exact, strict=True)]
        want = np.array(rounded, np.float32).reshape(sums.shape)

    add_pairs(path, "dot_bfloat_pairs", sums, a, b)

    np.testing.assert_array_equal(sums.view(np.int32), want.view(np.int32))


def _bfloats(rng, shape: tuple[int, ...]) -> np.ndarray:
    """Random bfloat16 in their bits, uint16: both signs, from 2^-50 to 2^40, some of them 0, which is +0."""
    bits = (rng.integers(127 - 50, 127 + 40, shape) << 7 | rng.integers(0, 128, shape)).astype(np.uint16)
    signs = rng.integers(0, 2, shape).astype(np.uint16) << 15
    return np.where(rng.random(shape) < 0.1, np.uint16(0), bits | signs)


def _wide(bfloats: np.ndarray) -> np.ndarray:
    return (bfloats.astype(np.uint32) << 16).view(np.float32)


def _float32(exact: Fraction) -> np.float32:
    """Round once, to nearest, ties to even. A float64 would round before."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(side) * np.float32(np.inf)) for side in (-1, 1)]
    return min([guess, *near], key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1))


@x86_only
@pytest.mark.parametrize(
    ("name", "operation", "instruction", "times"),
    [
        ("avx512-bf16", "dot_bfloat_pairs", "vdpbf16ps", 1),
        ("avx512-vnni", "dot_pairs", "vpdpwssd", 1),
        ("avx-vnni", "dot_pairs", "vpdpwssd", 2),
        ("avx2", "dot_pairs", "vpmaddwd", 2),
    ],
)
def test_pairs_are_multiplied_by_one_instruction(name, operation, instruction, times, monkeypatch):
    monkeypatch.setattr(llvm_compiler, "is_forced", lambda: True)
    isa = INSTRUCTION_SETS[name]()

    assembly = target_machine(isa).emit_assembly(llvm.parse_assembly(str(pairs_module(isa, operation))))

    assert len(re.findall(rf"\b{instruction}\b", assembly)) == times


# float16 on processors that cannot convert it

HALF_LOOPS = """
define void @widen(ptr %source, ptr %target, i64 %count) {
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %from = getelementptr half, ptr %source, i64 %i
  %half = load half, ptr %from
  %float = fpext half %half to float
  %to = getelementptr float, ptr %target, i64 %i
  store float %float, ptr %to
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %loop, label %done
done:
  ret void
}
define void @narrow(ptr %source, ptr %target, i64 %count) {
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %from = getelementptr float, ptr %source, i64 %i
  %float = load float, ptr %from
  %half = fptrunc float %float to half
  %to = getelementptr half, ptr %target, i64 %i
  store half %half, ptr %to
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""


@pytest.fixture(scope="module")
def half_loops():
    """`widen` and `narrow` for the oldest x86-64: each conversion calls the library function that forge provides."""
    llvm_compiler._provide_half_conversions()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(cpu="x86-64", reloc="pic", opt=2, jit=True)
    module = llvm.parse_assembly(HALF_LOOPS)
    assembly = machine.emit_assembly(module)
    assert "__extendhfsf2" in assembly
    assert "__truncsfhf2" in assembly
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    functions = [prototype(engine.get_function_address(name)) for name in ("widen", "narrow")]
    yield functions
    del engine


@x86_only
def test_every_float16_widens_without_an_instruction_for_it(half_loops):
    halves = np.arange(2**16, dtype=np.uint16)
    out = np.zeros(2**16, np.float32)

    half_loops[0](halves.ctypes.data, out.ctypes.data, len(halves))

    want = halves.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(out), ~numbers)
    np.testing.assert_array_equal(out[numbers].view(np.uint32), want[numbers].view(np.uint32))


@x86_only
def test_floats_narrow_to_the_nearest_float16_without_an_instruction_for_it(half_loops):
    """Every float16, everything halfway between two and one bit beside that, and a million floats of any size."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = ((halves[:-1].astype(np.float64) + halves[1:]) / 2).astype(np.float32)
    near = np.concatenate([halves, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])
    edges = np.array([65519.996, 65520.0, 65520.004, 1e10, np.inf, np.nan, 2.0**-25, 2.0**-26, 1e-45], np.float32)
    anything = np.random.default_rng(1).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    floats = np.concatenate([near, -near, edges, -edges, anything.astype(np.float32)])
    out = np.zeros(len(floats), np.uint16)

    half_loops[1](floats.ctypes.data, out.ctypes.data, len(floats))

    with np.errstate(over="ignore", invalid="ignore"):
        want = floats.astype(np.float16)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(out.view(np.float16)), ~numbers)
    np.testing.assert_array_equal(out[numbers], want[numbers].view(np.uint16))


# Forcing what is not there


@pytest.mark.parametrize(
    ("forced", "problem"),
    [("sse9", "is unknown"), ("neon-dot" if X86 else "avx2", "is not available on this processor")],
)
def test_a_path_that_cannot_run_is_one_line_before_anything_is_loaded(forced, problem):
    code = (
        "from forge.backends.devices import create_backend\n"
        "from forge.errors import UsageError\n"
        "try:\n    create_backend('cpu')\n"
        "except UsageError as error:\n    print(error)\n"
        "else:\n    print('no error')\n"
    )
    result = run_python(["-c", code], FORGE_CPU_KERNEL=forced)
    assert result.stdout.strip() == f"FORGE_CPU_KERNEL={forced} {problem}; here there are {', '.join(PATHS)}"
    assert result.returncode == 0
    assert result.stderr == ""
