"""What this machine's processor can do, and how much of it this process may use."""

import ctypes
import os
import platform
from collections.abc import Collection
from functools import cache
from pathlib import Path

from forge.backends.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet
from forge.errors import UsageError

FORCE_VARIABLE = "FORGE_CPU_KERNEL"

_NEEDS = {
    "avx512-vnni": ("avx512vnni", "avx512bw", "avx512vl"),
    "avx-vnni": ("avxvnni", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon-dot": ("dotprod",),
    "portable": (),
}
"""The processor features (LLVM's names) without which an instruction set cannot run; best set first."""
_AT_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20
"""From Linux's asm/hwcap.h for arm64."""
_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")


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
    machines = {"avx512-vnni": _X86, "avx-vnni": _X86, "avx2": _X86, "neon-dot": _ARM}
    return tuple(
        name
        for name, needs in _NEEDS.items()
        if set(needs) <= set(features) and machine.lower() in machines.get(name, (machine.lower(),))
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
    quotas = [_quota_v2(folder) for folder in _with_parents(groups, unified)]
    quotas += [_quota_v1(folder) for folder in _with_parents(groups / "cpu", version_1)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _with_parents(root: Path, path: str) -> list[Path]:
    """Return the folder of the group `path` and of every group above it, up to `root`."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None
