"""The prefix cache: what is a hit and what is not, who shares with whom, and which block goes first."""

from types import SimpleNamespace

import pytest

from forge.cache.eviction import EVICTION_POLICIES, prefix_cost
from forge.cache.kv_cache import NO_HIT, Hit, OutOfBlocks
from forge.cache.kv_storage import BlockCopy
from forge.cache.prefix import PrefixKvCache
from forge.trace.records import BlockEvicted, BlockSplit, PrefixHit

A, B, C, D, E = ([10 * first + offset for offset in range(4)] for first in range(1, 6))
"""Blocks of four tokens."""


def new(num_blocks: int = 8) -> PrefixKvCache:
    return PrefixKvCache(num_blocks, 4)


def run(cache: PrefixKvCache, seq_id: int, tokens: list[int], **options) -> int:
    """Add a sequence and compute all of it; returns how much was cached."""
    cached = cache.add(seq_id, tokens, **options)
    cache.reserve(seq_id, len(tokens) - cached)
    cache.commit(seq_id, tokens[cached:])
    return cached


def ran(cache: PrefixKvCache, seq_id: int, tokens: list[int]) -> tuple[int, ...]:
    """Let a sequence come and go; returns the blocks that it had."""
    run(cache, seq_id, tokens)
    blocks = cache.block_table(seq_id)
    cache.remove(seq_id)
    return blocks


def found(cache: PrefixKvCache, tokens: list[int], salt: str = "", max_cached: int | None = None) -> tuple:
    """What a lookup finds: how many tokens, and in which blocks."""
    hit = cache.lookup(tokens, salt, max_cached)
    return hit.num_tokens, hit.blocks


def cached(cache: PrefixKvCache) -> list[int]:
    """Cached blocks in the order of eviction."""
    return list(cache.block_map().cached)


def test_a_second_prompt_shares_the_blocks_that_it_begins_with():
    cache = new()
    run(cache, 0, A + B + C)

    assert cache.add(1, A + B + D) == 8

    assert cache.block_table(1) == cache.block_table(0)[:2]
    assert cache.take_events() == (PrefixHit(seq_id=1, num_tokens=8, blocks=(0, 1)),)
    stats = cache.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.blocks_saved, stats.used_blocks) == (24, 8, 2, 3)
    cache.check_invariants()


def test_a_block_behind_other_tokens_is_no_hit():
    cache = new()
    run(cache, 0, A + B)

    assert cache.lookup(C + B) == NO_HIT
    assert cache.lookup(B) == NO_HIT


def test_looking_up_changes_nothing():
    cache = new()
    ran(cache, 0, A + B)
    ran(cache, 1, C)
    before = cache.stats(), cache.block_map()

    assert found(cache, A + B + D) == (8, (0, 1))
    assert cache.lookup(A + B + D, "other") == NO_HIT
    assert cache.blocks_to_begin(cache.lookup(A + B + D), 12) == 3

    assert (cache.stats(), cache.block_map(), cache.take_events()) == (*before, ())


def test_generated_tokens_are_indexed_too():
    cache = new()
    run(cache, 0, A + B[:2])
    for token in B[2:]:
        assert len(cache.lookup(A + B, max_cached=7).blocks) == 2  # the running sequence's, in part
        cache.reserve(0, 1)
        cache.commit(0, [token])
    cache.remove(0)

    assert found(cache, A + B) == (8, (0, 1))


def test_a_block_that_is_still_being_computed_is_no_hit():
    cache = new()
    cache.add(0, A + B)
    cache.reserve(0, 8)
    assert cache.lookup(A + B) == NO_HIT

    cache.commit(0, A + B[:1])
    assert found(cache, A + B) == (5, (0, 1)), "what is committed is one, the rest is not"


def test_what_was_reserved_and_taken_back_never_becomes_a_hit():
    cache = new()
    run(cache, 0, A)
    cache.reserve(0, 5)
    cache.commit(0, B[:1])
    cache.truncate(0, 5)  # four guesses were wrong

    assert found(cache, A + B) == (5, (0, 1))
    cache.remove(0)
    assert found(cache, A + B) == (4, (0,))


def test_a_wholly_cached_prompt_shares_all_but_its_last_token_and_splits_the_last_block():
    cache = new()
    run(cache, 0, A + B)

    assert cache.add(1, A + B, max_cached=7) == 7

    assert cache.block_table(1) == (0, 1)
    assert cache.reserve(1, 1) == (BlockCopy(1, 2),)
    cache.commit(1, B[3:])
    assert cache.block_table(1) == (0, 2)
    cache.check_invariants()


def test_a_wholly_cached_prompt_asked_again_leaves_what_is_cached_behind_it():
    """As when a client asks for another answer to the same prompt."""
    cache = new()
    prompt = [97] * 8
    ran(cache, 0, prompt + list(range(13)))
    assert cache.stats().cached_blocks * 4 == 20
    hit, available = cache.lookup(prompt, max_cached=7), cache.num_available
    assert (hit, cache.blocks_to_begin(hit, 8)) == (Hit(7, (0, 1), num_unreferenced=2), 2)

    assert cache.add(1, prompt, max_cached=7) == 7
    assert cache.blocks_needed(1, 1) == 0
    assert cache.reserve(1, 1) == (BlockCopy(1, 5),)
    assert cache.take_events()[-1] == BlockSplit(1, source=1, destination=5, references=1)
    assert available - cache.num_available == 2, "as was said"
    cache.check_invariants()
    cache.commit(1, [97])
    cache.check_invariants()

    assert found(cache, prompt + list(range(13))) == (20, (0, 5, 2, 3, 4))
    cache.remove(1)
    assert cache.stats().cached_blocks * 4 == 20, "the copy has taken the old block's place"
    assert available == cache.num_available
    cache.check_invariants()


def test_a_copy_of_a_cached_block_takes_no_block_that_the_sequence_itself_needs():
    cache = new(5)
    ran(cache, 0, A + B + C)
    assert cache.add(1, A + B[:3] + D, max_cached=7) == 4, "a cached block is a hit in part for its own tokens only"
    cache.remove(1)

    assert cache.add(2, A + B + D + E, max_cached=7) == 7
    assert cache.reserve(2, 9) == (), "two free blocks, and two to grow: no third for a copy"
    assert [event for event in cache.take_events() if isinstance(event, BlockEvicted)] == []
    cache.check_invariants()


def test_without_a_free_block_a_wholly_cached_prompt_computes_its_last_token_in_place():
    cache = new(2)
    ran(cache, 0, A + B)
    hit = cache.lookup(A + B, max_cached=7)
    assert (hit, cache.blocks_to_begin(hit, 8)) == (Hit(7, (0, 1), num_unreferenced=2), 2)

    assert cache.add(1, A + B, max_cached=7) == 7
    assert cache.reserve(1, 1) == ()
    assert found(cache, A + B) == (7, (0, 1)), "the block that is being written is the running sequence's"
    cache.commit(1, B[3:])

    assert found(cache, A + B) == (8, (0, 1))
    cache.check_invariants()


def test_a_partly_filled_block_is_shared_with_a_running_sequence_token_by_token():
    cache = new()
    run(cache, 0, A + B[:3])

    assert cache.add(1, A + B[:2] + [99, 98]) == 6

    assert cache.block_table(1) == cache.block_table(0) == (0, 1)
    assert cache.reserve(1, 2) == (BlockCopy(1, 2),)
    assert cache.take_events()[1] == BlockSplit(1, source=1, destination=2, references=2)
    assert cache.reserve(0, 1) == (), "the other writes in place"
    cache.commit(1, [99, 98])
    cache.check_invariants()


def test_a_full_block_of_a_running_sequence_is_shared_as_far_as_it_matches():
    cache = new()
    run(cache, 0, A + B)
    assert found(cache, A + B[:1] + C) == (5, (0, 1))

    cache.remove(0)
    assert found(cache, A + B[:1] + C) == (4, (0,)), "a block that nobody holds is shared whole or not at all"


def test_a_snapshot_shares_what_it_holds_as_a_running_sequence_does():
    cache = new()
    run(cache, 0, A + B[:3])
    snapshot, _ = cache.snapshot(0)
    cache.remove(0)

    assert found(cache, A + B) == (7, (0, 1))
    cache.release(snapshot)
    assert found(cache, A + B) == (4, (0,))


def test_the_longest_match_among_running_sequences_is_taken():
    cache = new()
    for seq_id, tokens in enumerate(([*A, 21], [*A, 21, 22, 23], [*A, 21, 22])):
        run(cache, seq_id, tokens, max_cached=0)

    assert found(cache, [*A, 21, 22, 23, 24]) == (7, (0, 3))


def test_max_cached_caps_a_hit_anywhere_and_zero_refuses_it():
    cache = new()
    run(cache, 0, A + B)

    for limit, blocks in ((0, ()), (1, (0,)), (3, (0,)), (4, (0,)), (5, (0, 1)), (8, (0, 1)), (99, (0, 1))):
        assert found(cache, A + B, max_cached=limit) == (min(limit, 8), blocks)
    assert cache.add(1, A + B, max_cached=0) == 0
    assert (cache.stats().prefix_queries, cache.stats().prefix_hits) == (16, 0)


def test_a_salt_keeps_tenants_apart():
    cache = new()
    run(cache, 0, A + B[:2], salt="a")
    for salt in ("", "b"):
        assert cache.lookup(A + B[:2], salt) == NO_HIT, "neither whole blocks nor running ones"
    assert cache.lookup(A + B, "a").num_tokens == 6

    run(cache, 1, A, salt="b")
    assert cache.block_table(1) == (2,)
    cache.remove(0)
    cache.remove(1)
    assert (cache.lookup(A, "a").blocks, cache.lookup(A, "b").blocks, cache.lookup(A)) == ((0,), (2,), NO_HIT)


def test_freed_blocks_stay_cached_from_the_end_of_a_sequence_to_its_beginning():
    cache = new()
    ran(cache, 0, A + B + C[:1])

    assert cached(cache) == [1, 0], "the partly filled one is plainly free"
    assert (cache.stats().used_blocks, cache.stats().cached_blocks, cache.num_available) == (0, 2, 8)


def test_free_blocks_are_taken_before_cached_ones_and_those_least_recently_used_first():
    cache = new(6)
    ran(cache, 0, A + B)
    ran(cache, 1, C)
    ran(cache, 2, D)
    assert cached(cache) == [1, 0, 2, 3]

    assert ran(cache, 3, [91, 92, 93]) == (4,), "the fifth and sixth block were free"
    assert run(cache, 4, A) == 4  # used again, and so no longer the next to go
    run(cache, 5, list(range(60, 72)))

    assert sorted(cache.block_table(5)) == [1, 4, 5]
    assert [event for event in cache.take_events() if isinstance(event, BlockEvicted)] == [BlockEvicted(1, 4)]
    cache.remove(4)
    assert cached(cache) == [2, 3, 0]
    run(cache, 6, list(range(80, 88)))
    assert sorted(cache.block_table(6)) == [2, 3], "the block used last is still there"
    assert cache.stats().evictions == 3
    cache.check_invariants()


def test_leaves_go_before_what_they_stand_behind():
    """A, with B and C behind it, D behind C: whatever the order of ends, no parent goes before its child."""
    cache = new(4)
    run(cache, 0, A + B)
    run(cache, 1, A + C + D)
    cache.remove(0)
    cache.remove(1)
    assert cached(cache) == [1, 3, 2, 0]

    cache.add(2, ())
    gone = []
    for _ in range(4):
        cache.reserve(2, 4)
        gone += [event.block for event in cache.take_events() if isinstance(event, BlockEvicted)]
        cache.check_invariants()
    assert gone == [1, 3, 2, 0]


def test_a_block_that_was_just_hit_is_not_evicted_for_the_same_request():
    cache = new(4)
    ran(cache, 0, A + B)
    ran(cache, 1, C + D)
    assert cached(cache) == [1, 0, 3, 2]

    assert run(cache, 2, A + B + E + [1, 2, 3, 4]) == 8

    assert cache.block_table(2)[:2] == (0, 1)
    assert sorted(cache.block_table(2)[2:]) == [2, 3]


def test_a_requests_own_hits_do_not_count_as_blocks_that_it_could_take():
    cache = new(4)
    run(cache, 0, C)
    ran(cache, 1, A + B)
    before = cache.stats(), cache.block_map()
    hit = cache.lookup(A + B + D + E)

    assert cache.num_available == 3
    assert cache.blocks_to_begin(hit, 16) == 4, "two that are cached, and two more"
    assert cache.blocks_to_begin(hit, 12) == 3
    assert (cache.stats(), cache.block_map()) == before
    assert hit.num_unreferenced == 2, "of the 3 available"
    shared = cache.lookup(C + D)
    assert (cache.blocks_to_begin(shared, 8), shared.num_unreferenced) == (1, 0), "what another holds costs nothing"


def test_a_failed_reservation_leaves_counts_index_and_order_of_eviction():
    cache = new(5)
    ran(cache, 0, A)
    ran(cache, 1, B)
    run(cache, 2, C + D)
    before = cache.stats(), cache.block_map()

    with pytest.raises(OutOfBlocks) as shortage:
        cache.reserve(2, 16)

    assert (shortage.value.needed, shortage.value.free) == (4, 3)
    assert (cache.stats(), cache.block_map(), cache.take_events()[1:]) == (*before, ())
    assert cache.lookup(A).num_tokens == cache.lookup(B).num_tokens == 4


def test_a_block_that_is_taken_for_something_else_loses_its_old_content():
    cache = new(2)
    ran(cache, 0, A + B)
    assert found(cache, A + B) == (8, (0, 1))

    run(cache, 1, C)

    assert cache.block_table(1) == (1,)
    assert found(cache, A + B) == (4, (0,))
    cache.remove(1)
    assert found(cache, C) == (4, (1,))
    cache.check_invariants()


def test_of_two_blocks_with_the_same_content_the_second_takes_over():
    """Both began before either was computed."""
    cache = new()
    for seq_id in (0, 1):
        cache.add(seq_id, A)
        cache.reserve(seq_id, 4)
    for seq_id in (0, 1):
        cache.commit(seq_id, A)
    assert (cache.block_table(0), cache.block_table(1)) == ((0,), (1,)), "a table never changes behind one's back"

    assert found(cache, A) == (4, (0,))
    cache.remove(0)
    assert found(cache, A) == (4, (1,))
    assert cached(cache) == [], "the first is of no use any more"
    cache.remove(1)
    assert (found(cache, A), cached(cache)) == ((4, (1,)), [1])
    cache.check_invariants()


def test_a_cached_block_gives_way_to_one_in_use_with_the_same_content():
    cache = new()
    ran(cache, 0, A)
    assert run(cache, 1, A, max_cached=0) == 0  # wants all its logits

    assert cached(cache) == []
    assert found(cache, A) == (4, (1,))
    cache.check_invariants()


def test_what_stands_behind_a_content_outlives_the_block_that_was_first_with_it():
    cache = new()
    for seq_id in (0, 1):
        run(cache, seq_id, A, max_cached=0)
    run(cache, 2, A + B)
    assert cache.block_table(2) == (0, 2)
    cache.remove(2)
    cache.truncate(0, 0)

    assert found(cache, A + B) == (8, (1, 2))
    cache.check_invariants()


def test_without_a_free_block_writing_into_an_indexed_block_drops_it_and_what_stands_behind_it():
    cache = new(3)
    run(cache, 0, A + B + C)
    cache.truncate(0, 6)
    assert found(cache, A + B + C) == (12, (0, 1, 2)), "nothing is overwritten yet"

    assert cache.reserve(0, 1) == ()

    assert found(cache, A + B + C) == (6, (0, 1))
    assert cached(cache) == []
    cache.commit(0, [99])
    assert found(cache, A + B[:2] + [99, 1]) == (7, (0, 1))
    cache.check_invariants()


def test_a_block_that_another_shares_is_split_and_keeps_its_entry():
    cache = new()
    run(cache, 0, A + B)
    cache.fork(0, 1)
    cache.truncate(1, 6)

    assert cache.reserve(1, 1) == (BlockCopy(1, 2),)
    cache.commit(1, [99])
    assert found(cache, A + B) == (8, (0, 1))
    cache.check_invariants()


def test_a_sequence_that_is_dropped_and_added_again_is_looked_up_again():
    """As after a preemption: how much was cached the first time says nothing about the second."""
    cache = new(4)
    ran(cache, 0, A + B)
    assert run(cache, 1, A + B + C[:2], max_cached=9) == 8
    cache.remove(1)
    ran(cache, 2, list(range(60, 72)))

    assert cache.add(1, A + B + C[:2], max_cached=9) == 4
    assert (cache.computed_length(1), cache.reserved_length(1)) == (4, 4)
    cache.remove(1)
    ran(cache, 3, list(range(60, 76)))
    assert cache.add(1, A + B + C[:2], max_cached=9) == 0
    cache.check_invariants()


def test_each_added_sequence_is_counted_once_and_no_lookup_is():
    cache = new()
    ran(cache, 0, A + B)
    for _ in range(5):
        cache.lookup(A + B + C)
    cache.add(1, A + B + C)

    assert (cache.stats().prefix_queries, cache.stats().prefix_hits) == (8 + 12, 8)


@pytest.mark.parametrize("tokens", [A, A + B])
def test_a_content_at_the_wrong_depth_is_noticed(tokens):
    cache = new()
    run(cache, 0, tokens)
    cache.index.node_of[cache.block_table(0)[-1]].depth += 1

    with pytest.raises(AssertionError, match="not at this depth"):
        cache.check_invariants()


def test_an_order_of_eviction_that_leaves_a_block_behind_nothing_is_noticed():
    cache = new()
    ran(cache, 0, A + B)
    cache.pool.cached.move_to_end(1)

    with pytest.raises(AssertionError, match="block 1 would be evicted after"):
        cache.check_invariants()


@pytest.mark.parametrize("hash_function", [lambda *_: 0, lambda preceding, tokens: len(tokens)])
def test_a_hash_collision_serves_nobody_the_wrong_keys(hash_function):
    cache = PrefixKvCache(8, 4, hash_function)
    run(cache, 0, A)
    assert cache.lookup(B) == NO_HIT

    run(cache, 1, B)
    assert cache.block_table(1) == (1,)
    assert found(cache, B) == (4, (1,)), "not by its hash, but as a running sequence's"
    run(cache, 2, A + A)
    cache.check_invariants()
    cache.remove(1)
    cache.remove(2)
    assert (cache.lookup(B), cache.lookup(A + A)) == (NO_HIT, Hit(4, (0,)))
    cache.remove(0)
    assert cached(cache) == [0]
    run(cache, 3, list(range(60, 60 + 32)))  # takes every block, the cached one too
    cache.remove(3)
    run(cache, 4, B)
    cache.check_invariants()


@pytest.mark.parametrize("seq_id", [0, 1])
def test_the_check_sees_what_is_wrong_with_any_table(seq_id):
    cache = new()
    run(cache, 0, A + B)
    run(cache, 1, C + D)
    cache.reserve(seq_id, 4)
    cache.check_invariants()
    table = cache._tables[seq_id]
    table.token_ids[0] += 1
    with pytest.raises(AssertionError, match="not its tokens"):
        cache.check_invariants()
    table.computed = 4
    with pytest.raises(AssertionError, match="is indexed while it is being written"):
        cache.check_invariants()


def test_after_clearing_what_a_snapshot_holds_is_found():
    cache = new()
    for seq_id, tokens in enumerate((A + B + C[:1], D + E)):
        run(cache, seq_id, tokens)
        cache.snapshot(seq_id)
    cache.clear()
    assert (found(cache, A + B + C), found(cache, D + E)) == ((9, (0, 1, 2)), (8, (3, 4)))


def test_after_clearing_a_cache_without_snapshots_nothing_is_found():
    cache = new()
    ran(cache, 0, A + B)
    run(cache, 1, C + D[:1])
    cache.clear()
    assert (cached(cache), cache.num_available, cache.lookup(A + B)) == ([], 8, NO_HIT)
    cache.add(2, ())
    cache.reserve(2, 4)
    cache.commit(2, A)
    assert cache.lookup(A) == Hit(4, cache.block_table(2))
    cache.check_invariants()


def test_prefix_keys_are_equal_exactly_as_far_as_prompts_are():
    cache = new()
    keys = cache.prefix_keys(A + B + C[:3])
    assert len(keys) == 2
    assert cache.prefix_keys(A + B + D)[:2] == keys
    assert cache.prefix_keys(A + C)[0] == keys[0]
    others = [*cache.prefix_keys(B + A), *cache.prefix_keys(A + B, "salt"), cache.prefix_keys(A + C)[1]]
    assert len({*others, *keys}) == len(others) + len(keys)
    assert cache.prefix_keys(A[:3]) == ()


def test_a_subscriber_is_told_of_contents_by_their_prefix_keys_when_they_enter_and_leave():
    cache, entered, left = new(3), set(), set()
    cache.index.subscriber = SimpleNamespace(published=entered.add, evicted=left.add)
    for seq_id, tokens in enumerate((A + B, A + C)):
        run(cache, seq_id, tokens, salt="x")
        cache.remove(seq_id)
    keys = {key for tokens in (A + B, A + C) for key in cache.prefix_keys(tokens, "x")}
    assert (entered, left) == (keys, set())
    ran(cache, 2, D)
    assert left == {cache.prefix_keys(A + B, "x")[1]}, "the one that was evicted"
    cache.clear()
    assert left == entered == keys | {*cache.prefix_keys(D)}


def test_nobody_is_remembered_for_a_salt_without_blocks():
    cache = new(2)
    for tenant in range(50):
        ran(cache, tenant, A) if tenant % 2 else cache.lookup(A, str(tenant))
        cache.add(1000 + tenant, A, salt=str(tenant))
        cache.remove(1000 + tenant)

    assert len(cache.index._roots) <= 2


@pytest.mark.parametrize(("policy", "num_found"), [("lru", 0), ("prefix-cost", 8)])
def test_a_beginning_that_was_shared_outlives_prompts_that_came_once(policy, num_found):
    """Twice the same two blocks, then two prompts that came once, in a pool of four blocks."""
    cache = PrefixKvCache(4, 4, evict=EVICTION_POLICIES[policy])
    for seq_id in (0, 1):
        ran(cache, seq_id, A + B)
    ran(cache, 2, C + D)
    ran(cache, 3, D + E)

    assert cache.lookup(A + B).num_tokens == num_found
    assert cache.lookup(D + E).num_tokens == 8
    assert cache.stats().evictions == 2
    cache.check_invariants()


def test_what_was_shared_once_is_forgotten_when_it_is_no_longer_asked_for():
    """Of two beginnings that were found as often, the one asked for longest ago is cheaper to lose, whatever its place
    in the order of release."""
    cache = PrefixKvCache(3, 4, evict=prefix_cost)
    for seq_id, block in enumerate((A, A, B, B, B, C)):
        ran(cache, seq_id, block)
    assert cached(cache) == [0, 1, 2]
    ran(cache, 6, D)
    assert cache.lookup(C) == NO_HIT, "found by no request"
    ran(cache, 7, D)

    ran(cache, 8, E)

    assert [cache.lookup(block).num_tokens for block in (A, B, D, E)] == [0, 4, 4, 4]
    cache.check_invariants()


def test_what_was_found_more_often_but_long_ago_goes_before_what_was_found_just_now():
    cache = PrefixKvCache(3, 4, evict=prefix_cost)
    for seq_id, block in enumerate((A, B, B, D, D, D, D, A)):  # found: A once, now; B once, long ago; D often
        ran(cache, seq_id, block)
    ran(cache, 8, E)
    assert [cache.lookup(block).num_tokens for block in (A, B, D, E)] == [4, 0, 4, 4]
    for seq_id in range(9, 40):
        ran(cache, seq_id, A)

    ran(cache, 40, C)  # takes the place of E, which no request has found
    ran(cache, 41, C)
    ran(cache, 42, B)

    assert [cache.lookup(block).num_tokens for block in (A, B, C, D)] == [4, 4, 4, 0]


def test_a_policy_is_told_which_request_computed_a_block_last():
    cache = PrefixKvCache(3, 4)
    for seq_id, block in enumerate((A, B)):
        ran(cache, seq_id, block)
    assert sorted((node.num_hits, node.last_request) for node in cache.index.nodes.values()) == [(0, 1), (0, 2)]


def test_of_two_blocks_found_as_often_the_one_behind_fewer_tokens_is_cheaper_to_compute_again():
    cache = PrefixKvCache(4, 4, evict=prefix_cost)
    run(cache, 0, C + A + B)
    run(cache, 1, D)
    for seq_id in (0, 1):
        cache.remove(seq_id)
    cache.add(2, C + A + B)
    cache.add(3, D)
    for seq_id in (2, 3):
        cache.remove(seq_id)
    for node in cache.index.nodes.values():
        node.last_request = 4

    cache.add(4, E)
    cache.reserve(4, 4)

    assert (cache.lookup(C + A + B).num_tokens, cache.lookup(D)) == (12, NO_HIT)


def test_a_policy_sees_leaves_alone():
    """A block that another stands behind cannot go first, or that one could not be found."""
    offered: list[list[int]] = []

    def last_of(leaves, requests):
        nodes = list(leaves)
        offered.append([block for node in nodes for block in node.blocks])
        return nodes[-1]

    cache = PrefixKvCache(4, 4, evict=last_of)
    ran(cache, 0, A + B + C)
    ran(cache, 1, D + E + A)

    assert offered == [[2], [1]]
    assert cache.lookup(A + B + C).num_tokens == 4
    cache.check_invariants()
