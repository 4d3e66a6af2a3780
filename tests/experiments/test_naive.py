from dataclasses import dataclass

import numpy as np
import pytest

from forge.experiments.kv_cache import KvShape, cache_sentences
from forge.experiments.kv_cache import screen as kv_cache_screen
from forge.experiments.naive import (
    HeadsResult,
    attention_of,
    climb_sentences,
    heads_object,
    heads_screen,
    layers_sentence,
    operations_sentence,
    shares_by_layer,
    shares_by_operation,
)
from forge.experiments.naive import screen as naive_screen
from forge.llm import LLM
from forge.views.screen import draw
from tests.small_models import write_small_qwen3
from tests.views.records import climbing, flat, piped, run_of, written


@dataclass(frozen=True)
class Time:
    layer: int
    operation: str
    ms: float
    calls: int


TIMES = [
    Time(-1, "embed", 1.0, 32),
    *[Time(layer, name, ms, 32) for layer in range(3) for name, ms in (("attn_q", 4.0), ("attention", 6.0))],
    Time(-1, "output head", 9.0, 32),
]


def test_the_slope_and_the_repeated_work_are_measured():
    first, second = climb_sentences(climbing(32))
    assert "Forward 2 computed 5 tokens in 1.5 ms, forward 32 computed 35 in 16.5 ms: 11.0 times as long" in first
    assert "adds 0.50 ms" in first
    assert "624 tokens went through the model where 35 different ones exist: 94 %" in second


def test_time_by_operation_is_summed_over_layers_and_sorted():
    shares = shares_by_operation(TIMES)
    assert [(share.name, share.ms, share.calls) for share in shares] == [
        ("attention", 18.0, 96),
        ("attn_q", 12.0, 96),
        ("output head", 9.0, 32),
        ("embed", 1.0, 32),
    ]
    assert sum(share.share for share in shares) == pytest.approx(1)
    assert "52 % of the time is matrix products, 45 % attention" in operations_sentence(shares)


def test_a_fused_operation_counts_as_the_product_in_it():
    shares = shares_by_operation([Time(0, "ffn_gate, ffn_up, swiglu", 3.0, 1), Time(0, "rms_norm", 1.0, 1)])
    assert operations_sentence(shares).startswith("75 % of the time is matrix products")


def test_time_by_layer_is_in_order_with_the_outside_last():
    shares = shares_by_layer(TIMES)
    assert [(share.name, share.ms) for share in shares] == [("0", 10.0), ("1", 10.0), ("2", 10.0), ("outside", 10.0)]
    assert layers_sentence(shares[:-1], 10.0) == "75 % of the time is spent in the layers, and the layers cost alike."


def test_the_naive_page_ends_with_what_comes_next():
    console = piped(80)
    draw(console, naive_screen(climbing(32), TIMES, "Once upon a time"))
    out = written(console)
    assert out.splitlines()[0].endswith("?")
    assert out.rstrip().endswith("forge compare --kv off vs basic")
    assert max(map(len, out.splitlines())) <= 80


def test_the_cache_page_does_the_arithmetic_of_the_bytes():
    shape = KvShape(12, 2, 64, 4)
    assert shape.bytes_per_token == 12_288
    console = piped(80)
    draw(console, kv_cache_screen(flat(32), shape, "Once upon a time"))
    out = written(console)
    assert "12 layers x 2 KV heads x 64 numbers x 4 bytes = 12.3 kB per" in out
    assert "holds 49.2 kB" in out and "holds 430.1 kB" in out and "430.1 kB held at the end" in out
    assert "forge compare --kv off vs basic" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_cache_page_counts_the_scales_of_int8():
    shape = KvShape(12, 2, 64, 1, scale_bytes=4)
    assert shape.bytes_per_token == 3264
    assert "2 KV heads x (64 numbers x 1 byte + 4 bytes of scale) = 3.3 kB per token" in shape.formula()


def test_the_cache_page_counts_what_was_not_computed():
    sentence = cache_sentences(flat(32), KvShape(12, 2, 64, 4))[1]
    assert "35 tokens went through the model; without the cache it would have been 624" in sentence


@pytest.mark.parametrize("forwards", [[], [(4, 1.0)], [(4, 1.0), (1, 1.0)]])
def test_a_run_too_short_to_show_anything_says_so(forwards):
    result = run_of(forwards)
    for print_page in (
        lambda console: draw(console, naive_screen(result, [], "x")),
        lambda console: draw(console, kv_cache_screen(result, KvShape(1, 1, 1, 4), "x")),
    ):
        console = piped()
        print_page(console)
        assert "Too few forwards" in written(console)


def weights_of(*heads: list[list[float]]) -> HeadsResult:
    return HeadsResult("small", 3, ("Once", " upon", " a"), np.array(heads, np.float32), 1)


def test_heads_are_apart_by_the_weight_that_lies_on_different_tokens():
    before = [[1, 0, 0], [1, 0, 0], [0, 1, 0]]
    itself = [[1, 0, 0], [0, 1, 0], [0, 0.25, 0.75]]
    result = weights_of(before, itself)
    assert result.apart(0, 1) == pytest.approx((0 + 1 + 0.75) / 3) and result.apart(0, 0) == 0
    facts = heads_object(result)
    assert facts["apart_in_group"] == result.apart(0, 1)
    assert [head["before"] for head in facts["heads"]] == [1.0, 0.125]


def test_a_head_is_a_triangle_that_is_as_dark_as_its_weights():
    console = piped(80)
    draw(console, heads_screen(weights_of([[1, 0, 0], [0.5, 0.5, 0], [0.1, 0.3, 0.6]])))
    lines = written(console).splitlines()
    assert [line.rstrip() for line in lines[5:8]] == [' "Once"  █', '" upon"  ▒▒', '   " a"   ░▓']


def test_the_weights_are_those_with_which_the_reference_attends(tmp_path, monkeypatch):
    llm = LLM(write_small_qwen3(tmp_path / "small.gguf"), device="reference")
    layers = attention_of(llm.model, llm.kv_dtype, [5, 6, 7, 8])
    assert len(layers) == llm.model.num_layers
    for layer in layers:
        assert layer.sum(axis=-1) == pytest.approx(1) and (np.triu(layer, 1) == 0).all()
    uniform = lambda q, keys: np.full((len(q), len(keys)), 1 / len(keys), np.float32)  # noqa: E731
    monkeypatch.setattr("forge.backends.reference.attention_weights", uniform)
    assert attention_of(llm.model, llm.kv_dtype, [5, 6, 7, 8])[-1][:, -1] == pytest.approx(0.25)
