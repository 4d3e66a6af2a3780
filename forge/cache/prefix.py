"""The prefix cache: paged, and what one sequence has computed serves every later one that begins with the same tokens.

Every full block whose tokens are committed is indexed by its content, of prompts and of answers alike. It stays indexed
after its sequence has gone, until the block is needed for something else. A new sequence attaches

- whole blocks from the index, as far as they match; and behind them
- the beginning of one more block, token by token, if a running sequence (or a snapshot) has committed it: the block is
  shared in part and copied when the new sequence writes. A cached block that no table references is attached in part
  only where all of its tokens match and `max_cached` leaves some out.

What a step is still computing is not yet a hit, and what was reserved and never committed never becomes one.

Blocks are taken in this order: free ones; then cached ones, in the order of a policy (`eviction`), by default the least
recently used one first. A sequence releases its last block first, so the least recently used block is always a leaf of
the index. A content that several blocks have is served from the first of them; when that one goes, the next takes over,
and only the last one stays cached.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from forge.cache.block_pool import BlockTable, blocks_for
from forge.cache.eviction import EvictionPolicy, lru
from forge.cache.kv_cache import Hit, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.cache.paged import PagedKvCache
from forge.cache.prefix_index import ChainHash, Node, PrefixIndex, chain_hash
from forge.trace.records import BlockEvicted, PrefixHit


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixTable(BlockTable):
    """A block table with its tokens and the index node of its last indexed block."""

    tip: Node
    """The content of its last indexed block; all blocks before that one are indexed too."""
    salt: str
    token_ids: list[int]
    """The tokens of the computed slots; what follows them means nothing."""

    def computed_part(self, block_size: int) -> "PrefixTable":
        blocks, tokens = self.blocks[: blocks_for(self.computed, block_size)], self.token_ids[: self.computed]
        return PrefixTable(blocks, self.computed, self.computed, tip=self.tip, salt=self.salt, token_ids=tokens)


class PrefixKvCache(PagedKvCache):
    """A paged cache in which a sequence begins with the blocks of earlier sequences that began with the same tokens.

    Holds, beside the pool and the tables, a `PrefixIndex` of full blocks by content. Promises that a hit has the keys
    and values of exactly these tokens under this salt, that a lookup changes nothing, and that a block which later
    blocks stand behind is not evicted before them.
    """

    kind = "prefix"
    _tables: dict[int | Snapshot, PrefixTable]  # type: ignore[assignment]  # narrower: `add` enters no other tables

    def __init__(
        self, num_blocks: int, block_size: int, hash_function: ChainHash = chain_hash, evict: EvictionPolicy = lru
    ):
        super().__init__(num_blocks, block_size)
        self.index = PrefixIndex(hash_function)
        self.pool.cacheable = self.index.node_of
        self._evict = evict
        self._num_requests = 0
        self._counts |= {"prefix_queries": 0, "prefix_hits": 0, "evictions": 0}

    def lookup(self, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> Hit:
        num_tokens, blocks, _ = self._match(token_ids, salt, max_cached)
        counts = self.pool.reference_counts
        return Hit(num_tokens, blocks, sum(counts[block] == 0 for block in blocks))

    def prefix_keys(self, token_ids: Sequence[int], salt: str = "") -> tuple[int, ...]:
        return self.index.keys(token_ids, self.block_size, salt)

    def blocks_to_begin(self, hit: Hit, length: int) -> int:
        writes_last = length > hit.num_tokens and hit.num_tokens % self.block_size
        copies = writes_last and self.pool.reference_counts[hit.blocks[-1]] > 0
        grown = max(0, blocks_for(length, self.block_size) - len(hit.blocks))
        return hit.num_unreferenced + grown + (1 if copies else 0)

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        assert seq_id not in self._tables, f"sequence {seq_id} is already there"
        length, blocks, tip = self._match(token_ids, salt, max_cached)
        table = PrefixTable(blocks, length, length, tip=tip, salt=salt, token_ids=list(token_ids[:length]))
        self._attach(table)
        self._tables[seq_id] = table
        self._num_requests += 1
        while tip.parent is not None:
            tip.num_hits += 1
            tip.last_request = self._num_requests
            tip = tip.parent
        self._counts["prefix_queries"] += len(token_ids)
        self._counts["prefix_hits"] += length
        if length:
            self._events.append(PrefixHit(seq_id, length, blocks))
        return length

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        super().commit(seq_id, token_ids)
        table = self._tables[seq_id]
        table.token_ids[table.computed - len(token_ids) :] = token_ids
        if table.computed // self.block_size > table.tip.depth:
            self.index_table(table)

    def truncate(self, seq_id: int, length: int) -> None:
        table = self._tables[seq_id]
        while table.tip.parent is not None and table.tip.depth * self.block_size > length:
            table.tip = table.tip.parent
        super().truncate(seq_id, length)

    def check_invariants(self) -> None:
        super().check_invariants()
        self.index.check_invariants()
        counts, order = self.pool.reference_counts, {block: place for place, block in enumerate(self.pool.cached)}
        for block, node in self.index.node_of.items():
            assert counts[block] or node.blocks == [block], f"block {block} is cached beside another with its content"
            above = node.parent.blocks if node.parent else []  # all of these are referenced, or one is cached
            assert not counts[block] or not above or counts[above[0]], f"block {block} outlives what it stands behind"
            if block in order and above and above[0] in order:
                assert order[block] < order[above[0]], f"block {block} would be evicted after what it stands behind"
        for table in self._tables.values():
            self._check_contents(table)

    def _check_contents(self, table: PrefixTable) -> None:
        size, node = self.block_size, table.tip
        if table.reserved > table.computed:
            for block in table.blocks[table.computed // size :]:
                assert block not in self.index.node_of, f"block {block} is indexed while it is being written"
        assert len(table.token_ids) >= table.computed >= node.depth * size, f"lengths out of order: {table}"
        while node.parent is not None:
            start = (node.depth - 1) * size
            assert self.index.node_of[table.blocks[node.depth - 1]] is node, f"not its block's content: {table}"
            assert tuple(table.token_ids[start : start + size]) == node.token_ids, f"not its tokens: {table}"
            node = node.parent
        assert node is self.index.root(table.salt), f"not under its salt: {table}"

    def _match(self, token_ids: Sequence[int], salt: str, max_cached: int | None) -> tuple[int, tuple[int, ...], Node]:
        """Return the longest cached beginning: how many tokens, the blocks that hold them, the content of its whole
        blocks."""
        size, node, blocks, length = self.block_size, self.index.root(salt), [], 0
        limit = len(token_ids) if max_cached is None else max(0, min(len(token_ids), max_cached))
        while length < limit and length + size <= len(token_ids):
            child = self.index.child(node, tuple(token_ids[length : length + size]))
            if child is None:
                break
            blocks.append(child.blocks[0])
            length += size
            if length > limit:
                return limit, tuple(blocks), node
            node = child
        shared, block = self._running_match(node, salt, list(token_ids[length : min(length + size, limit)]))
        return length + shared, (*blocks, block) if shared else tuple(blocks), node

    def _running_match(self, node: Node, salt: str, token_ids: list[int]) -> tuple[int, int]:
        """Return how many of these tokens, which would follow `node`, some table has committed, and the block they are
        in."""
        best, block, start = 0, -1, node.depth * self.block_size
        for table in self._tables.values() if token_ids else ():
            if table.computed <= start or table.token_ids[start] != token_ids[0]:
                continue
            if table.salt != salt or (start and self.index.node_of.get(table.blocks[node.depth - 1]) is not node):
                continue
            theirs = table.token_ids[start : min(table.computed, start + len(token_ids))]
            common = sum(takewhile(bool, map(eq, theirs, token_ids)))
            if common > best:
                best, block = common, table.blocks[node.depth]
        return best, block

    def index_table(self, table: PrefixTable) -> None:
        """Index a table's full blocks that are not indexed yet."""
        size = self.block_size
        while (start := table.tip.depth * size) + size <= table.computed:
            block = table.blocks[table.tip.depth]
            node = self.index.insert(table.tip, tuple(table.token_ids[start : start + size]), block)
            if node is None:
                return
            node.last_request = self._num_requests
            if not self.pool.reference_counts[node.blocks[0]]:
                self._drop_from_index(node.blocks[0])  # cached, and no longer the only one with its content
            table.tip = node

    def _copy_on_write(self, seq_id: int, table: BlockTable, needed: int) -> tuple[BlockCopy, ...]:
        """Copy an indexed block with one reference too: it becomes a cached one, so `num_available` stays the same.

        If no free block is left for the copy, it is overwritten instead, and what is cached behind it is lost.
        """
        last = table.blocks[-1]
        if last in self.pool.cacheable and self.pool.reference_counts[last] == 1 and len(self.pool.free) <= needed:
            self._drop_from_index(last)
        return super()._copy_on_write(seq_id, table, needed)

    def _allocate(self, number: int) -> tuple[int, ...]:
        while len(self.pool.free) < number:
            (block,) = self._evict(self._cached_leaves(), self._num_requests).blocks  # only the last one is cached
            self._drop_from_index(block)
            self._counts["evictions"] += 1
            self._events.append(BlockEvicted(block, self.block_size))
        return super()._allocate(number)

    def _cached_leaves(self) -> Iterator[Node]:
        """Yield the contents of cached blocks behind which nothing is indexed, the one released longest ago first."""
        nodes = map(self.index.node_of.__getitem__, self.pool.cached)
        return (node for node in nodes if not node.children)

    def _release_block(self, block: int) -> None:
        is_last = self.pool.reference_counts[block] == 1
        if is_last and block in self.pool.cacheable and len(self.index.node_of[block].blocks) > 1:
            self._drop_from_index(block)  # another block has its content
        super()._release_block(block)

    def _drop_from_index(self, block: int) -> None:
        """Drop a block's content from the index. If no other block has the same, the blocks behind it lose theirs
        too."""
        for lost in (block, *self.index.drop(block)):
            self.pool.uncache(lost)

    def _rebuild(self) -> None:
        """Index what the tables hold again, and drop what was merely cached."""
        super()._rebuild()
        self.index.clear()
        for table in self._tables.values():
            table.tip = self.index.root(table.salt)
            self.index_table(table)
