"""What this machine's processor can do, and how much of it this process may use.

There is one class per instruction set, for how a machine multiplies 16 x 4 bytes of weights with 4 bytes of
activations. Everything else in the kernels is plain vector arithmetic that LLVM maps to any machine. The int8 dot
product is not: it is the one operation for which processors have grown instructions, each a little different. All of
them compute

    acc[lane] += w[4*lane]*x[0] + w[4*lane + 1]*x[1] + w[4*lane + 2]*x[2] + w[4*lane + 3]*x[3]     lane = 0 … 15

exactly, in integers, so a result cannot depend on which one ran. Weights are unsigned bytes, activations signed.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir

from forge.backends.cpu.llvm_code import (
    BFLOAT,
    I8,
    I16,
    I32,
    I64,
    LANES,
    STORED,
    V_F32,
    V_I32,
    call_intrinsic,
    constant,
    fused_multiply_add,
    in_registers,
    load,
    narrow,
    shuffle,
    splat,
    store,
)
from forge.errors import UsageError

_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
_X86_64_V3 = frozenset(
    {"avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf", "sse4.2", "xsave"}
)
"""LLVM's names of the features that every processor of level x86-64-v3 has (x86-64 psABI)."""
FORCE_VARIABLE = "FORGE_CPU_KERNEL"

Weights = Callable[[], ir.Value]
"""Emits a line of weights: 16 lanes of four unsigned bytes."""
Inputs = Sequence[Callable[[], Any]]
"""Emit what each row has for a line: a function of `InstructionSet.inputs_of`."""


def _call_on_parts(
    builder: ir.IRBuilder, name: str, lanes: int, *vectors: ir.Value, factors: ir.Type | None = None
) -> ir.Value:
    """Call an intrinsic whose result has `lanes` int32 on equal parts of vectors; return all of its results as one.
    factors: the type of all parts but the first, if it is not that of the vectors."""
    of_32_bits = vectors[0].type.count * vectors[0].type.element.width // 32
    results, count = [], of_32_bits // lanes
    for index in range(count):
        parts: list[ir.Value] = []
        for vector in vectors:
            width = vector.type.count // count
            part = shuffle(builder, vector, range(index * width, (index + 1) * width))
            parts.append(builder.bitcast(part, factors) if parts and factors is not None else part)
        results.append(call_intrinsic(builder, name, ir.VectorType(I32, lanes), *parts))
    while len(results) > 1:
        pairs = zip(results[::2], results[1::2], strict=True)
        results = [shuffle(builder, a, range(2 * a.type.count), b) for a, b in pairs]
    return results[0]


class InstructionSet:
    """Emits the int8 dot product of one instruction set (`dot`), and names its target and the features it needs."""

    name: str
    needs: frozenset[str] = frozenset()
    """The processor features (LLVM's names) without which it cannot run."""
    machines: tuple[str, ...] = ()
    """`platform.machine()`'s names of the machines that have it; none for all."""
    instruction: str
    """The mnemonic that must appear in the machine code."""
    target_cpu: str | None = None
    """The LLVM processor model to compile for when this set is forced or shipped; None compiles for the machine in
    use."""
    target_features: str = ""
    target_needs: frozenset[str] = frozenset()
    """The processor features that code for `target_cpu` may use beside `needs`."""
    converts_half_by_call = False
    """Whether LLVM may have to call a library to convert float16, because the processor cannot."""
    signed_weights = False
    """Whether `dot` wants weights as signed bytes (w - 128) instead of unsigned ones."""
    sums_at_once = 4
    """How many vectors of 16 sums stay in registers beside what is added to them: 4 where one takes two of 16 registers
    (AVX2) or four of 32 (NEON)."""

    rows_at_once = 8
    """How many rows of a tile keep their integer sums in registers."""
    pairs_tiles = False
    """Whether the sums of two tiles fit the registers."""
    has_amx = False
    """Whether 16 rows are multiplied at a time by AMX (`amx_tiles.py`, `amx_attention.py`)."""

    def dot(self, builder: ir.IRBuilder, acc: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
        """acc, weights and x are 16 int32 lanes; a lane of weights is 4 bytes, each lane of x the same 4 bytes."""
        raise NotImplementedError

    def inputs_of(self, builder: ir.IRBuilder, rows: list[ir.Value], greatest: int) -> Callable[[int, int], Any]:
        """Return a function that emits, for a row and the number of a line, its four activations of a group as
        `add_lines` takes them. rows: addresses of their int8. greatest: the greatest weight that they meet."""
        return lambda row, number: splat(builder, load(builder, builder.add(rows[row], I64(4 * number)), I32))

    def add_lines(
        self, builder: ir.IRBuilder, sums: list[ir.Value], lines: Sequence[tuple[Weights, Inputs]], greatest: int
    ) -> list[ir.Value]:
        """Return the rows' sums with the products of some lines of weights added, none of them above `greatest`."""
        for weights_of, inputs in lines:
            weights = weights_of()
            sums = [self.dot(builder, total, weights, x_of()) for total, x_of in zip(sums, inputs, strict=True)]
        return sums

    def dot_pairs(self, builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """acc[lane] += a[2*lane]*b[2*lane] + a[2*lane + 1]*b[2*lane + 1], where a and b are signed 16-bit numbers, two
        in each of 16 int32 lanes."""
        sixteen = constant(V_I32, 16)
        for low_half in (True, False):
            left, right = (builder.ashr(builder.shl(x, sixteen) if low_half else x, sixteen) for x in (a, b))
            acc = builder.add(acc, builder.mul(left, right))
        return acc

    def dot_bfloat_pairs(self, builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """acc[lane] += a[2*lane + 1]*b[2*lane + 1], then += a[2*lane]*b[2*lane], where a and b are bfloat16 numbers,
        two in each of 16 int32 lanes, and acc is float32.

        Each sum is rounded once, as VDPBF16PS rounds it. That instruction takes subnormal numbers for zero: operands
        must be zero or at least 2^-50, so that every product and sum is zero or a multiple of 2^-114.
        """
        for number in (1, 0):
            acc = fused_multiply_add(builder, _widened(builder, a, number), _widened(builder, b, number), acc)
        return acc

    def to_bfloat(self, builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
        """Round 16 float32 lanes, zero or at least 2^-50, to the nearest bfloat16, ties to even, as int16."""
        return narrow(builder, a, "bf16")


def _widened(builder: ir.IRBuilder, pairs: ir.Value, number: int) -> ir.Value:
    """Return one bfloat16 of each pair, 0 or 1, as float32."""
    bits = builder.and_(pairs, constant(V_I32, -65536)) if number == 1 else builder.shl(pairs, constant(V_I32, 16))
    return builder.bitcast(bits, V_F32)


class Avx512Vnni(InstructionSet):
    """VPDPBUSD on 512 bits: 64 products in one instruction (Intel since Ice Lake, AMD since Zen 4)."""

    name = "avx512-vnni"
    needs, machines = frozenset({"avx512vnni", "avx512bw", "avx512vl"}), _X86
    instruction = "vpdpbusd"
    # Left to its preference for 256 bits, LLVM uses fewer vectors of 512 for this model.
    target_cpu, target_features = "x86-64-v4", "+avx512vnni,-prefer-256-bit"
    target_needs = _X86_64_V3 | {"avx512f", "avx512cd", "avx512dq"}
    sums_at_once = 16
    pairs_tiles = True

    def dot(self, builder, acc, weights, x):
        return call_intrinsic(builder, "llvm.x86.avx512.vpdpbusd.512", V_I32, acc, weights, x)

    def dot_pairs(self, builder, acc, a, b):
        return call_intrinsic(builder, "llvm.x86.avx512.vpdpwssd.512", V_I32, acc, a, b)


class Avx512Bf16(Avx512Vnni):
    """VDPBF16PS: 32 products of bfloat16 in one instruction (Intel since Cooper Lake, AMD since Zen 4)."""

    name = "avx512-bf16"
    needs = Avx512Vnni.needs | {"avx512bf16"}
    target_features = Avx512Vnni.target_features + ",+avx512bf16"

    def dot_bfloat_pairs(self, builder, acc, a, b):
        a, b = (builder.bitcast(x, ir.VectorType(BFLOAT, 32)) for x in (a, b))
        return call_intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V_F32, acc, a, b)

    def to_bfloat(self, builder, a):
        rounded = call_intrinsic(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFLOAT, LANES), a)
        return builder.bitcast(rounded, STORED["bf16"])


class AmxInt8(Avx512Bf16):
    """TDPBSSD on tile registers: 8,192 products of a group in one instruction (Intel since Sapphire Rapids)."""

    name = "amx-int8"
    needs = Avx512Bf16.needs | {"amx-tile", "amx-int8"}
    target_features = Avx512Bf16.target_features + ",+amx-tile,+amx-int8"
    pairs_tiles = False
    has_amx = True


class AvxVnni(InstructionSet):
    """VPDPBUSD on 256 bits, for processors that have it without AVX-512 (Intel since Alder Lake)."""

    name = "avx-vnni"
    needs, machines = frozenset({"avxvnni", "avx2", "fma", "f16c"}), _X86
    instruction = "vpdpbusd"
    target_cpu, target_features, target_needs = "x86-64-v3", "+avxvnni", _X86_64_V3

    def dot(self, builder, acc, weights, x):
        return _call_on_parts(builder, "llvm.x86.avx512.vpdpbusd.256", 8, acc, weights, x)

    def dot_pairs(self, builder, acc, a, b):
        return _call_on_parts(builder, "llvm.x86.avx512.vpdpwssd.256", 8, acc, a, b)


class Avx2(InstructionSet):
    """VPMADDWD on bytes widened to 16 bits, and VPMADDUBSW on small weights.

    The obvious instruction, VPMADDUBSW, adds two products in 16 bits and saturates: 255 * 127 * 2 does not fit. So even
    and odd bytes are widened apart, which needs no move across lanes, and multiplied as pairs of 16-bit numbers. Of
    weights of six bits and fewer the sums of several lines fit into 16 bits: of four bits those of a whole group.
    """

    name = "avx2"
    needs, machines = frozenset({"avx2", "fma", "f16c"}), _X86
    instruction = "vpmaddwd"
    target_cpu, target_needs = "x86-64-v3", _X86_64_V3
    rows_at_once = 4

    def dot(self, builder, acc, weights, x):
        return builder.add(acc, self._multiply_large(builder, weights, _bytes_apart(builder, x, signed=True)))

    def dot_pairs(self, builder, acc, a, b):
        wide = ir.VectorType(I16, 32)
        return builder.add(acc, self._multiply_pairs(builder, *(builder.bitcast(x, wide) for x in (a, b))))

    def inputs_of(self, builder, rows, greatest):
        if _lines_in_16_bits(greatest):
            return lambda row, number: splat(builder, load(builder, builder.add(rows[row], I64(4 * number)), I32), 8)
        # Widened once for all lines. They are read from the stack, because a load takes no turn of the multiplier.
        with builder.goto_entry_block():
            room = builder.ptrtoint(builder.alloca(ir.ArrayType(I8, 64 * len(rows))), I64)
        for row, address in enumerate(rows):
            halves = _bytes_apart(builder, load(builder, address, ir.VectorType(I32, 8)), signed=True)
            for side, half in enumerate(halves):
                store(builder, builder.add(room, I64(64 * row + 32 * side)), half)

        def inputs(row: int, number: int) -> list[ir.Value]:
            places = [builder.add(room, I64(64 * row + 32 * side + 4 * number)) for side in range(2)]
            return [splat(builder, load(builder, place, I32), 8) for place in places]

        return inputs

    def add_lines(self, builder, sums, lines, greatest):
        sides = range(0, 8), range(8, 16)
        parts = [shuffle(builder, total, side) for total in sums for side in sides]
        at_once, wide = _lines_in_16_bits(greatest), ir.VectorType(I16, 16)
        multiply = self._multiply_small if at_once else self._multiply_large
        for first in range(0, len(lines), at_once or len(lines)):
            totals = [constant(wide, 0)] * len(parts) if at_once else parts
            for weights_of, inputs in lines[first : first + (at_once or len(lines))]:
                weights = weights_of()
                of_sides = [shuffle(builder, weights, side) for side in sides]
                products = [multiply(builder, w, x) for x in (x_of() for x_of in inputs) for w in of_sides]
                both = zip(totals, products, strict=True)
                totals = in_registers(builder, [builder.add(total, product) for total, product in both])
            if at_once:
                totals = [self._multiply_pairs(builder, total, constant(wide, 1)) for total in totals]
                totals = [builder.add(part, total) for part, total in zip(parts, totals, strict=True)]
            parts = totals
        return [shuffle(builder, low, range(16), high) for low, high in zip(parts[::2], parts[1::2], strict=True)]

    def _multiply_small(self, builder, w, x):
        """Return the sums of two products each, in int16."""
        both = (builder.bitcast(vector, ir.VectorType(I8, 32)) for vector in (w, x))
        return call_intrinsic(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), *both)

    def _multiply_large(self, builder, w, x):
        """Return the sums of four products each, in int32. x: the even and the odd bytes, as int16."""
        halves = zip(_bytes_apart(builder, w, signed=False), x, strict=True)
        even, odd = (self._multiply_pairs(builder, half, builder.bitcast(of_x, half.type)) for half, of_x in halves)
        return builder.add(even, odd)

    def _multiply_pairs(self, builder, a, b):
        return _call_on_parts(builder, "llvm.x86.avx2.pmadd.wd", 8, a, b)


def _bytes_apart(builder: ir.IRBuilder, vector: ir.Value, signed: bool) -> list[ir.Value]:
    """Return the even and the odd bytes of a vector as int16."""
    wide = ir.VectorType(I16, 2 * vector.type.count)
    eight, vector = constant(wide, 8), builder.bitcast(vector, wide)
    if signed:
        return [builder.ashr(builder.shl(vector, eight), eight), builder.ashr(vector, eight)]
    return [builder.and_(vector, constant(wide, 0xFF)), builder.lshr(vector, eight)]


def _lines_in_16_bits(greatest: int) -> int:
    """Return of how many lines of weights, none above `greatest`, the products with int8 fit together into int16: two
    of each line."""
    return 32767 // (2 * 128 * greatest)


class NeonDot(InstructionSet):
    """SDOT of ARMv8.2: 16 products in one instruction, weights signed."""

    name = "neon-dot"
    needs, machines = frozenset({"dotprod"}), _ARM
    instruction = "sdot"
    target_features = "+dotprod"
    signed_weights = True

    def dot(self, builder, acc, weights, x):
        name, factors = "llvm.aarch64.neon.sdot.v4i32.v16i8", ir.VectorType(I8, 16)
        return _call_on_parts(builder, name, 4, acc, weights, x, factors=factors)


class Portable(InstructionSet):
    """Shifts and 32-bit multiplications of LLVM's own vectors: slow, and right on every machine.

    When forced on x86, code is made for the oldest 64-bit processor: no AVX, no fused multiplication, no float16.
    """

    name = "portable"
    instruction = "mul"
    target_cpu = "x86-64" if platform.machine().lower() in _X86 else None
    converts_half_by_call = True

    def dot(self, builder, acc, weights, x):
        for byte in range(4):
            up = constant(V_I32, 24 - 8 * byte)
            w = builder.and_(builder.lshr(weights, constant(V_I32, 8 * byte)), constant(V_I32, 0xFF))
            signed = builder.ashr(builder.shl(x, up), constant(V_I32, 24))
            acc = builder.add(acc, builder.mul(w, signed))
        return acc


assert LANES == 16
INSTRUCTION_SETS: dict[str, type[InstructionSet]] = {
    set_.name: set_ for set_ in (AmxInt8, Avx512Bf16, Avx512Vnni, AvxVnni, Avx2, NeonDot, Portable)
}
"""Best first."""

_AT_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20
"""From Linux's asm/hwcap.h for arm64."""


_TILES = frozenset({"amx-tile", "amx-int8", "amx-bf16"})
_LLVM_NAMES = {"abm": "lzcnt", "bmi1": "bmi", "lahf_lm": "sahf", "sse4_1": "sse4.1", "sse4_2": "sse4.2"}
_LLVM_NAMES |= {name.replace("-", "_"): name for name in _TILES}
"""LLVM's names of flags in /proc/cpuinfo. Those of the others differ in underscores alone, if at all."""
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""From Linux's asm/unistd_64.h, asm/prctl.h and asm/fpu/types.h."""


@cache
def host_features() -> frozenset[str]:
    """Return LLVM's names of the features that the processor and the operating system offer."""
    if flags := _processor_info().get("flags"):
        features = frozenset(_LLVM_NAMES.get(flag, flag.replace("_", "")) for flag in flags.split())
        return features if features.isdisjoint(_TILES) or _may_use_tiles() else features - _TILES
    import llvmlite.binding as llvm

    present = {name for name, is_present in llvm.get_host_cpu_features().items() if is_present}
    return frozenset(present - _TILES | ({"dotprod"} if is_arm() and has_arm_dot_product() else set()))


def _may_use_tiles() -> bool:
    """Ask Linux for AMX's tile registers, 8 KiB for each thread, which a process has only once it has asked."""
    with suppress(OSError, AttributeError):
        granted: int = ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
        return granted == 0
    return False


def host_model() -> str:
    """Return a name of the processor's model."""
    if info := _processor_info():
        return " ".join(info.get(name, "") for name in ("vendor_id", "cpu family", "model", "stepping"))
    import llvmlite.binding as llvm

    name: str = llvm.get_host_cpu_name()
    return name


def _processor_info(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return what Linux says of the first of x86 processors, without LLVM, which takes longer to load than everything
    else; nothing on another machine or system."""
    if platform.machine().lower() not in _X86:
        return {}
    try:
        first = cpuinfo.read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in first.splitlines())}


def is_arm() -> bool:
    return platform.machine().lower() in _ARM


def has_arm_dot_product(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if an ARM processor has SDOT, which LLVM does not report: from the kernel's capability bits, else from
    /proc/cpuinfo. Every 64-bit processor of Apple's has it."""
    if platform.system() == "Darwin":
        return True
    with suppress(OSError, AttributeError, TypeError):
        capabilities = ctypes.CDLL(None).getauxval
        capabilities.argtypes, capabilities.restype = [ctypes.c_ulong], ctypes.c_ulong
        return bool(capabilities(_AT_HWCAP) & _HWCAP_ASIMDDP)
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    return any("asimddp" in line.split() for line in lines if line.startswith("Features"))


def runnable() -> tuple[str, ...]:
    """List the instruction sets that this machine can run, best first."""
    return runnable_with(host_features(), platform.machine())


def runnable_with(features: Collection[str], machine: str) -> tuple[str, ...]:
    """List the instruction sets that a machine (by `platform.machine()`'s name) with these features can run, best
    first."""
    return tuple(
        name
        for name, kind in INSTRUCTION_SETS.items()
        if kind.needs <= set(features) and machine.lower() in (kind.machines or (machine.lower(),))
    )


def choose_instruction_set() -> InstructionSet:
    """Return the best instruction set, or the one that FORGE_CPU_KERNEL names. Raises `UsageError` if that one cannot
    run here."""
    forced = os.environ.get(FORCE_VARIABLE)
    if not forced:
        return INSTRUCTION_SETS[runnable()[0]]()
    takes_its_word = forced == "neon-dot" and is_arm()  # where no system call and no file tells
    if forced not in runnable() and not takes_its_word:
        problem = "unknown" if forced not in INSTRUCTION_SETS else "not available on this processor"
        raise UsageError(f"{FORCE_VARIABLE}={forced} is {problem}; here there are {', '.join(runnable())}")
    return INSTRUCTION_SETS[forced]()


def is_forced() -> bool:
    return bool(os.environ.get(FORCE_VARIABLE))


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use: its affinity mask, limited by the control group's quota.

    A quota of 2.5 CPUs gives 2: a third thread would be stopped now and then, and the others would wait for it.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs' worth of time that the control groups grant (version 2, then 1); None without a limit.

    This process's group and all that it lies in; where a container hides their names, the one that it shows as root.
    """
    groups = root / "sys/fs/cgroup"
    try:
        groups_file = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups_file = []
    lines = [line.split(":", 2) for line in groups_file if line.count(":") >= 2]
    unified = next((path for _, controllers, path in lines if controllers == ""), "/")
    version_1 = next((path for _, controllers, path in lines if "cpu" in controllers.split(",")), "/")
    quotas = [_quota(folder / "cpu.max") for folder in _with_parents(groups, unified)]
    folders = _with_parents(groups / "cpu", version_1)
    quotas += [_quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us") for folder in folders]
    return min((quota for quota in quotas if quota is not None), default=None)


def _with_parents(root: Path, path: str) -> list[Path]:
    """Return the folder of the group `path` and of every group above it, up to `root`."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota(*files: Path) -> float | None:
    """Return a quota over its period, which stand in one file or in two; None for no limit, `max` or -1."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
