"""What the machine can do, and how much of it a process may use."""

import os
import platform

import llvmlite.binding as llvm
import pytest

from forge.backends.cpu import processor
from forge.backends.cpu.processor import (
    INSTRUCTION_SETS,
    cgroup_quota,
    choose_instruction_set,
    runnable,
    runnable_with,
    usable_cpus,
)
from forge.errors import UsageError
from tests.backends.cpu.models import run_python

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}


@pytest.mark.parametrize(
    ("found", "machine", "expected"),
    [
        (AVX512, "x86_64", ("avx512-vnni", "avx2", "portable")),
        (AVX512 | {"avx512bf16"}, "x86_64", ("avx512-bf16", "avx512-vnni", "avx2", "portable")),
        (AVX2 | {"avx512bf16"}, "x86_64", ("avx2", "portable")),
        (AVX512 | {"avxvnni"}, "AMD64", ("avx512-vnni", "avx-vnni", "avx2", "portable")),
        (AVX2 | {"avxvnni"}, "x86_64", ("avx-vnni", "avx2", "portable")),
        (AVX2, "x86_64", ("avx2", "portable")),
        (AVX512 - {"avx512bw"}, "x86_64", ("avx2", "portable")),
        (AVX2 - {"f16c"}, "x86_64", ("portable",)),
        ({"sse2"}, "x86_64", ("portable",)),
        ({"neon", "dotprod"}, "aarch64", ("neon-dot", "portable")),
        ({"neon", "dotprod"}, "arm64", ("neon-dot", "portable")),
        ({"neon"}, "aarch64", ("portable",)),
        (AVX512 | {"dotprod"}, "riscv64", ("portable",)),
        (set(), "riscv64", ("portable",)),
    ],
)
def test_a_machine_runs_what_its_features_allow_best_first(found, machine, expected):
    assert runnable_with(found, machine) == expected


def test_without_force_the_best_path_is_chosen(monkeypatch):
    monkeypatch.delenv(processor.FORCE_VARIABLE, raising=False)
    assert choose_instruction_set().name == runnable()[0]
    monkeypatch.setenv(processor.FORCE_VARIABLE, "")
    assert choose_instruction_set().name == runnable()[0]
    assert not processor.is_forced()


@pytest.mark.parametrize("name", runnable())
def test_a_forced_path_is_chosen(name, monkeypatch):
    monkeypatch.setenv(processor.FORCE_VARIABLE, name)
    assert choose_instruction_set().name == name


@pytest.mark.parametrize("name", ["AVX2", "sse", "neon-dot ", "avx512"])
def test_an_unknown_path_is_refused_with_the_ones_there_are(name, monkeypatch):
    monkeypatch.setenv(processor.FORCE_VARIABLE, name)
    with pytest.raises(UsageError, match=f"FORGE_CPU_KERNEL={name} is unknown; here there are .*portable") as raised:
        choose_instruction_set()
    assert "\n" not in str(raised.value)


def test_a_path_of_another_processor_is_refused(monkeypatch):
    monkeypatch.setattr(processor, "host_features", lambda: frozenset())
    monkeypatch.setenv(processor.FORCE_VARIABLE, "avx512-vnni")
    with pytest.raises(UsageError, match="avx512-vnni is not available on this processor; here there are portable"):
        choose_instruction_set()


@pytest.mark.skipif(platform.system() != "Linux", reason="/proc/cpuinfo is Linux's")
def test_what_cpuinfo_tells_of_features_is_what_llvm_finds():
    found = {name for name, present in llvm.get_host_cpu_features().items() if present}
    if not processor._may_use_tiles():  # which LLVM does not ask
        found -= processor._TILES
    asked_for = frozenset().union(*(kind.needs | kind.target_needs for kind in INSTRUCTION_SETS.values()))
    assert processor.host_features() & asked_for == found & asked_for


def test_where_cpuinfo_cannot_be_read_llvm_tells(back_here, monkeypatch):
    monkeypatch.setattr(processor, "_processor_info", lambda: {})
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": True, "fma": False})
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "znver9")
    processor.host_features.cache_clear()
    assert processor.host_features() - {"dotprod"} == {"avx2"}
    assert processor.host_model() == "znver9"


@pytest.mark.parametrize("granted", [True, False])
def test_tile_registers_are_used_where_the_system_grants_them(back_here, monkeypatch, granted):
    needed = " ".join(sorted(feature.replace("-", "_") for feature in INSTRUCTION_SETS["amx-int8"].needs))
    monkeypatch.setattr(processor, "_processor_info", lambda: {"flags": needed})
    asked = []

    def syscall(*numbers: int) -> int:
        asked.append(numbers)
        return 0 if granted else -1

    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: type("Library", (), {"syscall": staticmethod(syscall)}))
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    processor.host_features.cache_clear()
    assert processor.runnable()[0] == ("amx-int8" if granted else "avx512-bf16")
    assert asked == [(158, 0x1023, 18)]


def test_tile_registers_are_left_alone_where_no_system_is_asked(back_here, monkeypatch):
    monkeypatch.setattr(processor, "_processor_info", lambda: {})
    has = dict.fromkeys(INSTRUCTION_SETS["amx-int8"].needs, True)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: has)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    processor.host_features.cache_clear()
    assert processor.runnable()[0] == "avx512-bf16"


def on_arm(monkeypatch, system: str = "Linux", capabilities: int | None = None) -> None:
    """As if this were an ARM machine whose LLVM reports no `dotprod`; without `capabilities` there is no getauxval."""

    def getauxval(kind):
        assert kind == 16
        return capabilities

    library = type("Library", (), {} if capabilities is None else {"getauxval": staticmethod(getauxval)})
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(processor.platform, "system", lambda: system)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"neon": True})
    processor.host_features.cache_clear()


@pytest.fixture
def back_here():
    yield
    processor.host_features.cache_clear()


@pytest.mark.parametrize(
    ("system", "capabilities", "expected"),
    [
        ("Linux", 1 << 20 | 0xFF, ("neon-dot", "portable")),
        ("Linux", 0xFF, ("portable",)),
        ("Darwin", None, ("neon-dot", "portable")),
    ],
)
def test_an_arm_processors_dot_product_is_found_though_llvm_does_not_report_it(
    back_here, monkeypatch, system, capabilities, expected
):
    on_arm(monkeypatch, system, capabilities)
    assert runnable() == expected
    monkeypatch.setenv(processor.FORCE_VARIABLE, "neon-dot")
    assert choose_instruction_set().name == "neon-dot", "it can be forced where nothing tells"


def test_without_capability_bits_cpuinfo_tells(back_here, monkeypatch, tmp_path):
    on_arm(monkeypatch)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd aes asimddp sve\nCPU part\t: 0xd0c\n")
    assert processor.has_arm_dot_product(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd aes\n")
    assert not processor.has_arm_dot_product(cpuinfo)
    assert not processor.has_arm_dot_product(tmp_path / "none")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_the_affinity_mask_counts():
    code = (
        "import os\n"
        "from forge.backends.cpu.processor import usable_cpus\n"
        "print(usable_cpus())\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print(usable_cpus())\n"
    )
    result = run_python(["-c", code])
    before, after = map(int, result.stdout.split())
    assert 1 <= before <= len(os.sched_getaffinity(0))
    assert after == 1


@pytest.mark.parametrize(
    ("quota", "cpus", "expected"),
    [(None, 8, 8), (2.0, 8, 2), (2.9, 8, 2), (0.5, 8, 1), (16.0, 4, 4), (1.0, 1, 1)],
)
def test_the_quota_cuts_and_leaves_at_least_one(quota, cpus, expected, monkeypatch):
    monkeypatch.setattr(processor, "cgroup_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    assert usable_cpus() == expected


def write(root, files: dict[str, str]):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "100000 0\n"}, None),
        (
            {"proc/self/cgroup": "0::/user.slice/forge.service\n"}
            | {"sys/fs/cgroup/user.slice/forge.service/cpu.max": "400000 100000\n"}
            | {"sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n"},
            3.0,
        ),
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        (
            {"proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/docker/1\n"}
            | {"sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "250000\n"}
            | {"sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
    ],
)
def test_the_quota_of_control_groups(files, expected, tmp_path):
    assert cgroup_quota(write(tmp_path, files)) == expected
