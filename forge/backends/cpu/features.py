"""What this machine's processor can do, and how much of it this process may use."""

import os
import platform
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


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of the features that the processor and the operating system offer."""
    import llvmlite.binding as llvm

    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def runnable() -> tuple[str, ...]:
    """The instruction sets that this machine can run, best first."""
    machine = platform.machine().lower()
    x86, arm = machine in ("x86_64", "amd64"), machine in ("aarch64", "arm64")
    return tuple(
        name
        for name, needs in _NEEDS.items()
        if host_features().issuperset(needs)
        and (x86 or not name.startswith("avx"))
        and (arm or not name.startswith("neon"))
    )


def choose_instruction_set() -> InstructionSet:
    """The best one, or the one that FORGE_CPU_KERNEL names. Raises `UsageError` if that one cannot run here."""
    forced = os.environ.get(FORCE_VARIABLE)
    if not forced:
        return INSTRUCTION_SETS[runnable()[0]]()
    if forced not in runnable():
        problem = "unknown" if forced not in INSTRUCTION_SETS else "not available on this processor"
        raise UsageError(f"{FORCE_VARIABLE}={forced} is {problem}; here there are {', '.join(runnable())}")
    return INSTRUCTION_SETS[forced]()


def is_forced() -> bool:
    return bool(os.environ.get(FORCE_VARIABLE))


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity mask, cut by the control group's quota where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def _cgroup_quota() -> float | None:
    """CPUs' worth of time that the control group grants (version 2, then 1); None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return None if quota <= 0 else quota / period
    except (OSError, ValueError):
        return None
