"""Exercise 6: a prefix index, and eviction.

Read chapter 5 first (forge prefix). A key or a value depends on every token before it. So a full block is found by its
tokens *and* all that precedes them: a chain of hashes, a tree of blocks.

    root ── [once upon a time] ── [there was a small] ── [fox who lived by]
                               └─ [the old mill stood]

A block that no table has any more stays cached until its room is needed. The least recently used one goes first, and a
leaf before what it stands behind.

Fill in the six functions. A prompt may have thousands of blocks: the time of keys and drop may grow with their number
and not with its square, and a recursion would be too deep. Then:

    forge build check 6      exact hits, exact order of eviction
    forge build run 6        the engine: requests that begin alike
"""

from collections.abc import Sequence

from forge.cache.prefix_index import Node, Tokens  # Node(key, parent, depth, token_ids); Tokens is a tuple of ints
from forge.exercises.prefix_index import IndexBase, PrefixBase


class MyPrefixIndex(IndexBase):
    """Finds the block that holds given tokens behind given tokens.

    You have `self.hash_function(preceding, token_ids)`, `self.nodes` (a dictionary from hash to `Node`), `self.node_of`
    (from block to `Node`) and `self.root(salt)`. A `Node` has `key` (its hash), `parent`, `depth`, `token_ids`,
    `blocks` (those that hold this content, the one that is served in front) and `children` (a set).
    """

    def keys(self, token_ids: Sequence[int], block_size: int, salt: str = "") -> tuple[int, ...]:
        """Return the chained hash of each full block of a prompt.

        It is `self.hash_function(the key before, the block's tokens)`. The first key before is `self.root(salt).key`.
        Tokens are passed as a tuple. Changes nothing.
        """
        raise NotImplementedError("keys")

    def child(self, parent: Node, token_ids: Tokens) -> Node | None:
        """Return the node of a block of `token_ids` behind `parent`, if there is one.

        A hash proves nothing: the node that is found must have this parent and these tokens.
        """
        raise NotImplementedError("child")

    def insert(self, parent: Node, token_ids: Tokens, block: int) -> Node | None:
        """Index a block under its content, behind other blocks that have the same; return the node.

        A new `Node(key, parent, depth, token_ids)`, one deeper than its parent, is entered in `self.nodes` and in its
        parent's children; the block in the node's `blocks` and in `self.node_of`, unless it is there already. Returns
        None, with nothing indexed, if another content has the same hash.
        """
        raise NotImplementedError("insert")

    def drop(self, block: int) -> list[int]:
        """Remove a block that no longer has its content. If another block has the same, that one takes over: return [].

        Otherwise its node goes, and with it all that stands behind it, which cannot be found any more: return the
        blocks of those nodes, in any order, without the block itself. What goes leaves every table that it is in.
        """
        raise NotImplementedError("drop")


class MyPrefixCache(PrefixBase):
    """You have `self.pool.cached`: the cached blocks, the one released longest ago in front."""

    def release_order(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return the order in which a sequence that ends releases its blocks, so that a leaf is evicted before what it
        stands behind. blocks: a tuple, in the order of the positions that they hold."""
        raise NotImplementedError("release_order")

    def next_to_evict(self) -> int:
        """Return the cached block to evict next."""
        raise NotImplementedError("next_to_evict")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
