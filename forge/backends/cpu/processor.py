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
from collections.abc import Collection
from functools import cache
from pathlib import Path

from llvmlite import ir

from forge.backends.cpu.llvm_code import I8, I16, I32, LANES, V_I32, call_intrinsic, constant, shuffle
from forge.errors import UsageError

_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
_X86_64_V3 = frozenset(
    {"avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf", "sse4.2", "xsave"}
)
"""LLVM's names of the features that every processor of level x86-64-v3 has (x86-64 psABI)."""
FORCE_VARIABLE = "FORGE_CPU_KERNEL"


def _call_on_parts(
    builder: ir.IRBuilder, name: str, lanes: int, *vectors: ir.Value, factors: ir.Type | None = None
) -> ir.Value:
    """Call an intrinsic whose result has `lanes` int32 on equal parts of vectors; return all of its results as one.
    factors: the type of all parts but the first, if it is not that of the vectors."""
    results, count = [], LANES // lanes
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

    def dot(self, builder: ir.IRBuilder, acc: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
        """acc, weights and x are 16 int32 lanes; a lane of weights is 4 bytes, each lane of x the same 4 bytes."""
        raise NotImplementedError

    def dot_pairs(self, builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """acc[lane] += a[2*lane]*b[2*lane] + a[2*lane + 1]*b[2*lane + 1], where a and b are signed 16-bit numbers, two
        in each of 16 int32 lanes."""
        sixteen = constant(V_I32, 16)
        for low_half in (True, False):
            left, right = (builder.ashr(builder.shl(x, sixteen) if low_half else x, sixteen) for x in (a, b))
            acc = builder.add(acc, builder.mul(left, right))
        return acc


class Avx512Vnni(InstructionSet):
    """VPDPBUSD on 512 bits: 64 products in one instruction (Intel since Ice Lake, AMD since Zen 4)."""

    name = "avx512-vnni"
    needs, machines = frozenset({"avx512vnni", "avx512bw", "avx512vl"}), _X86
    instruction = "vpdpbusd"
    # Left to its preference for 256 bits, LLVM uses fewer vectors of 512 for this model.
    target_cpu, target_features = "x86-64-v4", "+avx512vnni,-prefer-256-bit"
    target_needs = _X86_64_V3 | {"avx512f", "avx512cd", "avx512dq"}
    sums_at_once = 16

    def dot(self, builder, acc, weights, x):
        return call_intrinsic(builder, "llvm.x86.avx512.vpdpbusd.512", V_I32, acc, weights, x)

    def dot_pairs(self, builder, acc, a, b):
        return call_intrinsic(builder, "llvm.x86.avx512.vpdpwssd.512", V_I32, acc, a, b)


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
    """VPMADDWD on bytes widened to 16 bits.

    The obvious instruction, VPMADDUBSW, adds two products in 16 bits and saturates: 255 * 127 * 2 does not fit. So even
    and odd bytes are widened apart, which needs no move across lanes, and multiplied as pairs of 16-bit numbers.
    """

    name = "avx2"
    needs, machines = frozenset({"avx2", "fma", "f16c"}), _X86
    instruction = "vpmaddwd"
    target_cpu, target_needs = "x86-64-v3", _X86_64_V3

    def dot(self, builder, acc, weights, x):
        wide = ir.VectorType(I16, 32)
        eight, mask = constant(wide, 8), constant(wide, 0xFF)
        w, x = builder.bitcast(weights, wide), builder.bitcast(x, wide)
        even = self._multiply_pairs(builder, builder.and_(w, mask), builder.ashr(builder.shl(x, eight), eight))
        odd = self._multiply_pairs(builder, builder.lshr(w, eight), builder.ashr(x, eight))
        return builder.add(acc, builder.add(even, odd))

    def dot_pairs(self, builder, acc, a, b):
        wide = ir.VectorType(I16, 32)
        return builder.add(acc, self._multiply_pairs(builder, *(builder.bitcast(x, wide) for x in (a, b))))

    def _multiply_pairs(self, builder, a, b):
        return _call_on_parts(builder, "llvm.x86.avx2.pmadd.wd", 8, a, b)


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
    set_.name: set_ for set_ in (Avx512Vnni, AvxVnni, Avx2, NeonDot, Portable)
}
"""Best first."""

_AT_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20
"""From Linux's asm/hwcap.h for arm64."""


@cache
def host_features() -> frozenset[str]:
    """Return LLVM's names of the features that the processor and the operating system offer."""
    import llvmlite.binding as llvm

    features = {name for name, present in llvm.get_host_cpu_features().items() if present}
    return frozenset(features | ({"dotprod"} if is_arm() and has_arm_dot_product() else set()))


def is_arm() -> bool:
    return platform.machine().lower() in _ARM


def has_arm_dot_product(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if an ARM processor has SDOT, which LLVM does not report: from the kernel's capability bits, else from
    /proc/cpuinfo. Every 64-bit processor of Apple's has it."""
    if platform.system() == "Darwin":
        return True
    try:
        capabilities = ctypes.CDLL(None).getauxval
        capabilities.argtypes, capabilities.restype = [ctypes.c_ulong], ctypes.c_ulong
        return bool(capabilities(_AT_HWCAP) & _HWCAP_ASIMDDP)
    except (OSError, AttributeError, TypeError):
        pass
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
    for folder in _with_parents(groups / "cpu", version_1):
        quotas.append(_quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"))
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
