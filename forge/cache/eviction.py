"""Eviction policies, each a small pure function: which cached block gives its room to a sequence that needs it.

To add a policy, write one function; pass it as it is, or enter it in the table to give it a name.

A policy chooses among the *leaves* of the prefix index that no table references: a block that others stand behind
cannot go before them. The default is `lru`, as in vLLM and SGLang. SGLang also offers lfu, fifo and others, each a
score of one leaf; here the second policy is `prefix-cost`, because a count alone never forgets: what was popular
yesterday stays for as long as the counts of today are lower.
"""

from collections.abc import Callable, Iterator, Mapping

from forge.cache.prefix_index import Node
from forge.errors import UsageError

EvictionPolicy = Callable[[Iterator[Node], int], Node]
"""From the cached leaves, the one released longest ago in front and never none, and the number of requests so far, to
the leaf whose block is evicted."""

ATTENTION_BLOCKS = 256
"""Blocks of 16 tokens whose keys take a later token as long to attend to as all matrices take (Qwen3-0.6B: 0.9 GFLOP of
matrices, 0.23 MFLOP per key)."""


def lru(leaves: Iterator[Node], requests: int) -> Node:
    """Choose the leaf that was released longest ago."""
    return next(leaves)


def prefix_cost(leaves: Iterator[Node], requests: int) -> Node:
    """Choose the leaf that is cheapest to lose: its hits, times what it takes to compute again, per request since then.

    What came once goes first, in the order of `lru`, so a shared beginning outlives prompts that pass through; and it
    is forgotten when it is no longer asked for (hyperbolic caching: Blankstein et al. 2017, with the time since the
    last use). A deep block costs more, because its tokens attend to all before it. Loses to `lru` where what came once
    is about to come again and the pool cannot hold it until then. Looks at every cached block, 0.1 µs each.
    """

    def loss(leaf: Node) -> float:
        return leaf.num_hits * (1 + leaf.depth / ATTENTION_BLOCKS) / (1 + requests - leaf.last_request)

    return min(leaves, key=loss)  # of equals the one released longest ago


EVICTION_POLICIES: Mapping[str, EvictionPolicy] = {"lru": lru, "prefix-cost": prefix_cost}


def eviction_policy(choice: str | EvictionPolicy) -> EvictionPolicy:
    """Return a policy by its name, or the policy itself. Raises `UsageError` for an unknown name, listing the known."""
    if callable(choice):
        return choice
    if choice not in EVICTION_POLICIES:
        raise UsageError(f"unknown --evict {choice!r}; supported: {', '.join(EVICTION_POLICIES)}")
    return EVICTION_POLICIES[choice]
