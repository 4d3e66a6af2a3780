"""Exercise 5: a paged KV cache with copy-on-write. The check runs the conformance operations, then four forks of a
story."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from types import ModuleType
from typing import Any

from forge.cache.block_table import BlockTable, blocks_for
from forge.cache.factory import DEFAULT_NUM_BLOCKS, CacheSize
from forge.cache.kv_cache import CacheStats
from forge.cache.kv_storage import BlockCopy
from forge.cache.paged import PagedKvCache
from forge.exercises.exercise import Cost, Exercise, Part, Rule, search
from forge.exercises.session import passed_part
from forge.exercises.trials import CacheTrial
from forge.testing import check_cache
from forge.trace.records import BlockSplit

_BLOCKS, _BLOCK = 6, 4
_KINDS = {"add": 3, "fill": 6, "reserve": 3, "commit": 3, "truncate": 2, "fork": 4, "remove": 3}


class PagedBase(PagedKvCache):
    """Given with exercise 5: every method of a paged cache that follows from the tables."""

    @property
    def tables(self) -> dict[int, BlockTable]:
        """Each sequence's block table, by sequence id."""
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

    def add(self, seq_id: int, token_ids: Sequence[int], salt: str = "", max_cached: int | None = None) -> int:
        raise NotImplementedError("add")

    def blocks_needed(self, seq_id: int, num_tokens: int) -> int:
        raise NotImplementedError("blocks_needed")

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        raise NotImplementedError("reserve")

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        raise NotImplementedError("commit")

    def truncate(self, seq_id: int, length: int) -> None:
        raise NotImplementedError("truncate")

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        raise NotImplementedError("fork")

    def remove(self, seq_id: int) -> None:
        raise NotImplementedError("remove")

    def stats(self) -> CacheStats:
        self._filled = None  # counted from the tables
        return super().stats()

    def check_invariants(self) -> None:
        self._filled = None
        super().check_invariants()


RULES = {
    "table": Rule(
        "A table has as many blocks as its reserved slots take, the last one filled in part.",
        "How many blocks take 4 slots, and how many 5, if a block has 4?",
    ),
    "reserved": Rule("reserve(n) moves the reserved length n slots ahead.", "Which of the two lengths moves?"),
    "computed": Rule(
        "commit moves the computed length; a fork begins with its parent's computed tokens.",
        "Which of the two lengths says what has been computed?",
    ),
    "all-or-nothing": Rule(
        "If reserve finds too few blocks it raises OutOfBlocks with everything as it was.",
        "What was changed before it was known that blocks are missing?",
    ),
    "enough": Rule(
        "reserve succeeds whenever as many blocks are available as it takes.",
        "How many are available when exactly as many are needed?",
    ),
    "blocks-needed": Rule(
        "blocks_needed(seq_id, n) is how many blocks reserve(seq_id, n) takes, the copy of a shared block included.",
        "Which blocks does this reserve take, and why?",
    ),
    "references": Rule(
        "A block has as many references as tables have it.",
        "Which calls add a block to a table, and which take one out? Is the reference counted in each?",
    ),
    "given-back": Rule("A block goes back once for each table that had it.", "Who gave this reference back before?"),
    "copy-on-write": Rule(
        "A block with more than one reference is never written: the writer gets a copy first.",
        "Who else reads the block that the new slots lie in?",
    ),
    "copied": Rule(
        "reserve returns BlockCopy(old, new) for a copy, and gives the old block's reference back.",
        "From which block to which is copied, and whose table has the new one?",
    ),
    "removed": Rule("remove drops the sequence.", "Which dictionary still has it?"),
    "noted": Rule(
        "note_split is called once for each copy, with the sequence, the old block and the new one.",
        "How often is it called here, and with which blocks?",
    ),
    "asking": Rule("blocks_needed changes nothing.", "Which line of it changes a table or the pool?"),
    "last-first": Rule(
        "A sequence gives its blocks back the last one first: the first is then the next to be taken.",
        "In which order does the loop go over the blocks?",
    ),
    "result": Rule("Each function returns what its docstring says.", "What is returned, and of what type?"),
    "conforms": Rule("A sequence has its own slots and tokens, whatever the others do.", "Which call came before?"),
}

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
    trial.require_growth("cache.add(-1, []); …; cache.remove(-1)  # beside 4,000 sequences", among, 20, 4000, 20)
    trial.require_growth("cache.fork(1, 2); cache.remove(1)  # a table of 8,000 blocks", long, 250, 8000, 150)


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    def new_cache(size: CacheSize) -> PagedKvCache:
        cache = piece.MyPagedCache(size.num_blocks or DEFAULT_NUM_BLOCKS, size.block_size)
        if pool is not None:
            cache.pool = pool.MyBlockPool(cache.pool.num_blocks)
        return cache

    pool = passed_part(piece, "block_pool")
    yield _OPTIONS | {"kv": new_cache}


def _costs(piece: ModuleType) -> list[Cost]:
    def work(kind: Any, number: int) -> None:
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

    return [
        Cost(f"{number} sequences", partial(work, piece.MyPagedCache, number), partial(work, PagedKvCache, number))
        for number in (1, 16, 256)
    ]


_OPTIONS = {"kv": "paged", "num_blocks": 64, "speculate": "ngram", "speculate_fixed": True}
_NAMES = {
    name: f"MyPagedCache.{name}" for name in ("add", "blocks_needed", "reserve", "commit", "truncate", "fork", "remove")
}


def _part(*kinds: str) -> Part:
    """Check only these functions while others are unwritten; `reserve` needs `blocks_needed`."""
    return Part(tuple(_NAMES[kind] for kind in kinds), lambda piece: _check(piece, *kinds), True)


EXERCISE = Exercise(
    parts=(
        _part("add"),
        _part("add", "remove"),
        Part(
            tuple(_NAMES[name] for name in ("add", "blocks_needed", "reserve")),
            lambda piece: _check(piece, "add", "reserve"),
            True,
        ),
        Part(
            tuple(_NAMES[name] for name in ("add", "blocks_needed", "reserve", "commit")),
            lambda piece: _check(piece, "add", "reserve", "commit", "fill"),
            True,
        ),
        Part(tuple(_NAMES.values()), _check_all),
    ),
    rules=RULES,
    hints=(
        "Begin without sharing: add, blocks_needed, reserve, commit, remove. blocks_for(length, block_size) counts "
        "blocks. The copy comes later.",
        "fork takes no block: the child's table has the same ones, and each of them one reference more. Only the "
        "blocks of computed tokens: the others are the parent's alone.",
        "Only the last block can be both shared and written, and only if it is partly filled: reserved % block_size.",
        "reserve in this order: compare blocks_needed with num_available; then, if the last block is shared, allocate "
        "a copy, give the old one back, put the new one into the table; then allocate what is missing.",
        "A table's tuple of blocks is replaced and never changed in place: others may hold it.",
    ),
    solution=(
        "forge.cache.paged.PagedKvCache.blocks_needed",
        "forge.cache.paged.PagedKvCache.grow",
        "forge.cache.paged.PagedKvCache.fork",
    ),
    differs="The engine's `reserve` asks for the most frequent case first, a slot in a block that is the sequence's "
    "own, and is done with it in four lines. It also knows blocks that are in a prefix index: they are copied before "
    "they are written, even with one reference.",
    next_question="A block has 16 slots. How many are reserved and empty for a sequence, on average? What is gained "
    "and lost with blocks of 1?",
    costs=_costs,
    engine=engine,
    reference=_OPTIONS,
    prompts=(
        "Once upon a time there was a small fox who lived by the old mill. Every evening she lit her lantern. Once "
        "upon a time there was a small fox who lived by the old mill. Every evening she lit",
    ),
    params=({"max_tokens": 40, "ignore_eos": True, "n": 4, "temperature": 0.8, "seed": 1},),
    view="blocks",
)
