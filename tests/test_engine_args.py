"""`EngineArgs`: one description of the options, for Python and for every command."""

from dataclasses import fields
from inspect import signature

import pytest

from forge.engine.policies import SchedulerConfig
from forge.engine_args import EngineArgs, memory_bytes
from forge.errors import UsageError
from forge.llm import LLM


def test_the_keywords_of_llm_are_the_fields():
    parameters = signature(LLM).parameters
    assert list(parameters) == [field.name for field in fields(EngineArgs)]
    assert {name: one.default for name, one in parameters.items()} == vars(EngineArgs())
    assert parameters["model"].kind is not parameters["kv"].kind, "the model alone is positional"


def test_an_llm_from_options_that_stand_together_is_the_same():
    llm = LLM.from_engine_args(EngineArgs("hash", kv="paged", num_blocks=8))
    assert (llm.kv, llm.engine.cache.stats().num_blocks) == ("paged", 8)


def test_the_scheduler_has_the_same_defaults():
    from forge.engine_args import CPU_PREFILL_ONLY_MEMORY

    assert EngineArgs().scheduler_config() == SchedulerConfig(prefill_only_memory=CPU_PREFILL_ONLY_MEMORY)
    assert EngineArgs(device="reference").scheduler_config() == SchedulerConfig()


def test_every_option_says_what_it_is():
    texts = [field.metadata["help"] for field in fields(EngineArgs) if field.metadata]
    assert len(texts) > 25 and all(text[-1] == "." for text in texts)


@pytest.mark.parametrize(
    ("given", "kind"), [({}, "off"), ({"speculate": "draft"}, "paged"), ({"speculate": "off"}, "off")]
)
def test_speculation_has_a_cache_by_default(given, kind):
    assert EngineArgs(**given).cache == kind
    assert EngineArgs(**given, kv=" basic ").cache == "basic"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv": "page"}, "unknown kv mode 'page'"),
        ({"kv": "paged", "num_blocks": 4, "kv_memory": "1MB"}, "--num-blocks and --kv-memory both"),
        ({"kv": "paged", "kv_memory": "lots"}, "--kv-memory takes a size such as 64MB"),
        ({"kv": "paged", "kv_memory": 0}, "--kv-memory must be a whole number of at least 1"),
        ({"prefill_only_memory": "some"}, "--prefill-only-memory takes a size"),
        (
            {"kv": "paged", "gpu_memory_utilization": 0.5},
            "with --device cpu: give --device cuda .elsewhere --kv-memory.",
        ),
        ({"kv": "paged", "device": "cuda", "gpu_memory_utilization": 0.5, "num_blocks": 3}, "--num-blocks both say"),
        ({"invariant": True}, "--invariant means nothing with --device cpu"),
        ({"kernels": "torch"}, "--kernels means nothing with --device cpu"),
        ({"order": "lifo"}, "unknown --order 'lifo'"),
        ({"speculate": "draft", "k": 0}, "--k is how many draft tokens"),
        ({"threads": True}, "--threads must be a whole number"),
    ],
)
def test_what_has_no_meaning_is_refused_before_anything_is_loaded(given, message):
    with pytest.raises(UsageError, match=message):
        EngineArgs("no such model", **given)


def test_a_size_is_a_number_or_text():
    assert memory_bytes("1.5k") == 1500 and memory_bytes("1KiB") == 1024
    assert memory_bytes(7) == 7 and memory_bytes(None) is None
    assert LLM("hash", kv="paged", kv_memory="64KiB").kv == "paged"
