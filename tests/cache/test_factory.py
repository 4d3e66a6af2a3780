"""`--kv`: names, and how much storage goes with them."""

import pytest

from forge.cache import factory
from forge.cache.factory import DEFAULT_KV_BYTES, KV_MODES, CacheSize, canonical_mode, create_kv_cache
from forge.cache.paged import PagedKvCache
from forge.errors import UsageError


def size(**changes) -> CacheSize:
    return CacheSize(**{"max_model_len": 100, "max_num_seqs": 4, "block_size": 16, "bytes_per_token": 8} | changes)


def test_on_is_basic():
    assert canonical_mode("on") == "basic"
    assert [canonical_mode(mode) for mode in KV_MODES] == list(KV_MODES)


@pytest.mark.parametrize("mode", ["", "Basic", "of", "none"])
def test_an_unknown_mode_lists_the_supported_ones_and_exits_with_2(mode):
    with pytest.raises(UsageError, match=r"unknown kv mode '.*'; supported: off, basic, paged, prefix") as raised:
        create_kv_cache(mode, size())
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("mode", ["off", "basic"])
def test_every_sequence_that_may_run_has_room_for_the_whole_context(mode):
    cache = create_kv_cache(mode, size())

    assert cache.num_blocks == 4 * 7
    for seq_id in range(4):
        cache.add(seq_id, ())
        cache.reserve(seq_id, 100)
        assert max(cache.block_table(seq_id)) < cache.num_blocks


def test_max_model_len_bounds_what_is_reserved():
    assert create_kv_cache("basic", size(max_model_len=16)).num_blocks == 4
    assert create_kv_cache("basic", size(max_model_len=17)).num_blocks == 8


def test_num_blocks_makes_as_many_whole_runs_as_fit():
    assert create_kv_cache("basic", size(num_blocks=20)).num_blocks == 14
    assert create_kv_cache("basic", size(num_blocks=1000)).num_blocks == 28


def test_a_pool_that_cannot_hold_one_sequence_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match="--num-blocks 6 cannot hold one sequence of 100 tokens, which takes 7 blocks"):
        create_kv_cache("basic", size(num_blocks=6))


def test_large_models_get_fewer_runs_but_at_least_one():
    per_run = 7 * 16
    two_runs = DEFAULT_KV_BYTES // per_run // 2
    assert create_kv_cache("basic", size(bytes_per_token=two_runs)).num_blocks == 2 * 7
    assert create_kv_cache("basic", size(bytes_per_token=DEFAULT_KV_BYTES)).num_blocks == 7


@pytest.mark.parametrize("mode", ["paged", "prefix"])
def test_the_default_pool_is_512_blocks_or_what_one_sequence_may_take(mode):
    for max_model_len, block_size, blocks in ((100, 16, 512), (4096, 16, 512), (4096, 1, 4096), (20_000, 16, 1250)):
        cache = create_kv_cache(mode, size(max_model_len=max_model_len, block_size=block_size))
        assert (cache.kind, cache.num_available, cache.num_blocks) == (mode, blocks, blocks)


@pytest.mark.parametrize("mode", ["paged", "prefix"])
def test_num_blocks_is_the_pool_and_may_be_less_than_one_sequence(mode):
    assert create_kv_cache(mode, size(num_blocks=3)).num_blocks == 3


@pytest.mark.parametrize("mode", ["basic", "paged", "prefix"])
def test_kv_memory_is_as_many_whole_blocks_as_go_into_it(mode):
    block_bytes = 16 * 8
    blocks = create_kv_cache(mode, size(kv_bytes=15 * block_bytes - 1)).num_blocks
    assert blocks == (14 if mode != "basic" else 2 * 7)
    assert create_kv_cache(mode, size(kv_bytes=14 * block_bytes - 1)).num_blocks == (13 if mode != "basic" else 7)


def test_a_pool_of_more_blocks_than_tables_bear_is_refused_by_the_option_that_asked():
    assert create_kv_cache("paged", size(kv_bytes=128)).num_blocks == 1
    for most, pool in ((512, {}), (3, {"num_blocks": 3}), (3, {"kv_bytes": 3 * 128})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factory, "MAX_BLOCKS", most)
            assert create_kv_cache("paged", size(**pool)).num_blocks == most
            patch.setattr(factory, "MAX_BLOCKS", most - 1)
            option = next((f"--{name} {value}" for name, value in pool.items()), "--num-blocks 512")
            with pytest.raises(UsageError, match=option.replace("kv_bytes", "kv-memory").replace("_", "-")):
                create_kv_cache("paged", size(**pool))


def test_a_function_makes_a_cache_of_its_own_size():
    cache = create_kv_cache(lambda size: PagedKvCache(7, size.block_size), size())
    assert (type(cache), cache.block_size, cache.num_blocks) == (PagedKvCache, 16, 7)


def test_kv_memory_that_holds_nothing_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match="--kv-memory 127 cannot hold one block of 16 tokens, which takes 128 bytes"):
        create_kv_cache("paged", size(kv_bytes=127))
    with pytest.raises(UsageError, match="--kv-memory 800 cannot hold one sequence of 100 tokens, which"):
        create_kv_cache("basic", size(kv_bytes=800))


def test_a_cache_says_its_kind_its_size_and_its_fill():
    cache = create_kv_cache("paged", CacheSize(32, 4, 4, 8, 8))
    cache.add(0, [1, 2, 3, 4, 5])
    cache.reserve(0, 5)
    cache.commit(0, [1, 2, 3, 4, 5])
    assert repr(cache) == "<paged KV cache: 2 of 8 blocks used, 0 cached, 5 tokens held>"
    for kind in ("off", "basic", "prefix"):
        assert repr(create_kv_cache(kind, CacheSize(32, 4, 4, 8, 8))).startswith(f"<{kind} KV cache: 0 of ")
