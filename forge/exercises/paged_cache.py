"""Exercise 5: a paged KV cache with copy-on-write. The check runs the conformance operations, then four forks of a
story."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Integral
from types import ModuleType
from typing import Any

from forge.cache.block_pool import BlockTable, blocks_for
from forge.cache.factory import CacheSize
from forge.cache.kv_cache import CacheStats, Snapshot
from forge.cache.paged import PagedKvCache
from forge.exercises.exercise import Costs, Exercise, Part, cache_of_kind, to_write, words_of
from forge.exercises.trials import CacheTrial, search
from forge.testing import check_cache
from forge.trace.records import BlockSplit

_BLOCKS, _BLOCK = 6, 4
_KINDS = {"add": 3, "fill": 6, "reserve": 3, "commit": 3, "truncate": 2, "fork": 4, "remove": 3}


@to_write("add", "blocks_needed", "reserve", "commit", "truncate", "fork", "remove")
class PagedBase(PagedKvCache):
    """Given with exercise 5: every method of a paged cache that follows from the tables."""

    @property
    def tables(self) -> dict[int | Snapshot, BlockTable]:
        """Each sequence's block table, by sequence id; and that of each snapshot."""
        return self._tables

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.noted: list[tuple[int, int, int]] = []
        """The arguments of each `note_split`."""

    def note_split(self, seq_id: int, old: int, new: int) -> None:
        """Report a copy-on-write to the views."""
        self.noted.append((seq_id, old, new))
        self._counts["splits"] += 1
        self._events.append(BlockSplit(seq_id, old, new, self.pool.reference_counts[old] + 1))

    def stats(self) -> CacheStats:
        self._recounts_filled = True  # from the tables
        return super().stats()

    def check_invariants(self) -> None:
        self._recounts_filled = True
        super().check_invariants()


_WORDS = (
    ("is freed|was freed twice|is free, and", "given-back"),
    ("blocks and slots differ|table of|two places", "table"),
    ("is in . tables and has|references do not add|is lost|free and referenced|used blocks|blocks saved", "references"),
    ("no shortage", "enough"),
    ("refused operation", "all-or-nothing"),
    ("blocks_needed was wrong|said to take", "blocks-needed"),
    ("reserved length", "reserved"),
    ("computed length|lengths out of order|tokens held", "computed"),
    ("what was counted", "copied"),
    ("contents", "copy-on-write"),
)


class PagedTrial(CacheTrial):
    """Runs random operations on the reader's paged cache beside an oracle."""

    def __init__(self, piece: ModuleType):
        line = f"cache = piece.MyPagedCache({_BLOCKS}, {_BLOCK})"
        super().__init__(piece, line, lambda: piece.MyPagedCache(_BLOCKS, _BLOCK), _BLOCKS, _WORDS)

    def record(self, name: str, *arguments: Any) -> Any:
        if name == "reserve":
            return self._reserve(*arguments)
        before = self.cache.block_map() if name == "blocks_needed" else None
        free = list(self.cache.pool.free)  # type: ignore[attr-defined]
        table = self.cache.block_table(arguments[0]) if name in ("truncate", "remove") else ()
        returned = super().record(name, *arguments)
        if before is not None:
            self.require(self.cache.block_map() == before, "asking", f"blocks_needed returned {returned!r}")
            self.require(isinstance(returned, Integral), "result", f"blocks_needed returned {returned!r}")
        expected = {"add": 0, "fork": ()}.get(name)
        if name in ("add", "fork", "commit", "truncate", "remove"):
            self.require(returned == expected, "result", f"{name} returned {returned!r}, and not {expected!r}")
        if name in ("truncate", "remove"):
            freed = self.cache.pool.free[len(free) :]  # type: ignore[attr-defined]
            in_order = [block for block in reversed(table) if block in freed]
            self.require(freed == in_order, "last-first", f"of {table} it gave back {freed}, in this order")
        return returned

    def _reserve(self, seq_id: int, num_tokens: int) -> Any:
        cache: Any = self.cache
        before, reserved, noted = cache.block_table(seq_id), cache.reserved_length(seq_id), len(cache.noted)
        is_shared = reserved % _BLOCK and num_tokens and cache.pool.reference_counts[before[-1]] > 1
        copies = super().record("reserve", seq_id, num_tokens)
        self.require(isinstance(copies, tuple), "copied", f"reserve returned {copies!r}, and not a tuple of copies")
        after, length = cache.block_table(seq_id), reserved + num_tokens
        finding = f"for {length} slots it has {len(after)} blocks of {_BLOCK}"
        self.require(len(after) == blocks_for(length, _BLOCK), "table", finding)
        if is_shared:
            self.require(copies, "copy-on-write", f"block {before[-1]} is shared and is written: no copy was returned")
        self.require(len(copies) <= 1, "copied", f"one block is copied at most, and reserve returned {copies}")
        for copy in copies:
            expected = before[-1], after[len(before) - 1]
            copied = copy.source, copy.destination
            finding = f"the copy is {copied}; the table had {before} and has {after}"
            self.require(is_shared and copied == expected and expected[0] != expected[1], "copied", finding)
        expected_notes = [(seq_id, copy.source, copy.destination) for copy in copies]
        finding = f"the notes are {cache.noted[noted:]}, and should be {expected_notes}"
        self.require(cache.noted[noted:] == expected_notes, "noted", finding)
        return copies


def _check(piece: ModuleType, *kinds: str) -> None:
    search(lambda: PagedTrial(piece), {kind: _KINDS[kind] for kind in kinds or _KINDS}, lists=40)


def _check_all(piece: ModuleType) -> None:
    _check(piece)
    check_cache(lambda: piece.MyPagedCache(12, 4), lists=4)

    def among(number: int) -> Callable[[], None]:
        cache = piece.MyPagedCache(2 * number + 40, 4)
        for seq_id in range(number):
            cache.add(seq_id, [])
            cache.reserve(seq_id, 5)

        def steps() -> None:
            for _ in range(5):
                cache.add(-1, [])
                cache.reserve(-1, 10)
                cache.commit(-1, [1] * 10)
                cache.fork(-1, -2)
                cache.reserve(-2, 3)
                cache.truncate(-1, 4)
                cache.remove(-1)
                cache.remove(-2)

        return steps

    def long(number: int) -> Callable[[], None]:
        def steps() -> None:
            cache = piece.MyPagedCache(number, 4)
            cache.add(1, [])
            cache.reserve(1, 4 * number)
            cache.commit(1, [1] * (4 * number))
            cache.fork(1, 2)
            cache.remove(1)
            cache.remove(2)

        return steps

    trial = PagedTrial(piece)
    trial.require_growth("cache.add(-1, []); …; cache.remove(-1)  # beside 4,000 sequences", among, 20, 4000, 8)
    trial.require_growth("cache.fork(1, 2); cache.remove(1)  # a table of 8,000 blocks", long, 250, 8000, 150)


def engine(piece: ModuleType) -> AbstractContextManager[None]:
    def new_cache(cache: PagedKvCache, size: CacheSize) -> PagedKvCache:
        readers = piece.MyPagedCache(cache.pool.num_blocks, size.block_size)
        readers.pool = cache.pool  # the reader's own, if exercise 4 has passed
        return readers

    return cache_of_kind("paged", new_cache)


def _cost(piece: ModuleType | None, number: int) -> Callable[[], object]:
    kind = piece.MyPagedCache if piece else PagedKvCache

    def work() -> None:
        cache = kind(4 * number, 16)
        for seq_id in range(number):
            cache.add(seq_id, [])
            cache.reserve(seq_id, 24)
            cache.commit(seq_id, [1] * 24)
        for _ in range(8):
            for seq_id in range(number):
                cache.reserve(seq_id, 1)
                cache.commit(seq_id, [1])
        for seq_id in range(number):
            cache.remove(seq_id)

    return work


_CLASS = "MyPagedCache"


EXERCISE = Exercise(
    **words_of("paged_cache"),
    parts=(
        Part.of(_CLASS, "add", lambda piece: _check(piece, "add"), True),
        Part.of(_CLASS, "add remove", lambda piece: _check(piece, "add", "remove"), True),
        Part.of(_CLASS, "add blocks_needed reserve", lambda piece: _check(piece, "add", "reserve"), True),
        Part.of(
            _CLASS,
            "add blocks_needed reserve commit",
            lambda piece: _check(piece, "add", "reserve", "commit", "fill"),
            True,
        ),
        Part.of(_CLASS, "add blocks_needed reserve commit truncate fork remove", _check_all),
    ),
    costs=Costs("{} sequences", (1, 16, 256), _cost),
    engine=engine,
    options={"kv": "paged", "num_blocks": 64, "speculate": "ngram", "speculate_fixed": True},
    beside=("block_pool",),
    prompts=(
        "Once upon a time there was a small fox who lived by the old mill. Every evening she lit her lantern. Once "
        "upon a time there was a small fox who lived by the old mill. Every evening she lit",
    ),
    params=({"max_tokens": 40, "ignore_eos": True, "n": 4, "temperature": 0.8, "seed": 1},),
    view="blocks",
)
