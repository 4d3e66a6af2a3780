"""Facts about the machine that the operating system knows: processors, memory, and the limits of a container.

Plain functions that read files under `/proc` and `/sys` and answer None where a system does not say. `root` is the file
system's root, for tests.
"""

import os
import platform
import subprocess
from pathlib import Path

CPU_FEATURES = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "bf16",
    "sve",
)  # fmt: skip
"""Instruction sets that matter to matrix products, by their Linux names."""


def cpu_model(root: Path = Path("/")) -> str:
    """Return the processor's name."""
    for line in _lines(root / "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def cpu_features(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the features of `CPU_FEATURES` that the first processor has."""
    for line in _lines(root / "proc/cpuinfo"):
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            supported = set(flags.split())
            return tuple(feature for feature in CPU_FEATURES if feature in supported)
    return ("asimd",) if platform.machine() == "arm64" else ()


def memory_bytes(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(in all, available), the machine's or the container's, whichever is less."""
    amounts = [line.partition(":") for line in _lines(root / "proc/meminfo")]
    known = {name: int(kilobytes.split()[0]) * 1024 for name, _, kilobytes in amounts if name.startswith("Mem")}
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, used in _memory_limits(root):
        total = min(total or limit, limit)
        available = min(available if available is not None else limit, max(0, limit - used))
    return total, available


def huge_pages(root: Path = Path("/")) -> str | None:
    """When Linux gives huge pages: `always`, `madvise` (where a program asks for them, as forge does) or `never`."""
    for line in _lines(root / "sys/kernel/mm/transparent_hugepage/enabled"):
        return line.partition("[")[2].partition("]")[0] or None
    return None


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of every container around this process that sets a limit."""
    places = [(folder / "memory.max", folder / "memory.current") for folder in _cgroup_folders(root)]
    legacy = root / "sys/fs/cgroup/memory"
    places.append((legacy / "memory.limit_in_bytes", legacy / "memory.usage_in_bytes"))
    readings = [(_first_word(limit), _first_word(used)) for limit, used in places]
    return [
        (int(limit), int(used or 0))
        for limit, used in readings
        if limit and limit.isdigit() and int(limit) < 1 << 60  # without a limit, cgroup v1 states a huge one
    ]


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the cgroup v2 folders that hold this process, innermost first."""
    base = root / "sys/fs/cgroup"
    group = next((line[3:].strip() for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), "/")
    inner = base / group.lstrip("/")
    folders = [inner, *inner.parents]
    return [folder for folder in folders if folder == base or base in folder.parents]


def _sysctl(name: str) -> str | None:
    if platform.system() != "Darwin":
        return None
    try:
        process = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _first_word(path: Path) -> str | None:
    return next(iter(" ".join(_lines(path)).split()), None)
