"""Exercise 3: a contiguous KV cache. The check runs the conformance operations on it, then the engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from forge.cache.basic import BasicKvCache, _Run
from forge.cache.factory import CacheSize
from forge.cache.kv_cache import OutOfBlocks, Snapshot
from forge.exercises.exercise import Costs, Exercise, Part, cache_of_kind, to_write, words_of
from forge.exercises.trials import CacheTrial, search
from forge.testing import check_cache

_RUNS, _LENGTH, _BLOCK = 3, 10, 4
_KINDS = {"add": 3, "fill": 5, "reserve": 4, "commit": 4, "truncate": 3, "remove": 3}

Run = _Run


@to_write("add", "reserve", "commit", "truncate", "remove")
class ContiguousBase(BasicKvCache):
    """Given with exercise 3: every method of a `KvCache` that follows from the runs."""

    @property
    def runs(self) -> dict[int | Snapshot, _Run]:
        """Each sequence's run, by sequence id; and that of each snapshot."""
        return self._tables

    def all_runs(self) -> list[_Run]:
        """Return the runs that belong to a sequence or a snapshot."""
        return list(self._tables.values())

    def free_run(self) -> range:
        raise NotImplementedError("free_run")

    def _free_run(self, length: int = 0) -> _Run:
        return Run(self.free_run(), length, length)


_WORDS = (
    ("two owners|used blocks|blocks saved", "one-owner"),
    ("no run", "run"),
    ("lengths out of order", "computed"),
    ("refused operation|no shortage", "all-or-nothing"),
    ("reserved length|a new sequence has", "reserved"),
    ("computed length|tokens held", "computed"),
    ("contents", "contents"),
    ("table of", "reserved"),
)


class ContiguousTrial(CacheTrial):
    """Runs random operations on the reader's contiguous cache beside an oracle."""

    def __init__(self, piece: ModuleType):
        line = f"cache = piece.MyContiguousCache({_RUNS}, {_LENGTH}, {_BLOCK})"
        num_blocks = _RUNS * -(-_LENGTH // _BLOCK)
        super().__init__(piece, line, lambda: _small(piece), num_blocks, _WORDS)

    def record(self, name: str, *arguments: Any) -> Any:
        runs = len(self.cache.runs) if isinstance(self.cache, ContiguousBase) else 0
        seq_id, *more = arguments
        reserved = self.cache.reserved_length(seq_id) if name != "add" else 0
        taken = {run.blocks.start for run in self.cache.all_runs()}  # type: ignore[attr-defined]
        per_run = self.cache.blocks_per_run  # type: ignore[attr-defined]
        try:
            returned = super().record(name, *arguments)
        except OutOfBlocks as error:
            shortage = error.needed, error.free
            if name == "add":
                self.require(runs == _RUNS, "full", f"{runs} of {_RUNS} runs were taken; it raised")
                self.require(shortage == (per_run, 0), "shortage", f"needed and free are {shortage}")
            elif name == "reserve":
                length = reserved + more[0]
                self.require(length > _LENGTH, "limit", f"{length} of {_LENGTH} slots were wanted, and it raised")
                self.require(shortage == (1, 0), "shortage", f"needed and free are {shortage}")
            raise
        if name == "add":
            self.require(runs < _RUNS, "full", f"all {_RUNS} runs were taken; nothing was raised")
            self.require(returned == 0, "result", f"nothing is cached, and add returned {returned!r}")
            run = self.cache.runs[seq_id].blocks  # type: ignore[attr-defined]
            finding = f"the run of sequence {seq_id} is {run}, and a run has {per_run} blocks"
            fits = len(run) == per_run and run[0] % per_run == 0 and 0 <= run[0] <= run[-1] < _RUNS * per_run
            self.require(fits and isinstance(run, range), "run", finding)
            lowest = next(start for start in range(0, _RUNS * per_run, per_run) if start not in taken)
            self.require(run[0] == lowest or run[0] in taken, "lowest", f"{finding}; block {lowest} begins a free one")
        elif name == "reserve":
            length = reserved + more[0]
            finding = f"{length} slots were reserved of {_LENGTH}, and nothing was raised"
            self.require(length <= _LENGTH, "all-or-nothing", finding)
            self.require(returned == (), "result", f"there is nothing to copy, and reserve returned {returned!r}")
        elif name == "truncate":
            left, expected = self.cache.reserved_length(seq_id), min(reserved, more[0])
            self.require(left == expected, "truncate", f"of {reserved} slots {left} are left, and not {expected}")
        if name in ("commit", "truncate", "remove"):
            self.require(returned is None, "result", f"{name} returned {returned!r}")
        return returned


def _small(piece: ModuleType) -> BasicKvCache:
    return piece.MyContiguousCache(_RUNS, _LENGTH, _BLOCK)


def _check(piece: ModuleType, *kinds: str) -> None:
    search(lambda: ContiguousTrial(piece), {kind: _KINDS[kind] for kind in kinds or _KINDS}, lists=30)


def _check_all(piece: ModuleType) -> None:
    _check(piece)
    check_cache(lambda: _small(piece), lists=3)
    trial = ContiguousTrial(piece)

    def work(size: int) -> Callable[[], None]:
        cache = piece.MyContiguousCache(4, 8 * size, 1)
        cache.add(1, [])

        def steps() -> None:
            for _ in range(20):
                cache.reserve(1, 1)
                cache.commit(1, [5])
            cache.truncate(1, 3)

        return steps

    trial.require_growth("cache.reserve(1, 1); cache.commit(1, [5])  # in runs of 400,000 blocks", work, 50, 50_000, 20)


def engine(piece: ModuleType) -> AbstractContextManager[None]:
    def new_cache(cache: BasicKvCache, size: CacheSize) -> BasicKvCache:
        num_runs = cache.num_blocks // size.blocks_per_sequence
        return piece.MyContiguousCache(num_runs, size.max_model_len, size.block_size)

    return cache_of_kind("basic", new_cache)


def _cost(piece: ModuleType | None, number: int) -> Callable[[], object]:
    kind = piece.MyContiguousCache if piece else BasicKvCache

    def work() -> None:
        cache = kind(number, 64, 16)
        for seq_id in range(number):
            cache.add(seq_id, [])
            cache.reserve(seq_id, 40)
            cache.commit(seq_id, [1] * 40)
            cache.truncate(seq_id, 30)
        for seq_id in range(number):
            cache.remove(seq_id)

    return work


_CLASS = "MyContiguousCache"
_STORY = "The fox lit the lantern and went home. The owl lit the lantern and went home. "

EXERCISE = Exercise(
    **words_of("contiguous_cache"),
    parts=(
        Part.of(_CLASS, "free_run add", lambda piece: _check(piece, "add"), True),
        Part.of(_CLASS, "free_run add remove", lambda piece: _check(piece, "add", "remove"), True),
        Part.of(_CLASS, "free_run add reserve", lambda piece: _check(piece, "add", "reserve"), True),
        Part.of(_CLASS, "free_run add reserve commit truncate remove", _check_all),
    ),
    costs=Costs("{} sequences", (4, 32, 256), _cost),
    engine=engine,
    options={"kv": "basic", "max_model_len": 256, "max_num_seqs": 4, "speculate": "ngram", "speculate_fixed": True},
    prompts=(3 * _STORY + "The hen",),
    params=({"max_tokens": 64, "ignore_eos": True},),
    view="blocks",
)
