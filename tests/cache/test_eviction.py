"""Each eviction policy gives up the block that its description says."""

import pytest

from forge.cache.eviction import ATTENTION_BLOCKS, eviction_policy, lru, prefix_cost
from forge.cache.prefix_index import Node
from forge.errors import UsageError


def leaf(num_hits: int, depth: int = 0, last_request: int = 0) -> Node:
    return Node(0, None, depth, num_hits=num_hits, last_request=last_request)


def test_lru_gives_up_the_block_that_was_released_longest_ago():
    leaves = [leaf(9), leaf(0)]
    assert lru(iter(leaves), 5) is leaves[0]


def test_prefix_cost_gives_up_what_came_once_before_what_came_again_the_first_of_equals():
    leaves = [leaf(1), leaf(0, last_request=9), leaf(0)]
    assert prefix_cost(iter(leaves), 10) is leaves[1]


def test_prefix_cost_gives_up_the_shallower_of_two_and_a_later_token_costs_twice_at_the_depth_that_says_so():
    deep, shallow = leaf(1, depth=ATTENTION_BLOCKS), leaf(1, depth=0)
    assert prefix_cost(iter([deep, shallow]), 0) is shallow
    assert prefix_cost(iter([deep, leaf(2)]), 0) is deep, "one hit at that depth is worth two at none, not less"
    assert prefix_cost(iter([leaf(2), deep]), 0) is not deep, "nor more"


def test_prefix_cost_divides_by_the_requests_since_the_last_hit_and_one():
    new, old = leaf(1, last_request=9), leaf(2, last_request=8)
    assert prefix_cost(iter([new, old]), 9) is new, "2 hits, 1 request ago, are worth as much as 1 hit now"
    assert prefix_cost(iter([old, new]), 9) is old
    assert prefix_cost(iter([leaf(3, last_request=8), new]), 9) is new
    older = leaf(2, last_request=7)
    assert prefix_cost(iter([new, older]), 9) is older


def test_a_policy_is_found_by_its_name_or_is_a_function():
    assert eviction_policy("lru") is lru and eviction_policy("prefix-cost") is prefix_cost
    assert eviction_policy(prefix_cost) is prefix_cost
    with pytest.raises(UsageError, match="unknown --evict 'lfu'; supported: lru, prefix-cost"):
        eviction_policy("lfu")
