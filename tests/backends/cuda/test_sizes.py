"""The KV cache's size from the GPU's memory, and a step's from the GPU."""

import sys

import pytest
import torch

from forge import LLM, SamplingParams, UsageError
from forge.backends import devices

GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch):
    """40 GiB of 140 are in use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * GIB, 140 * GIB))


def test_what_is_left_is_a_share_of_all_memory_less_what_is_in_use(memory):
    assert devices.kv_memory(0.5, 4 * GIB) == 70 * GIB - 40 * GIB - 4 * GIB - devices.GRAPH_BYTES
    assert devices.kv_memory(None, 0) == int(0.9 * 140 * GIB) - 41 * GIB


def test_a_share_that_leaves_nothing_is_refused_with_its_numbers(memory):
    with pytest.raises(UsageError, match=r"0\.3 of 150\.3 GB leaves nothing.* 42\.9 GB are in"):
        devices.kv_memory(0.3, 4 * GIB)


@pytest.mark.parametrize("share", [0, -1, 1.01, float("nan"), True, "half"])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        devices.checked_utilization(share)


def test_a_model_on_a_large_gpu_has_its_blocks_from_memory_and_large_steps(memory, monkeypatch):
    home = sys.modules[LLM.__module__]
    monkeypatch.setattr(home, "is_gpu", lambda device: device == "cuda")
    monkeypatch.setattr(devices, "is_large_gpu", lambda device: device == "cuda")
    asked = []
    monkeypatch.setattr(home, "kv_memory", lambda *given: asked.append(given) or 1 << 20)

    llm = LLM("hash", kv="paged", device="cuda", max_model_len=64, gpu_memory_utilization=0.8)
    few = LLM("hash", kv="paged", device="cuda", max_model_len=64, num_blocks=7, max_num_batched_tokens=32)

    assert llm.engine.scheduler.config.token_budget == 8192 and few.engine.scheduler.config.token_budget == 32
    assert llm.engine.cache.stats().num_blocks == (1 << 20) // (16 * llm.kv_layout.bytes_per_token)
    assert few.engine.cache.stats().num_blocks == 7
    monkeypatch.setattr(home, "kv_memory", lambda *given: 1 << 40)
    plain = LLM("hash", kv="paged", device="cuda", max_model_len=64, max_num_seqs=5)
    assert plain.engine.cache.stats().num_blocks == 5 * 4, "as many as can be used"
    assert [share for share, _ in asked] == [0.8]
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_elsewhere_the_share_is_refused_and_nothing_changes():
    with pytest.raises(UsageError, match="--gpu-memory-utilization means nothing with --device cpu"):
        LLM("hash", kv="paged", gpu_memory_utilization=0.5)
    with pytest.raises(UsageError, match="say how large"):
        LLM("hash", kv="paged", device="cuda", gpu_memory_utilization=0.5, num_blocks=4)
    assert LLM("hash", kv="paged").engine.scheduler.config.token_budget == 512
