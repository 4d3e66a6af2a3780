"""Facts about a machine, read from a file system made for the purpose."""

from forge.cli import machine

CPUINFO = """processor\t: 0
model name\t: Example CPU 9000
flags\t\t: fpu sse avx2 fma avx512f avx512_vnni other

processor\t: 1
model name\t: Example CPU 9000
flags\t\t: fpu
"""


def lay_out(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_processor_is_known_by_name_and_features(tmp_path):
    root = lay_out(tmp_path, {"proc/cpuinfo": CPUINFO})
    assert machine.cpu_model(root) == "Example CPU 9000"
    assert machine.cpu_features(root) == ("avx2", "fma", "avx512f", "avx512_vnni")


def test_an_arm_processor_lists_features_under_another_name(tmp_path):
    root = lay_out(tmp_path, {"proc/cpuinfo": "Features\t: fp asimd asimddp i8mm\n"})
    assert machine.cpu_features(root) == ("asimd", "asimddp", "i8mm")


def test_memory_is_the_machines_or_the_containers(tmp_path):
    root = lay_out(tmp_path, {"proc/meminfo": "MemTotal:  1000000 kB\nMemFree: 5 kB\nMemAvailable: 800000 kB\n"})
    assert machine.memory_bytes(root) == (1_024_000_000, 819_200_000)
    lay_out(root, {"sys/fs/cgroup/memory.max": "500000000\n", "sys/fs/cgroup/memory.current": "100000000\n"})
    assert machine.memory_bytes(root) == (500_000_000, 400_000_000)


def test_a_container_without_a_limit_changes_nothing(tmp_path):
    root = lay_out(tmp_path, {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n"})
    lay_out(root, {"sys/fs/cgroup/memory.max": "max\n"})
    lay_out(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert machine.memory_bytes(root) == (1_024_000, 921_600)


def test_this_machine_has_a_cpu():
    assert machine.cpu_model()
