"""Random operations on a `KvCache`, held against an oracle that knows only what the seam promises.

`run` performs a list of operations, with `check_invariants()` and every observable fact after each. `shortest_failure`
cuts a failing list down: it drops operations for as long as the rest still fails. An operation names a sequence or a
snapshot by its place among those that there are (modulo their number), so nearly every one does something, and any
sublist is a valid list.

Beside the policy runs the storage: each committed token is written into its slot as its own number, and each copy is
performed, so that "the copies really reproduce the contents" is seen by reading a sequence back through its table.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from forge.cache.kv_cache import KvCache, OutOfBlocks, Snapshot
from forge.cache.kv_storage import KvLayout, NumpyKvStorage

KINDS = ("add", "reserve", "commit", "truncate", "fork", "snapshot", "restore", "release", "remove")
Operation = tuple[str, int, int]
"""(kind, which sequence or snapshot, how many tokens)."""

MAX_HELD = 7
"""Sequences, and snapshots, at most: with the cache off nothing else bounds them."""
MAX_TOKENS = 9


def random_operations(seed: int, length: int) -> list[Operation]:
    rng = np.random.default_rng(seed)
    weights = np.array([4, 6, 6, 2, 3, 2, 2, 2, 5], float)
    kinds = rng.choice(KINDS, size=length, p=weights / weights.sum())
    return [(kind, int(rng.integers(100)), int(rng.integers(MAX_TOKENS))) for kind in kinds.tolist()]


@dataclass
class Content:
    """What the oracle believes of one sequence: its computed tokens, and the slots that it owns."""

    tokens: list[int] = field(default_factory=list)
    reserved: int = 0


class Oracle:
    """The seam's promises without any blocks. With the cache off, a sequence's tokens are gone once committed."""

    def __init__(self, cache: KvCache, storage: NumpyKvStorage):
        self.cache, self.storage = cache, storage
        self.remembers = cache.kind != "off"
        self.sequences: dict[int, Content] = {}
        self.snapshots: dict[int, tuple[Snapshot, list[int]]] = {}
        self.next_token = 1
        self.next_id = 0

    def perform(self, operation: Operation) -> None:
        kind, which, count = operation
        held = self.snapshots if kind in ("restore", "release") else self.sequences
        if kind != "add" and not held:
            return
        before = self.observed()
        try:
            name = self.new_id() if kind == "add" else list(held)[which % len(held)]
            getattr(self, f"_{kind}")(name, count)
        except OutOfBlocks as shortage:
            assert shortage.needed > shortage.free >= 0, f"{shortage} is no shortage"
            assert self.observed() == before, "a refused operation changed something"
        self.cache.check_invariants()
        self.check()

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def observed(self) -> tuple:
        """Everything that the seam shows."""
        cache = self.cache
        return cache.stats(), {
            seq_id: (cache.reserved_length(seq_id), cache.computed_length(seq_id), cache.block_table(seq_id))
            for seq_id in self.sequences
        }

    def check(self) -> None:
        owners: dict[int, int] = {}
        for seq_id, content in self.sequences.items():
            table = self.cache.block_table(seq_id)
            assert self.cache.computed_length(seq_id) == len(content.tokens), f"computed length of {seq_id}"
            assert self.cache.reserved_length(seq_id) == content.reserved, f"reserved length of {seq_id}"
            assert len(table) == -(-content.reserved // self.storage.layout.block_size), f"table of {seq_id}"
            for block in table:
                assert 0 <= block < self.storage.layout.num_blocks, f"there is no block {block}"
                assert owners.setdefault(block, seq_id) == seq_id, f"block {block} belongs to two sequences"
            assert self.read(seq_id) == content.tokens, f"contents of {seq_id}"
        held = [*(len(content.tokens) for content in self.sequences.values())]
        held += [len(tokens) for _, tokens in self.snapshots.values()]
        assert self.cache.stats().tokens_held == sum(held), "tokens held"
        if not self.sequences and not self.snapshots:
            assert self.cache.stats().used_blocks == 0, "blocks are held for nobody"

    def read(self, seq_id: int) -> list[int]:
        """The computed tokens as they lie in storage."""
        length = self.cache.computed_length(seq_id)
        keys, values = self.storage.gather(0, self.cache.block_table(seq_id), length)
        assert np.array_equal(keys, -values)
        return keys[:, 0, 0].astype(int).tolist()

    def write(self, seq_id: int, position: int, token: int) -> None:
        size = self.storage.layout.block_size
        block = self.cache.block_table(seq_id)[position // size]
        self.storage.keys[:, block, position % size] = token
        self.storage.values[:, block, position % size] = -token

    def _add(self, seq_id: int, _: int) -> None:
        if len(self.sequences) < MAX_HELD:
            assert self.cache.add(seq_id, ()) == 0
            self.sequences[seq_id] = Content()

    def _reserve(self, seq_id: int, count: int) -> None:
        needed = self.cache.blocks_needed(seq_id, count)
        owned = len(self.cache.block_table(seq_id))
        self.storage.copy_blocks(self.cache.reserve(seq_id, count))
        self.sequences[seq_id].reserved += count
        if self.cache.kind == "off":
            assert len(self.cache.block_table(seq_id)) == owned + needed, "blocks_needed was wrong"
        else:
            assert needed == 0, "the basic cache takes its blocks when a sequence begins"

    def _commit(self, seq_id: int, count: int) -> None:
        content = self.sequences[seq_id]
        count = min(count, content.reserved - len(content.tokens))
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        for offset, token in enumerate(tokens):
            self.write(seq_id, len(content.tokens) + offset, token)
        self.cache.commit(seq_id, tokens)
        content.tokens += tokens
        if not self.remembers:
            self.sequences[seq_id] = Content()

    def _truncate(self, seq_id: int, length: int) -> None:
        self.cache.truncate(seq_id, length)
        content = self.sequences[seq_id]
        kept = min(content.reserved, length) if self.remembers else 0
        self.sequences[seq_id] = Content(content.tokens[:length], kept)

    def _fork(self, parent: int, _: int) -> None:
        if len(self.sequences) < MAX_HELD:
            child = self.new_id()
            self.storage.copy_blocks(self.cache.fork(parent, child))
            self._begun(child, self.sequences[parent].tokens)

    def _snapshot(self, seq_id: int, _: int) -> None:
        if len(self.snapshots) < MAX_HELD:
            snapshot, copies = self.cache.snapshot(seq_id)
            self.storage.copy_blocks(copies)
            assert snapshot.length == len(self.sequences[seq_id].tokens)
            self.snapshots[self.new_id()] = snapshot, list(self.sequences[seq_id].tokens)

    def _restore(self, name: int, _: int) -> None:
        if len(self.sequences) < MAX_HELD:
            snapshot, tokens = self.snapshots[name]
            seq_id = self.new_id()
            self.storage.copy_blocks(self.cache.restore(snapshot, seq_id))
            self._begun(seq_id, tokens)

    def _release(self, name: int, _: int) -> None:
        self.cache.release(self.snapshots[name][0])
        del self.snapshots[name]

    def _remove(self, seq_id: int, _: int) -> None:
        self.cache.remove(seq_id)
        del self.sequences[seq_id]

    def _begun(self, seq_id: int, tokens: list[int]) -> None:
        self.sequences[seq_id] = Content(list(tokens), len(tokens))


def new_oracle(make_cache: Callable[[], KvCache], num_blocks: int, block_size: int) -> Oracle:
    return Oracle(make_cache(), NumpyKvStorage(KvLayout(2, num_blocks, block_size, 1, 1)))


def failure(new: Callable[[], Oracle], operations: list[Operation]) -> tuple[int, Exception] | None:
    """(how many operations were performed, what went wrong), or None."""
    oracle = new()
    for index, operation in enumerate(operations):
        try:
            oracle.perform(operation)
        except Exception as error:
            return index + 1, error
    return None


def shortest_failure(new: Callable[[], Oracle], operations: list[Operation]) -> str | None:
    """None if all goes well; otherwise a failing list from which no one or two can be left out, and its error."""
    found = failure(new, operations)
    if found is None:
        return None
    while found is not None:
        (length, error), operations = found, operations[: found[0]]
        for dropped in [*combinations(range(length), 1), *combinations(range(length), 2)]:
            shorter = [operation for index, operation in enumerate(operations) if index not in dropped]
            found = failure(new, shorter)
            if found is not None:
                operations = shorter
                break
    return "\n".join([f"{type(error).__name__}: {error}", *map(str, operations)])
