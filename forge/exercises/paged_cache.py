"""Exercise 5: a paged KV cache with copy-on-write. The conformance operations on it, then four forks of a story."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from forge.cache.block_table import BlockTable, blocks_for
from forge.cache.factory import CacheSize
from forge.cache.kv_cache import CacheStats
from forge.cache.paged import PagedKvCache
from forge.exercises.cache_trial import CacheTrial
from forge.exercises.exercise import Exercise, Rule, search
from forge.testing import check_cache
from forge.trace.records import BlockSplit

_BLOCKS, _BLOCK = 6, 4
_KINDS = {"add": 3, "fill": 6, "reserve": 3, "commit": 3, "truncate": 2, "fork": 4, "remove": 3}


class PagedBase(PagedKvCache):
    """What exercise 5 gives: everything of a paged cache that follows from the tables."""

    @property
    def tables(self) -> dict[int, BlockTable]:
        """The block table of each sequence, by its id."""
        return self._tables

    def note_split(self, seq_id: int, old: int, new: int) -> None:
        """Tell the views of a copy-on-write."""
        self._counts["splits"] += 1
        self._events.append(BlockSplit(seq_id, old, new, self.pool.reference_counts[old] + 1))

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
    "conforms": Rule("It keeps every promise of a cache.", "Which of its functions is it?"),
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

    def record(self, name: str, function: Any, *arguments: Any) -> Any:
        if name != "reserve":
            return super().record(name, function, *arguments)
        seq_id, num_tokens = arguments
        pool, before = self.cache.pool, self.cache.block_table(seq_id)  # type: ignore[attr-defined]
        reserved = self.cache.reserved_length(seq_id)
        is_shared = reserved % _BLOCK and num_tokens and pool.reference_counts[before[-1]] > 1
        copies = super().record(name, function, *arguments)
        self.require(isinstance(copies, tuple), "copied", f"reserve returned {copies!r}, and not a tuple of copies")
        after, wanted = self.cache.block_table(seq_id), reserved + num_tokens
        said = f"for {wanted} slots it has {len(after)} blocks of {_BLOCK}"
        self.require(len(after) == blocks_for(wanted, _BLOCK), "table", said)
        if is_shared:
            self.require(copies, "copy-on-write", f"block {before[-1]} is shared and is written: no copy was returned")
        for copy in copies:
            expected = before[-1], after[len(before) - 1]
            found = copy.source, copy.destination
            said = f"the copy is {found}; the table had {before} and has {after}"
            self.require(is_shared and found == expected and expected[0] != expected[1], "copied", said)
        return copies


def check(piece: ModuleType) -> None:
    search(lambda: PagedTrial(piece), _KINDS, lists=40)
    check_cache(lambda: piece.MyPagedCache(12, 4), lists=4)


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    def new_cache(size: CacheSize) -> PagedKvCache:
        return piece.MyPagedCache(size.num_blocks or 64, size.block_size)

    yield {"kv": new_cache, "num_blocks": 64}


EXERCISE = Exercise(
    names=("MyPagedCache",),
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
    solution=("forge.cache.paged.PagedKvCache",),
    check=check,
    engine=engine,
    own={"kv": "paged", "num_blocks": 64},
    prompts=("Once upon a time there was a small fox who lived by the old mill. Every evening she lit her lantern",),
    params={"max_tokens": 40, "ignore_eos": True, "n": 4, "temperature": 0.8, "seed": 1},
    view="blocks",
)
