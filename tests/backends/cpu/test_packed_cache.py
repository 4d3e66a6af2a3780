"""Packed weights are kept in a file and mapped by the next start, unless it is damaged or made from another model."""

import os
from pathlib import Path

import numpy as np
import pytest

from forge.backends.choices import PACKED_WEIGHTS
from forge.backends.cpu import packed_cache
from forge.backends.cpu.backend import CpuBackend
from forge.backends.cpu.packing import FloatMatrix
from forge.model.loader import load_qwen3, open_weights
from forge.model.manual_batch import one_prefill
from forge.model.qwen3 import Qwen3
from tests.small_models import write_small_qwen3

TOKENS = np.random.default_rng(0).integers(0, 280, 20).tolist()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where packed weights are kept, of the smallest model too."""
    monkeypatch.setattr(packed_cache, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 1)
    monkeypatch.delenv(PACKED_WEIGHTS, raising=False)
    return tmp_path / "cache" / "weights"


def load(path: Path, quantize: str | None = None) -> Qwen3:
    with open_weights(path) as source:
        return load_qwen3(source, CpuBackend(1, quantize))


def is_mapped(model: Qwen3) -> bool:
    packed = model.weights.layers[0].attn_q.packed
    array = packed.values if isinstance(packed, FloatMatrix) else packed.quants
    return not array.flags.writeable


@pytest.mark.parametrize("tensor_type", ["F32", "BF16", "Q8_0", "Q4_1", "Q6_K", "Q2_K", "IQ3_XXS"])
def test_the_second_start_maps_what_the_first_has_written(folder, tmp_path, tensor_type):
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_layers": 1}
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type=tensor_type, tie=False, **sizes)
    first = load(path)
    (kept,) = folder.iterdir()
    written = kept.stat().st_mtime_ns, kept.read_bytes()
    second = load(path)
    assert not is_mapped(first) and is_mapped(second)
    assert one_prefill(first, TOKENS).tobytes() == one_prefill(second, TOKENS).tobytes()
    assert [file.read_bytes() for file in folder.iterdir()] == [written[1]]


def test_a_mixture_of_experts_is_kept_too(folder, tmp_path):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40}
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0", **moe)
    first, second = load(path), load(path)
    assert is_mapped(second) and not second.weights.layers[0].ffn_gate_exps.packed.quants.flags.writeable
    assert one_prefill(first, TOKENS).tobytes() == one_prefill(second, TOKENS).tobytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: b"other" + data[5:],
    ],
    ids=["short", "long", "empty", "cut", "header", "magic"],
)
def test_a_damaged_file_is_made_again(folder, tmp_path, damage):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0")
    expected = one_prefill(load(path), TOKENS)
    (kept,) = folder.iterdir()
    sound = kept.read_bytes()
    kept.write_bytes(damage(sound))
    assert one_prefill(load(path), TOKENS).tobytes() == expected.tobytes()
    assert kept.read_bytes() == sound and is_mapped(load(path))


def test_another_file_in_the_same_place_is_packed_anew(folder, tmp_path):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0", seed=1)
    before, stat = one_prefill(load(path), TOKENS), path.stat()
    write_small_qwen3(path, tensor_type="Q8_0", seed=2)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    after = load(path)
    assert not is_mapped(after) and one_prefill(after, TOKENS).tobytes() != before.tobytes()


def test_what_floats_are_quantized_to_makes_another_file(folder, tmp_path):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="F32")
    load(path)
    assert not is_mapped(load(path, "q8_0")) and is_mapped(load(path, "q8_0")) and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("value", ["off", "0"])
def test_it_can_be_switched_off(folder, tmp_path, monkeypatch, value):
    monkeypatch.setenv(PACKED_WEIGHTS, value)
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0")
    assert not is_mapped(load(path)) and not is_mapped(load(path)) and not folder.exists()


def test_small_models_are_not_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 1 << 30)
    load(write_small_qwen3(tmp_path / "m.gguf"))
    assert not folder.exists()


def test_without_room_or_a_folder_it_does_without(folder, tmp_path, monkeypatch):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0")
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    assert not is_mapped(load(path)) and list(folder.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(packed_cache, "cache_root", lambda: tmp_path / "file")
    assert not is_mapped(load(path))


def test_a_load_that_fails_leaves_nothing(folder, tmp_path):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0")

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_weights(path) as source:
        load_qwen3(source, CpuBackend(1), interrupt)
    assert not folder.exists()


def test_files_that_were_not_used_for_a_month_go(folder, tmp_path):
    folder.mkdir(parents=True)
    (folder / "old.packed").write_bytes(b"x")
    os.utime(folder / "old.packed", (0, 0))
    load(write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0"))
    assert [file.name for file in folder.iterdir()] != ["old.packed"] and len(list(folder.iterdir())) == 1


def mapping_of(model: Qwen3) -> str:
    """Return the line of /proc/self/maps that a model's weights lie in."""
    address = model.weights.layers[0].attn_q.packed.quants.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return line
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("share", "system", "is_copied"),
    [(0.5, "always [madvise] never", True), (0.95, "always [madvise] never", False), (0.5, "madvise [never]", False)],
)
def test_weights_in_small_pages_are_copied_where_a_copy_has_large_ones(
    folder, tmp_path, monkeypatch, share, system, is_copied
):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0")
    first = load(path)
    (tmp_path / "enabled").write_text(system)
    monkeypatch.setattr(packed_cache, "_ENABLED", tmp_path / "enabled")
    monkeypatch.setattr(packed_cache, "LEAST_COPIED", 1)
    monkeypatch.setattr(packed_cache, "_huge_share", lambda address, size: share)
    second = load(path)
    assert mapping_of(second).endswith(".packed") != is_copied and is_mapped(second)  # read-only either way
    assert one_prefill(first, TOKENS).tobytes() == one_prefill(second, TOKENS).tobytes()


def test_the_share_of_huge_pages_is_that_of_the_mapping_at_the_address(tmp_path, monkeypatch):
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-2000 r--p 0 fd:00 1 /other.packed\nRss: 4 kB\nFilePmdMapped:        0 kB\n"
        "200000-c00000 r--p 0 fd:00 2 /mine.packed\nRss:  9000 kB\nFilePmdMapped:     6144 kB\nVmFlags: rd mr\n"
    )
    monkeypatch.setattr(packed_cache, "_SMAPS", smaps)
    assert packed_cache._huge_share(0x200000, 8 << 20) == 0.75
    assert packed_cache._huge_share(0x1000, 4096) == 0
    with pytest.raises(OSError, match="no such mapping"):
        packed_cache._huge_share(0x2000, 4096)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_where_linux_does_not_say_weights_stay_mapped(folder, tmp_path, monkeypatch):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0")
    load(path)
    monkeypatch.setattr(packed_cache, "LEAST_COPIED", 1)
    monkeypatch.setattr(packed_cache, "_SMAPS", tmp_path / "none")
    assert mapping_of(load(path)).endswith(".packed")
