"""The statistics, the roofline, and the shape of the JSON."""

import json
from statistics import median

import pytest

from forge.bench import cpu
from forge.bench.cases import CASES, Limits, ModelSize, Needs, Roofline, measure_model, needs_of
from forge.bench.kit import Figure, ratios, select
from forge.errors import UsageError
from forge.gguf import GGUFFile
from forge.views.json_output import plain, to_json
from tests.small_models import write_small_qwen3

SIZE = ModelSize(
    file_bytes=1100, layer_bytes=600, head_bytes=400, embedding_bytes=0, row_bytes=4, layer_products=500,
    head_products=300, attention_products=16, kv_bytes=8, vocab_size=100, max_context=2048,
)  # fmt: skip


def case(name):
    return select(name, CASES)[0]


def benchmark(peers=("llama.cpp",), **changes) -> dict:
    """The facts of a run of two figures in which every peer takes twice as long as forge."""
    before, after = changes.get("before", Limits(1e6, 1e9)), changes.pop("after", Limits(1.02e6, 0.9e9))
    used, tops, figures = before.or_better(after), changes.pop("tops", {}), []
    for one in (case("decode16"), case("prefill512")):
        turns = {"forge": {"setting": "float16 KV", "seconds": [0.010, 0.020, 0.030]}}
        turns |= {peer: {"setting": "best", "seconds": [0.020, 0.040, 0.060]} for peer in peers}
        for name, turn in turns.items():
            turn["top_tokens"] = [tops.get(name, 1)] * one.sequences
        figures.append(cpu.figure(one, needs_of(one, SIZE), turns, used))
    loaded = {"load_seconds": [0.5, 0.4], "load": Figure.of([0.5, 0.4]), "loaded_bytes": 1000, "peak_bytes": 2000}
    return {
        "schema": 1, "benchmark": "cpu", "model": "small", "model_size": SIZE, "threads": 2, "repetitions": 3,
        "machine": "a processor", "load_average": 0.1, "interrupted": False,
        "limits": {"before": before, "after": after, "used": used},
        "contenders": [
            {"name": name, "description": f"{name} 1.0", "weight_bytes": 1050, "logits_error": 0.0226, **loaded}
            for name in ("forge", *peers)
        ],
        "skipped": [], "figures": figures,
    } | changes  # fmt: skip


def pairwise(ours, theirs) -> Figure:
    return Figure.of(ratios(theirs, ours))


def test_a_ratio_is_the_median_of_pairs():
    ours, theirs = [1.0, 10.0, 1.0], [2.0, 40.0, 3.0]
    assert pairwise(ours, theirs) == Figure(median=3.0, low=2.0, high=4.0, count=3)


def test_a_machine_that_slows_down_for_a_while_leaves_the_ratio_alone():
    ours = [1.0, 1.0, 5.0, 5.0, 5.0]
    theirs = [2.0, 2.0, 10.0, 10.0, 10.0]
    assert pairwise(ours, theirs) == Figure(2.0, 2.0, 2.0, 5)


def test_repetitions_that_only_one_has_are_left_out():
    assert pairwise([1.0, 1.0, 9.0], [2.0, 2.0]) == Figure(2.0, 2.0, 2.0, 2)
    assert ratios([1.0], []) == []


def test_rates_are_tokens_of_all_sequences():
    ours, theirs = benchmark()["figures"][0]["measured"]
    speed = ours["tokens_per_second"]
    assert speed.median == pytest.approx(16 / 0.020)
    assert (speed.low, speed.high) == (pytest.approx(16 / 0.030), pytest.approx(16 / 0.010))
    assert theirs["forge_is_times_as_fast"].median == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("needs", "bound", "share"),
    [(Needs(bytes_read=50, products=1), "memory", 0.5), (Needs(bytes_read=1, products=2000), "arithmetic", 2 / 3)],
)
def test_the_roofline_names_the_nearer_limit(needs, bound, share):
    line = Roofline.of(needs, 1.0 if bound == "memory" else 3.0, Limits(100.0, 1000.0))
    assert (line.bound, line.share) == (bound, pytest.approx(share))


def test_what_a_decode_step_needs():
    needs = needs_of(case("decode16"), SIZE)
    assert needs.bytes_read == 600 + 400 + 16 * 4 + 16 * 128 * 8
    assert needs.products == 16 * 500 + 16 * 300 + 16 * 129 * 16


def test_what_a_prefill_needs():
    needs = needs_of(case("prefill128"), SIZE)
    assert needs.bytes_read == 600 + 400 + 128 * 4
    assert needs.products == 128 * 500 + 300 + 128 * 129 // 2 * 16


@pytest.mark.parametrize("tie", [True, False])
def test_a_files_size_is_that_of_its_tensors(tmp_path, tie):
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0", tie=tie)
    size = measure_model(path, "int8")
    with GGUFFile.open(path) as file:
        total = sum(tensor.nbytes for tensor in file.tensors.values())
        norm = file.tensors["output_norm.weight"].nbytes
    assert size.weight_bytes + norm == total
    assert size.head_products == 288 * 64 and size.vocab_size == 288


def test_float_products_count_four_times(tmp_path):
    floats = measure_model(write_small_qwen3(tmp_path / "f.gguf", tensor_type="F16"), "int8")
    eight = measure_model(write_small_qwen3(tmp_path / "q.gguf", tensor_type="Q8_0"), "int8")
    assert floats.layer_products == 4 * eight.layer_products


def test_keys_and_values_count_as_they_are_stored_and_multiplied(tmp_path):
    path = write_small_qwen3(tmp_path / "m.gguf")
    numbers = 2 * 2 * 2 * 32  # keys and values, layers, heads of each, numbers of a head
    sizes = {kv_dtype: measure_model(path, kv_dtype) for kv_dtype in ("float32", "bfloat16", "int8")}
    assert [size.kv_bytes for size in sizes.values()] == [4 * numbers, 2 * numbers, numbers + 4 * numbers // 32]
    assert [size.attention_products for size in sizes.values()] == [2 * 4 * 32 * each for each in (8, 4, 3)]


def test_a_mixture_of_experts_reads_the_experts_in_use(tmp_path):
    """A row reads its own 2 of 8; more rows read more of them; each row multiplies with 2 whatever the batch."""
    path = write_small_qwen3(tmp_path / "m.gguf", tensor_type="Q8_0", num_experts=8, num_experts_per_tok=2)
    size = measure_model(path, "int8")
    dense = measure_model(write_small_qwen3(tmp_path / "d.gguf", tensor_type="Q8_0"), "int8")
    with GGUFFile.open(path) as file:
        experts = sum(tensor.nbytes for name, tensor in file.tensors.items() if name.endswith("_exps.weight"))
        total = sum(tensor.nbytes for tensor in file.tensors.values()) - file.tensors["output_norm.weight"].nbytes
    assert size.expert_bytes == experts and size.weight_bytes == total
    assert size.bytes_of_used_experts(1) == experts // 4
    assert size.bytes_of_used_experts(2) == round(experts * (1 - 0.75**2))
    assert size.bytes_of_used_experts(1000) == experts
    one, sixteen = (needs_of(case(name), size).bytes_read for name in ("decode1", "decode16"))
    assert sixteen - one > size.bytes_of_used_experts(16) - size.bytes_of_used_experts(1) > 0
    router, feed_forward = 2 * 8 * 64 * 4, 2 * 3 * 64 * 96
    assert size.layer_products == dense.layer_products + router + feed_forward
    assert dense.expert_bytes == dense.bytes_of_used_experts(16) == 0


def test_everybody_gets_the_same_tokens():
    one = case("decode4")
    ids = one.token_ids(100, seed=1)
    assert ids == one.token_ids(100, seed=1) != one.token_ids(100, seed=2)
    assert len(ids) == 4 and {len(row) for row in ids} == {129}
    assert all(0 <= token < 100 for row in ids for token in row)


def test_figures_are_selected_by_name():
    assert select(None, CASES) == CASES
    assert [one.name for one in select("prefill128, decode1", CASES)] == ["decode1", "prefill128"]
    with pytest.raises(UsageError, match="unknown figure 'decode3'; there are decode1, "):
        select("decode3", CASES)


def test_the_json_has_every_repetition_and_what_is_made_of_them():
    found = json.loads(to_json(plain(benchmark(skipped=[{"name": "transformers", "reason": "not installed"}]))))
    assert found["schema"] == 1 and found["benchmark"] == "cpu"
    assert set(found) == {
        "schema", "benchmark", "model", "model_size", "threads", "repetitions", "machine", "load_average",
        "interrupted", "limits", "contenders", "skipped", "figures",
    }  # fmt: skip
    assert found["limits"]["used"] == {"bytes_per_second": 1.02e6, "products_per_second": 1e9}
    assert found["skipped"] == [{"name": "transformers", "reason": "not installed"}]
    forge, peer = found["figures"][0]["measured"]
    assert forge["seconds"] == [0.010, 0.020, 0.030] and forge["forge_is_times_as_fast"] is None
    assert peer["forge_is_times_as_fast"]["median"] == pytest.approx(2.0)
    assert peer["top_token_disagreements"] == 0
    assert forge["roofline"]["bound"] in ("memory", "arithmetic")
    for name in ("tokens_per_second", "forge_is_times_as_fast"):
        assert set(peer[name]) == {"median", "low", "high", "count"}
    assert found["contenders"][0]["load"]["median"] == median([0.5, 0.4])
