"""The kernels chapter's screen, from figures made by hand."""

from dataclasses import replace

import pytest

from forge.bench.cases import ModelSize
from forge.experiments.kernels import (
    KernelsResult,
    Limits,
    LongPass,
    Measured,
    Pass,
    comparison_sentences,
    kernels_object,
    last_cache_bytes,
    picture,
    reads,
    screen,
)
from forge.views.screen import draw
from tests.views.records import piped, written

LIMITS = Limits(bytes_per_second=50e9, products_per_second=500e9)
SIZE = ModelSize(0, 90_000_000, 10_000_000, 0, 1000, 1, 1, 1, 1, 4096, 4096)


def measured(name: str, weight_bytes: int, ms: dict[int, float]) -> Measured:
    passes = tuple(Pass(rows, weight_bytes, rows * 100_000_000, taken / 1e3) for rows, taken in ms.items())
    size = replace(SIZE, layer_bytes=weight_bytes - SIZE.head_bytes)
    long_pass = LongPass(2000, 20_000_000, weight_bytes + 20_000_000, 2 * ms[1])
    return Measured(name, size, 2, passes, (long_pass,), cache_bytes=32_000_000)


LARGE = measured("random-q8_0", 100_000_000, {1: 2.0, 8: 2.2, 128: 32.0})
HALF = measured("random-q4_0", 50_000_000, {1: 1.0, 8: 1.8, 128: 32.0})
RESULT = KernelsResult(LIMITS, (LARGE, HALF))


def test_the_ridge_parts_memory_from_arithmetic():
    assert LIMITS.ridge == 10
    one, eight, many = LARGE.passes
    assert [found.against(LIMITS).bound for found in (one, eight, many)] == ["memory", "memory", "arithmetic"]
    assert one.against(LIMITS).share == pytest.approx(1.0) and many.against(LIMITS).share == pytest.approx(0.8)
    assert one.intensity == 1 and many.products_per_second == pytest.approx(400e9)


def test_of_two_measurements_of_a_limit_the_higher_one_counts():
    assert Limits(50e9, 400e9).or_better(Limits(40e9, 500e9)) == LIMITS


def test_facts_are_what_was_measured():
    facts = kernels_object(RESULT)
    assert facts["ridge"] == 10 and [model["name"] for model in facts["models"]] == ["random-q8_0", "random-q4_0"]
    assert facts["models"][0]["passes"][2]["ms_per_row"] == pytest.approx(0.25)
    assert facts["models"][1]["passes"][0]["bound"] == "memory"


def test_of_a_mixture_of_experts_it_says_what_a_row_reads_and_what_many_read():
    size = replace(SIZE, expert_bytes=900_000_000, share_of_experts=1 / 16)
    passes = tuple(Pass(rows, 100_000_000 + size.bytes_of_used_experts(rows), 1, 1.0) for rows in (1, 16))
    said = reads(Measured("experts", size, 2, passes))
    assert said == "a row reads 156.2 MB of 1.0 GB of weights, 16 rows 679.5 MB (64 % of the experts)"
    assert reads(LARGE) == "every pass reads 100.0 MB of weights"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_screen_says_what_the_figures_mean(width):
    console = piped(width)
    draw(console, screen(RESULT))
    out = " ".join(written(console).split())
    assert "128 rows take 16.0 times as long as one, so a row among many costs 12 % of a row alone" in out
    assert "2.00 times fewer bytes to read" in out and "2.00 times as fast, with 128 rows 1.00 times" in out
    assert "More than memory" not in out
    assert max(map(len, written(console).splitlines())) <= max(width, 66)


def test_weights_in_a_cache_are_said_to_be_there():
    console = piped(80)
    draw(console, screen(KernelsResult(LIMITS, (measured("tales", 11_000_000, {1: 0.11}),))))
    assert "More than memory delivers: tales" in written(console)


def test_a_model_that_no_cache_holds_is_not_said_to_be_in_one():
    console = piped(80)
    draw(console, screen(KernelsResult(LIMITS, (measured("large", 100_000_000, {1: 1.0}),))))
    assert "More than memory" not in written(console)


def test_the_last_cache_is_the_largest_that_the_system_names(tmp_path):
    for index, text in enumerate(("32K\n", "1024K\n", "32768K\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text)
    assert last_cache_bytes(tmp_path) == 32 << 20 == last_cache_bytes(tmp_path / "none")


def test_keys_and_values_are_bytes_of_a_pass_too():
    facts = kernels_object(RESULT)["models"][0]["long_passes"]
    assert facts == [{"context": 2000, "kv_bytes": 20_000_000, "bytes_read": 120_000_000, "ms": 4.0}]
    console = piped(80)
    draw(console, screen(RESULT))
    assert "2,000 tokens" in written(console) and "120.0 MB" in written(console)


def test_one_model_is_compared_with_none():
    assert comparison_sentences([LARGE]) == []


def test_every_pass_has_a_mark_no_higher_than_the_roof():
    plot = [line.plain for line in picture(RESULT, 80)]
    assert sum(line.count("●") for line in plot[1:-2]) == 3 and sum(line.count("○") for line in plot[1:-2]) == 3
    assert plot[1].lstrip().startswith("500 G ┤") and "products per byte" in plot[-2]
    left = min(column for line in plot[1:-2] if (column := line.find("●")) >= 0)
    lowest = max(row for row, line in enumerate(plot[1:-2]) if "●" in line)
    assert plot[1 + lowest].find("●") == left  # a single row is the lowest and the leftmost
