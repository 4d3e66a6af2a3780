"""Exercise 4: a block pool. The check runs random operations on it beside block tables, then a paged cache on it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import ModuleType
from unittest.mock import patch

from forge.cache.block_pool import BlockError, BlockPool
from forge.cache.kv_cache import OutOfBlocks
from forge.cache.paged import PagedKvCache
from forge.engine.sampling_params import SamplingParams
from forge.exercises.exercise import Costs, Driven, Exercise, Part, Trial, cache_of_kind, to_write, words_of
from forge.exercises.trials import drawing, search
from forge.llm import LLM
from forge.testing import check_cache
from forge.testing.caches import Operation
from forge.trace.records import BlockMap, TableRecord

_BLOCKS = 6
_KINDS = {"allocate": 6, "share": 3, "release": 5, "misuse": 1, "recount": 1}


@to_write("allocate", "incref", "decref", "recount")
class PoolBase(BlockPool):
    """Given with exercise 4: the pool's invariant check, and what exercise 6 calls on a pool."""


class PoolTrial(Trial):
    """A pool and the tables that it serves."""

    def __init__(self, piece: ModuleType):
        super().__init__(piece, f"pool = piece.MyBlockPool({_BLOCKS})")
        self.tables: list[tuple[int, ...]] = []
        self.pool: BlockPool = piece.MyBlockPool(_BLOCKS)
        self.counts = self.pool.reference_counts

    def draw(self) -> str:
        return self.capture()()

    def capture(self) -> Callable[[], str]:
        state = list(self.pool.reference_counts), list(self.pool.free), list(self.tables)
        return lambda: _drawing(*state)

    def perform(self, operation: Operation) -> None:
        kind, which, count, word = operation
        if kind in ("share", "release") and not self.tables:
            return
        getattr(self, f"_{kind}")(which, count, word)
        self._check_state("recount" if kind == "recount" else None)

    def _allocate(self, which: int, count: int, word: int) -> None:
        number, free = count % 5, list(self.pool.free)
        try:
            blocks = self.call(f"pool.allocate({number})", self.pool.allocate, number, expect=(OutOfBlocks,))
        except OutOfBlocks as error:
            self.require(number > len(free), "enough", f"{len(free)} blocks were free, and {number} were asked for")
            self.require(self.pool.free == free, "all-or-nothing", f"it raised, and {self._difference(free)}")
            shortage, expected = (error.needed, error.free), (number, len(free))
            finding = f"it raised OutOfBlocks{shortage}, not OutOfBlocks{expected}"
            self.require(shortage == expected, "all-or-nothing", finding)
            return
        self.require(number <= len(free), "all-or-nothing", f"{len(free)} blocks were free, and it returned {blocks!r}")
        is_sound = isinstance(blocks, tuple) and len(blocks) == number == len(set(blocks)) and set(blocks) <= set(free)
        self.require(is_sound, "allocated", f"it returned {blocks!r}; free were {free}")
        finding = f"it returned {blocks!r}; free were {free}, and are {self.pool.free}"
        for block in blocks:
            self.require(block not in self.pool.free, "allocated", f"block {block} is still on the free list")
        self.require(self.pool.free == free[: len(free) - number], "stack", finding)
        for block in blocks:
            count = self.pool.reference_counts[block]
            self.require(count == 1, "first-reference", f"block {block} has {count}")
        if blocks:
            self.tables.append(blocks)

    def _difference(self, free: list[int]) -> str:
        gone = len(free) - len(self.pool.free)
        return f"{gone} of {len(free)} free blocks are gone" if gone > 0 else f"the free list is {self.pool.free}"

    def _share(self, which: int, count: int, word: int) -> None:
        """Fork a table: a second table holds the same blocks."""
        if len(self.tables) < 4:
            table = self.tables[which % len(self.tables)]
            for block in table:
                returned = self.call(f"pool.incref({block})", self.pool.incref, block)
                self.require(returned is None, "result", f"it returned {returned!r}")
            self.tables.append(table)

    def _release(self, which: int, count: int, word: int) -> None:
        """End a sequence: its blocks return to the pool, the last one first."""
        place = which % len(self.tables)
        while table := self.tables[place]:
            *rest, block = table
            free = list(self.pool.free)
            is_last = sum(block in table for table in self.tables) == 1
            returned = self.call(f"pool.decref({block})", self.pool.decref, block)
            self.tables[place] = tuple(rest)
            self.require(returned is None, "result", f"it returned {returned!r}")
            if is_last and self.pool.free.count(block) == 1:
                finding = f"block {block} became free; the free list was {free}, and is {self.pool.free}"
                self.require(self.pool.free == [*free, block], "stack", finding)
            if rest:
                self._check_state()
        del self.tables[place]

    def _misuse(self, which: int, count: int, word: int) -> None:
        free = [block for block in range(_BLOCKS) if all(block not in table for table in self.tables)]
        block = free[which % len(free)] if free and word % 3 else (_BLOCKS, -1, _BLOCKS + 2, -_BLOCKS)[word >> 4 & 3]
        name = "decref" if word & 8 else "incref"
        before = self.pool.reference_counts[:], self.pool.free[:], self.pool.num_references
        problem = "is free" if 0 <= block < _BLOCKS else "does not exist"
        try:
            self.call(f"pool.{name}({block})", getattr(self.pool, name), block, expect=(BlockError, IndexError))
        except BlockError as error:
            self.require(error.block == block, "misuse", f"block {block} {problem}; the error names {error.block!r}")
            unchanged = before == (self.pool.reference_counts, self.pool.free, self.pool.num_references)
            self.require(unchanged, "misuse", f"block {block} {problem}; it raised, and changed something")
        except IndexError:
            self.require(False, "misuse", f"block {block} {problem}, and it raised IndexError")
        else:
            self.require(False, "misuse", f"block {block} {problem}, and nothing was raised")

    def _recount(self, which: int, count: int, word: int) -> None:
        if word % 2 and self.tables:  # an exception lost a table
            self.tables.pop(which % len(self.tables))
        returned = self.call(f"pool.recount(iter({self.tables}))", self.pool.recount, iter(list(self.tables)))
        self.require(returned is None, "result", f"it returned {returned!r}")

    def _check_state(self, rule: str | None = None) -> None:
        pool = self.pool
        for block in range(_BLOCKS):
            expected = sum(block in table for table in self.tables)
            times, counted = pool.free.count(block), pool.reference_counts[block]
            if expected:
                self.require(not times, rule or "free-at-zero", f"block {block} is free, and {_tables(expected)} it")
            finding = f"{_tables(expected)} block {block}, and its count is {counted}"
            self.require(counted == expected, rule or "counts", finding)
            if not expected:
                self.require(times == 1, rule or "returned", f"block {block} is on the free list {times} times")
        is_same = pool.reference_counts is self.counts
        self.require(is_same, "same-list", "reference_counts is another list than in the beginning")
        total = sum(pool.reference_counts)
        self.require(pool.num_references == total, rule or "sum", f"it is {pool.num_references}, the sum is {total}")


def _drawing(counts: list[int], free: list[int], held: list[tuple[int, ...]]) -> str:
    tables = tuple(TableRecord(index, False, table, 1, 1) for index, table in enumerate(held))
    shown = BlockMap(1, tables, tuple(max(0, count) for count in counts), ())
    facts = f"reference_counts  {list(counts)}", f"free              {list(free)} (the last is next)"
    return "\n".join((drawing(shown), *facts))


def _tables(number: int) -> str:
    return "no table has" if not number else "1 table has" if number == 1 else f"{number} tables have"


def _with_pool(piece: ModuleType, cache: PagedKvCache) -> PagedKvCache:
    cache.pool = piece.MyBlockPool(cache.pool.num_blocks)
    return cache


def _check(piece: ModuleType, *kinds: str) -> None:
    search(lambda: PoolTrial(piece), {kind: _KINDS[kind] for kind in kinds or _KINDS})


def _check_all(piece: ModuleType) -> None:
    _check(piece)
    check_cache(lambda: _with_pool(piece, PagedKvCache(12, 4)), lists=5)

    def work(size: int) -> Callable[[], None]:
        pool = piece.MyBlockPool(size)
        held = list(pool.allocate(size // 2))

        def steps() -> None:
            for _ in range(30):
                pool.incref(held[7])
                pool.decref(held[7])
                pool.decref(held.pop())
                held.extend(pool.allocate(1))

        return steps

    line = "pool.incref(7); pool.decref(7); pool.decref(8); pool.allocate(1)  # in a pool of 400,000 blocks"
    PoolTrial(piece).require_growth(line, work, 400, 400_000, 20)


def engine(piece: ModuleType) -> AbstractContextManager[None]:
    return cache_of_kind("paged", lambda cache, size: _with_pool(piece, cache))


def drive(llm: LLM, prompts: Sequence[str], params: SamplingParams, piece: ModuleType | None) -> Driven:
    """Run requests that an exception interrupts, so that the engine recounts all references from the tables."""
    run, model = llm.start(list(prompts), params), llm.engine.model
    steps = iter(run)
    records = [next(steps) for _ in range(6)]
    with patch.object(type(model), "forward", side_effect=RuntimeError("interrupted")), suppress(RuntimeError):
        llm.engine.step()
    records += steps
    return run.outputs, records


def _cost(piece: ModuleType | None, number: int) -> Callable[[], object]:
    pool = piece.MyBlockPool(1024) if piece else BlockPool(1024)

    def work() -> None:
        for _ in range(50):
            blocks = pool.allocate(number)
            for block in blocks:
                pool.incref(block)
            for block in (*blocks, *blocks):
                pool.decref(block)

    return work


_CLASS = "MyBlockPool"

EXERCISE = Exercise(
    **words_of("block_pool"),
    parts=(
        Part.of(_CLASS, "allocate", lambda piece: _check(piece, "allocate"), True),
        Part.of(_CLASS, "allocate incref", lambda piece: _check(piece, "allocate", "share"), True),
        Part.of(_CLASS, "allocate decref", lambda piece: _check(piece, "allocate", "release"), True),
        Part.of(_CLASS, "allocate recount", lambda piece: _check(piece, "allocate", "recount"), True),
        Part.of(_CLASS, "allocate incref decref recount", _check_all),
    ),
    costs=Costs("{} blocks, taken, shared and given back 50 times", (1, 16, 256), _cost),
    engine=engine,
    options={"kv": "paged", "num_blocks": 64},
    drive=drive,
    prompts=("Once upon a time", "The fox and the lantern", "An owl"),
    params=({"max_tokens": 40, "ignore_eos": True, "n": 2, "temperature": 0.8, "seed": 1},),
    view="blocks",
)
