"""`forge bench cache` on caches alone: what is counted is right; no time is judged."""

import io
import json

import pytest

from forge.bench.cache import (
    BOOKKEEPING_SEQUENCES,
    RUBRIC_REQUESTS,
    RUBRIC_TOKENS,
    _scattered,
    allocator_speeds,
    bench_cache,
    bookkeeping,
    hit_rate,
    screen,
    waste,
)
from forge.cache.basic import BasicKvCache
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.views.json_output import plain, to_json
from forge.views.screen import draw
from forge.views.terminal import open_console
from tests.small_models import write_small_qwen3


def measure(**given):
    return bench_cache.measure(lambda text: None, **given)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = write_small_qwen3(tmp_path_factory.mktemp("model") / "small.gguf")
    engine = EngineArgs(path, device="reference")
    return measure(engine=engine, length=[20, 100_000], block_size=[4, 16], quick=True) | {"machine": "here"}


@pytest.mark.parametrize(
    "cache",
    [
        BasicKvCache(BOOKKEEPING_SEQUENCES, 1024, 16),
        PagedKvCache(4096, 16),
        PrefixKvCache(4096, 16),
    ],
    ids=lambda cache: cache.kind,
)
def test_bookkeeping_advances_every_sequence_by_one_token_a_step(cache):
    before = cache.stats().tokens_held
    found = bookkeeping(cache, 20)
    grown = sum(cache.computed_length(seq_id) - 500 - seq_id % 16 for seq_id in range(BOOKKEEPING_SEQUENCES))
    assert before == 0 and grown == 20 * BOOKKEEPING_SEQUENCES
    assert found["seconds"].count == 20 and found["kind"] == cache.kind
    cache.check_invariants()


def test_a_scattered_pool_has_all_of_its_blocks_in_another_order():
    cache = _scattered(PagedKvCache(64, 16))
    taken = cache.pool.allocate(64)
    assert sorted(taken) == list(range(64)) != list(taken)


def test_paged_wastes_less_than_a_block_per_sequence():
    for size in (1, 16, 64):
        found = waste(PagedKvCache(8192 * 16 // size, size), bytes_per_token=10)
        assert 0 <= found["bytes_reserved"] - found["bytes_filled"] < 64 * size * 10
    contiguous = waste(BasicKvCache(64, 2048, 16), bytes_per_token=10)
    assert contiguous["bytes_reserved"] == 64 * 2048 * 10 and contiguous["wasted"] > 0.5


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_all_but_the_first_request_find_the_whole_blocks_of_the_rubric(block_size):
    found = hit_rate(block_size)
    assert found["tokens_found"] == (RUBRIC_REQUESTS - 1) * (RUBRIC_TOKENS // block_size * block_size)


def test_every_allocator_operation_has_a_rate():
    assert all(speed["operations_per_second"] > 0 for speed in allocator_speeds(1))


def test_every_length_and_block_size_is_measured_and_one_that_does_not_fit_is_named(result):
    assert [(one["length"], one["block_size"]) for one in result["step_times"]] == [(20, 4), (20, 16)]
    for one in result["step_times"]:
        assert one["basic"].count == one["paged"].count == one["scattered_ratio"].count == 6
    assert result["skipped"] == ["100,000 tokens do not fit the model's context"]


def test_the_screen_has_every_part_at_every_width(result):
    for width in (80, 120):
        file = io.StringIO()
        console = open_console(file, width)
        draw(console, screen(result))
        text = file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        for expected in ("contiguous", "scattered", "do not fit", "bookkeeping of a step", "memory", "hit rate"):
            assert expected in text, expected


def test_the_json_object_has_the_shares_too(result):
    found = json.loads(to_json(plain(result)))
    assert found["waste"][0]["kind"] == "basic" and 0 < found["waste"][0]["wasted"] < 1
    assert found["hit_rates"][0]["share"] > 0.5 and found["bookkeeping"][2]["kind"] == "prefix"


def test_a_length_of_nothing_is_refused():
    with pytest.raises(UsageError, match="--length is at least 1"):
        measure(engine=EngineArgs("tales"), length=[0])
