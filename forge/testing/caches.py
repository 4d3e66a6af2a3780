"""Random operations on a `KvCache`, held against an oracle that knows only what the seam promises.

`check_cache` performs lists of operations, with `check_invariants()` and every observable fact after each.
`shortest_failure` cuts a failing list down: it drops operations for as long as the rest still fails. An operation names
a sequence or a snapshot by its place among those that there are (modulo their number), so nearly every one does
something, and any sublist is a valid list.

The oracle is a dictionary of token lists. Beside the policy runs a storage: each committed token is written into its
slot as a number that stands for it *and all that precedes it*, as a key does, and each copy is performed. So a block
that was shared wrongly, written while shared, or copied too late is seen by reading every sequence and snapshot back
through its table. Tokens come from a vocabulary of two, so that prompts begin alike again and again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count
from typing import Any, Protocol

import numpy as np

from forge.cache.kv_cache import KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import BlockCopy
from forge.cache.prefix import PrefixKvCache
from forge.trace.records import BlockEvicted, BlockSplit, PrefixHit

KINDS = {
    "add": 2,
    "begin": 6,
    "fill": 8,
    "reserve": 4,
    "commit": 5,
    "truncate": 2,
    "fork": 3,
    "snapshot": 2,
    "restore": 2,
    "release": 2,
    "remove": 6,
    "rename": 1,
}
"""The operations, and how often each is drawn."""
Operation = tuple[str, int, int, int]
"""(kind, which sequence or snapshot, how many tokens, a number whose bits are tokens and choices)."""

LENGTH = 300
"""Operations in a list."""
MAX_HELD = 7
"""Sequences, and snapshots, at most: with the cache off nothing else bounds them."""
MAX_TOKENS = 9


def check_cache(
    new_cache: Callable[[], KvCache],
    num_blocks: int | None = None,
    lists: int = 20,
    finds_all: bool = True,
    evicts_oldest: bool = True,
) -> None:
    """Raise AssertionError, with the shortest list of operations that shows it, if a kind of cache breaks a promise.

    new_cache: makes an empty one, best a small one, so that it runs out of blocks. num_blocks: the blocks of its
    storage, if they are more than its own. lists: how many lists of 300 operations, some 20 ms each. finds_all: whether
    a prefix cache has to find all that is there. evicts_oldest: whether it evicts the least recently used block.
    """
    blocks = new_cache().stats().num_blocks if num_blocks is None else num_blocks
    for seed in range(lists):
        operations = random_operations(seed, LENGTH)
        failing = shortest_failure(lambda: Oracle(new_cache(), blocks, finds_all, evicts_oldest), operations)
        assert failing is None, f"seed {seed}, shortest failing sequence of operations:\n{failing}"


class Performer(Protocol):
    """Performs a list of operations."""

    def perform(self, operation: Operation) -> None:
        """Perform one operation. Raises an exception if a promise is broken."""


def random_operations(seed: int, length: int, weighted: Mapping[str, int] = KINDS) -> list[Operation]:
    """Draw a list of operations. `weighted`: the kinds, and how often each."""
    rng = np.random.default_rng(seed)
    weights = np.array(list(weighted.values()), float)
    kinds = rng.choice(list(weighted), size=length, p=weights / weights.sum()).tolist()
    columns = (rng.integers(high, size=length).tolist() for high in (100, MAX_TOKENS, 1 << 40))
    return list(zip(kinds, *columns, strict=True))


def digits(word: int, count: int) -> list[int]:
    """Return `count` tokens of 0 and 1; the first few are mostly 0, so that many prompts begin alike."""
    bits = [word >> index & 1 for index in range(2 * count)]
    return [bits[index] & (bits[index + count] if index < 4 else 1) for index in range(count)]


@dataclass
class Content:
    """The tokens that the oracle expects in one sequence or snapshot."""

    salt: str = ""
    tokens: list[int] = field(default_factory=list)
    """The computed tokens."""
    reserved: int = 0
    """Slots that it owns."""
    prompt: list[int] = field(default_factory=list)
    """The tokens that it will commit before it makes up its own."""

    def copy(self) -> "Content":
        return Content(self.salt, list(self.tokens), len(self.tokens))


class Oracle:
    """A model of the seam's promises without any blocks. With the cache off, a sequence's tokens are gone once
    committed."""

    def __init__(
        self,
        cache: KvCache,
        num_blocks: int,
        finds_all: bool = True,
        evicts_oldest: bool = True,
        call: Callable[..., Any] | None = None,
    ):
        """`finds_all`: no two contents have the same hash, so that whatever is there has to be found. `evicts_oldest`:
        the policy is lru. `call`: calls the cache's method of a name with arguments; given by those who watch."""
        self.cache, self.block_size = cache, cache.block_size
        self.finds_all, self.evicts_oldest = finds_all, evicts_oldest
        self.call = call or (lambda name, *arguments: getattr(cache, name)(*arguments))
        self.slots = [[0] * self.block_size for _ in range(num_blocks)]
        self.sequences: dict[int, Content] = {}
        self.snapshots: dict[int, tuple[Snapshot, Content]] = {}
        self.next_id = 0
        self.tags: dict[tuple, int] = {}
        self.counts = {"prefix_queries": 0, "prefix_hits": 0, "splits": 0, "evictions": 0}

    def perform(self, operation: Operation) -> None:
        kind, which, count, word = operation
        held = self.snapshots if kind in ("restore", "release") else self.sequences
        begins = kind in ("add", "begin")
        if not begins and not held:
            return
        before = self.observed()
        try:
            name = self.new_id() if begins else list(held)[which % len(held)]
            getattr(self, f"_{kind}")(name, count, word)
        except OutOfBlocks as shortage:
            assert shortage.needed > shortage.free >= 0, f"{shortage} is no shortage"
            assert self.observed() == before, "a refused operation changed something"
        self.count_events()
        self.cache.check_invariants()
        self.check()

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def observed(self) -> tuple:
        """Return everything that the seam shows."""
        return self.cache.stats(), self.cache.block_map(), self.cache.num_available

    def check(self) -> None:
        tables = self.cache.block_map().tables
        stats = self.cache.stats()
        kept = {snapshot.snapshot_id: content for snapshot, content in self.snapshots.values()}
        for seq_id, content in self.sequences.items():
            table = self.cache.block_table(seq_id)
            assert self.cache.computed_length(seq_id) == len(content.tokens), f"computed length of {seq_id}"
            assert self.cache.reserved_length(seq_id) == content.reserved, f"reserved length of {seq_id}"
            assert len(table) == -(-content.reserved // self.block_size), f"table of {seq_id}"
            assert self.read(table, len(content.tokens)) == self.tags_of(content), f"contents of {seq_id}"
        entries = [block for table in tables for block in table.blocks]
        held = {(block, slot) for table in tables for block, slot in self.places(table.blocks, table.computed)}
        for held_table in tables if self.cache.persistent else ():
            owners = kept if held_table.is_snapshot else self.sequences
            expected = self.tags_of(owners[held_table.owner])
            assert self.read(held_table.blocks, held_table.computed) == expected, f"contents of {held_table}"
        assert stats.tokens_held == len(held), "tokens held"
        assert stats.used_blocks == len(set(entries)), "used blocks"
        assert stats.blocks_saved == len(entries) - len(set(entries)), "blocks saved"
        assert {name: getattr(stats, name) for name in self.counts} == self.counts, "what was counted"

    def places(self, blocks: Sequence[int], length: int) -> Iterable[tuple[int, int]]:
        """Return (block, slot) of each of the first `length` positions."""
        return ((blocks[position // self.block_size], position % self.block_size) for position in range(length))

    def read(self, blocks: Iterable[int], length: int) -> list[int]:
        return [tag for block in blocks for tag in self.slots[block]][:length]

    def tags_of(self, content: Content) -> list[int]:
        return self.tags_after(content.salt, content.tokens)

    def tags_after(self, salt: str, tokens: list[int]) -> list[int]:
        """Return for each token a number that stands for it, the tokens before it, and the salt."""
        path: str | int = salt
        tags = []
        for token in tokens:
            path = tag = self.tags.setdefault((path, token), len(self.tags) + 1)
            tags.append(tag)
        return tags

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        for copy in copies:
            self.slots[copy.destination] = list(self.slots[copy.source])

    def count_events(self) -> list[int]:
        """Add up what the cache says that it did; return the blocks that it evicted."""
        events = self.cache.take_events()
        for event in events:
            self.counts["splits"] += isinstance(event, BlockSplit)
            self.counts["evictions"] += isinstance(event, BlockEvicted)
            if isinstance(event, PrefixHit):
                self.counts["prefix_hits"] += event.num_tokens
        return [event.block for event in events if isinstance(event, BlockEvicted)]

    def expected_hit(self, prompt: list[int], salt: str, limit: int) -> int:
        """Return how much of a prompt must be found: what lies in running sequences, snapshots and cached blocks."""
        size, tags = self.block_size, self.tags_after(salt, prompt)
        contents = [*self.sequences.values(), *(content for _, content in self.snapshots.values())]
        running = [self.tags_of(content) for content in contents]
        whole = {tuple(theirs[start : start + size]) for theirs in running for start in range(0, len(theirs), size)}
        whole |= {tuple(self.slots[block]) for block in self.cache.block_map().cached}
        starts = range(0, len(tags) - size + 1, size)
        missing = (start for start in starts if tuple(tags[start : start + size]) not in whole)
        cached = next(missing, size * (len(tags) // size))
        common = (sum(ours == tag for ours, tag in zip(tags, theirs, strict=False)) for theirs in running)
        return min(limit, max([cached, *common]))

    def request(self, count: int, word: int) -> tuple[list[int], str, int]:
        """Draw a prompt, its salt, and how much of it may be found."""
        prompt = digits(word, 2 * count)[: getattr(self.cache, "max_model_len", None)]
        return prompt, "other" if word % 7 == 0 else "", [len(prompt), max(0, len(prompt) - 1), count][word % 3]

    def _add(self, seq_id: int, count: int, word: int) -> None:
        if len(self.sequences) < MAX_HELD:
            prompt, salt, limit = self.request(count, word)
            order = self.cache.block_map().cached
            hit = self.cache.lookup(prompt, salt, limit)
            counts = self.cache.block_map().reference_counts
            assert hit.num_unreferenced == sum(not counts[block] for block in hit.blocks), f"not so: {hit}"
            assert self.cache.block_map().cached == order, "looking changed the order of eviction"
            if isinstance(self.cache, PrefixKvCache):
                expected = self.expected_hit(prompt, salt, limit)
                # what a truncated sequence no longer has may still lie in its last block, and be found
                assert not self.finds_all or expected <= hit.num_tokens <= limit, f"found {hit}, there is {expected}"
                self.counts["prefix_queries"] += len(prompt)
            num_cached = self.call("add", seq_id, prompt, salt, limit)
            assert num_cached == hit.num_tokens, f"lookup found {hit.num_tokens} cached tokens, and add {num_cached}"
            table = self.cache.block_table(seq_id)
            assert table == hit.blocks, f"a new sequence has the blocks of its hit, {hit.blocks}, and this one {table}"
            cached = prompt[: hit.num_tokens]
            self.sequences[seq_id] = Content(salt, cached, hit.num_tokens, prompt[hit.num_tokens :])

    def _begin(self, seq_id: int, count: int, word: int) -> None:
        """Add a sequence and reserve its whole prompt, for exactly the blocks that it was said to take."""
        if len(self.sequences) >= MAX_HELD:
            return
        before, free = self.observed(), self.cache.num_available
        prompt, salt, limit = self.request(count, word)
        cost = self.cache.blocks_to_begin(self.cache.lookup(prompt, salt, limit), len(prompt))
        assert self.observed() == before, "asking changed something"
        try:
            self._add(seq_id, count, word)
            self._reserve(seq_id, len(self.sequences[seq_id].prompt), word)
        except OutOfBlocks:
            assert cost > free, f"said to take {cost} blocks of {free}, and found too few"
            if seq_id in self.sequences:
                self.count_events()
                self._remove(seq_id, 0, 0)
        else:
            assert free - self.cache.num_available == cost, f"said to take {cost} blocks, took another number"

    def _fill(self, seq_id: int, count: int, word: int) -> None:
        self._reserve(seq_id, count, word)
        self._commit(seq_id, 99, word)

    def _reserve(self, seq_id: int, count: int, _: int) -> None:
        needed, free = self.call("blocks_needed", seq_id, count), self.cache.num_available
        order = self.cache.block_map().cached
        self.copy(self.call("reserve", seq_id, count))
        self.sequences[seq_id].reserved += count
        assert free - self.cache.num_available == needed <= free, "blocks_needed was wrong"
        evicted, left = self.count_events(), self.cache.block_map().cached
        assert len(evicted) <= max(0, needed - (free - len(order))), "evicted more than was needed"
        in_turn = [block for block in order if block in evicted or block in left]  # others lost what they stood behind
        newly_cached = [block for block in left if block not in order]  # the old one, where a cached block was copied
        staying = [block for block in in_turn if block not in evicted]
        assert [*staying, *newly_cached] == [*left], f"evicted {evicted} of {order}, cached are {left}"
        assert not self.evicts_oldest or in_turn[: len(evicted)] == evicted, f"evicted {evicted} of {order}"

    def _commit(self, seq_id: int, count: int, word: int) -> None:
        content = self.sequences[seq_id]
        count = min(count, content.reserved - len(content.tokens))
        tokens = (content.prompt + digits(word, count))[:count]
        places = list(self.places(self.cache.block_table(seq_id), content.reserved))[len(content.tokens) :]
        content.tokens += tokens
        content.prompt = content.prompt[count:]
        for (block, slot), tag in zip(places, self.tags_of(content)[len(content.tokens) - count :], strict=False):
            self.slots[block][slot] = tag
        self.call("commit", seq_id, tokens)
        if not self.cache.persistent:
            self.sequences[seq_id] = Content()

    def _truncate(self, seq_id: int, length: int, word: int) -> None:
        length += word % 3 * 4
        self.call("truncate", seq_id, length)
        content = self.sequences[seq_id]
        kept = min(content.reserved, length) if self.cache.persistent else 0
        self.sequences[seq_id] = Content(content.salt, content.tokens[:length], kept)

    def _fork(self, parent: int, *_: int) -> None:
        if len(self.sequences) < MAX_HELD:
            child = self.new_id()
            self.copy(self.call("fork", parent, child))
            self.sequences[child] = self.sequences[parent].copy()

    def _snapshot(self, seq_id: int, *_: int) -> None:
        if len(self.snapshots) < MAX_HELD:
            snapshot, copies = self.call("snapshot", seq_id)
            self.copy(copies)
            computed = len(self.sequences[seq_id].tokens)
            assert snapshot.length == computed, f"a snapshot of {computed} tokens says that it has {snapshot.length}"
            self.snapshots[self.new_id()] = snapshot, self.sequences[seq_id].copy()

    def _restore(self, name: int, *_: int) -> None:
        if len(self.sequences) < MAX_HELD:
            snapshot, content = self.snapshots[name]
            seq_id = self.new_id()
            self.copy(self.call("restore", snapshot, seq_id))
            self.sequences[seq_id] = content.copy()

    def _release(self, name: int, *_: int) -> None:
        self.call("release", self.snapshots[name][0])
        del self.snapshots[name]

    def _remove(self, seq_id: int, *_: int) -> None:
        self.call("remove", seq_id)
        del self.sequences[seq_id]

    def _rename(self, seq_id: int, *_: int) -> None:
        new_id = self.new_id()
        assert seq_id in self.cache and new_id not in self.cache, f"before it is renamed there is {seq_id} alone"
        self.call("rename", seq_id, new_id)
        assert seq_id not in self.cache and new_id in self.cache, f"after it was renamed there is {new_id} alone"
        self.sequences[new_id] = self.sequences.pop(seq_id)


def failure(new: Callable[[], Performer], operations: list[Operation]) -> tuple[int, Exception] | None:
    """Return (how many operations were performed, what went wrong), or None."""
    oracle = new()
    for index, operation in enumerate(operations):
        try:
            oracle.perform(operation)
        except Exception as error:
            return index + 1, error
    return None


def shortest_failure(new: Callable[[], Oracle], operations: list[Operation]) -> str | None:
    """Return None if all goes well; otherwise a failing list from which no one or two can be left out, and its
    error."""
    shortest = shrunk(new, operations)
    if shortest is None:
        return None
    error, failing = shortest
    return "\n".join([f"{type(error).__name__}: {error}", *map(str, failing)])


def shrunk(
    new: Callable[[], Performer], operations: list[Operation], most: int | None = None
) -> tuple[Exception, list[Operation]] | None:
    """Return None if all goes well; otherwise the error and a failing list from which no one or two can be left out.

    most: how many shorter lists to try in all; None tries all that there are.
    """
    failing = failure(new, operations)
    if failing is None:
        return None
    tries = count() if most is None else iter(range(most))
    while failing is not None:
        (length, error), operations = failing, operations[: failing[0]]
        for dropped, _ in zip(_candidates(length), tries, strict=False):
            shorter = [operation for index, operation in enumerate(operations) if index not in dropped]
            failing = failure(new, shorter)
            if failing is not None:
                operations = shorter
                break
        else:
            failing = None
    return error, operations


def _candidates(length: int) -> Iterable[Iterable[int]]:
    """Yield what to leave out: long stretches first, then any one, then any two."""
    size = length // 2
    while size > 1:
        yield from (range(start, start + size) for start in range(0, length - size + 1, size))
        size //= 2
    yield from combinations(range(length), 1)
    yield from combinations(range(length), 2)
