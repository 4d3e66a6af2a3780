"""Exercise 3: a contiguous KV cache. The conformance operations on it, then the engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from forge.cache.basic import BasicKvCache, _Run
from forge.cache.factory import CacheSize
from forge.exercises.cache_trial import CacheTrial
from forge.exercises.exercise import Exercise, Rule, search
from forge.testing import check_cache

_RUNS, _LENGTH, _BLOCK = 3, 10, 4
_KINDS = {"add": 3, "fill": 5, "reserve": 4, "commit": 4, "truncate": 3, "remove": 3}

Run = _Run


class ContiguousBase(BasicKvCache):
    """What exercise 3 gives: everything of a `KvCache` that follows from the runs."""

    @property
    def runs(self) -> dict[int, _Run]:
        """The run of each sequence, by its id."""
        return self._sequences

    def free_run(self) -> range:
        raise NotImplementedError("free_run")

    def _free_run(self, length: int = 0) -> _Run:
        return Run(self.free_run(), length, length)


RULES = {
    "one-owner": Rule("A run of blocks has one owner.", "Which runs are taken already, and which blocks has a run?"),
    "run": Rule(
        "A run begins at a multiple of blocks_per_run and lies inside the pool.",
        "How many blocks has a run, and at which block does the second one begin?",
    ),
    "full": Rule(
        "add raises OutOfBlocks if no run is free, with nothing changed, and only then.",
        "How many runs are there, and when is the last of them free?",
    ),
    "reserved": Rule(
        "reserve(n) moves the reserved length n slots ahead, and computes nothing.", "Which of the two lengths moves?"
    ),
    "computed": Rule(
        "commit moves the computed length by the tokens that it is given; truncate cuts it.",
        "Which of the two lengths says what has been computed?",
    ),
    "truncate": Rule(
        "truncate(length) leaves at most so many slots, computed or reserved, and never adds any.",
        "What if the sequence is shorter than length already?",
    ),
    "all-or-nothing": Rule(
        "A reservation past max_model_len raises OutOfBlocks with everything as it was.",
        "Is the length compared before it is changed, or after?",
    ),
    "limit": Rule("A run holds max_model_len tokens, all of them.", "How long may a sequence be, at most?"),
    "contents": Rule(
        "What was committed is still there: at position p of the run of its own sequence.",
        "Which other sequence wrote there?",
    ),
    "removed": Rule("remove drops the sequence, and its run is free.", "Which runs does free_run take for taken?"),
    "conforms": Rule("It keeps every promise of a cache.", "Which of its functions is it?"),
}

_WORDS = (
    ("two owners|used blocks|blocks saved", "one-owner"),
    ("no run", "run"),
    ("lengths out of order", "computed"),
    ("refused operation|no shortage", "all-or-nothing"),
    ("reserved length", "reserved"),
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

    def record(self, name: str, function: Any, *arguments: Any) -> Any:
        runs = len(self.cache.runs) if isinstance(self.cache, ContiguousBase) else 0
        seq_id, *more = arguments
        reserved = self.cache.reserved_length(seq_id) if name != "add" else 0
        try:
            found = super().record(name, function, *arguments)
        except Exception as error:
            is_full = type(error).__name__ == "OutOfBlocks"
            if name == "add":
                self.require(not is_full or runs == _RUNS, "full", f"{runs} of {_RUNS} runs were taken; it raised")
            elif name == "reserve" and is_full:
                wanted = reserved + more[0]
                self.require(wanted > _LENGTH, "limit", f"{wanted} of {_LENGTH} slots were wanted, and it raised")
            raise
        if name == "add":
            self.require(runs < _RUNS, "full", f"all {_RUNS} runs were taken; nothing was raised")
            self.require(found == 0, "conforms", f"nothing is cached, and add returned {found!r}")
            run = self.cache.runs[seq_id].blocks  # type: ignore[attr-defined]
            per_run = self.cache.blocks_per_run  # type: ignore[attr-defined]
            fits = len(run) == per_run and run[0] % per_run == 0 and run[-1] < _RUNS * per_run
            self.require(fits, "run", f"the run of sequence {seq_id} is {run}, and a run has {per_run} blocks")
        elif name == "reserve":
            wanted = reserved + more[0]
            said = f"{wanted} slots were reserved of {_LENGTH}, and nothing was raised"
            self.require(wanted <= _LENGTH, "all-or-nothing", said)
        elif name == "truncate":
            left, expected = self.cache.reserved_length(seq_id), min(reserved, more[0])
            self.require(left == expected, "truncate", f"of {reserved} slots {left} are left, and not {expected}")
        return found


def _small(piece: ModuleType) -> BasicKvCache:
    return piece.MyContiguousCache(_RUNS, _LENGTH, _BLOCK)


def check(piece: ModuleType) -> None:
    search(lambda: ContiguousTrial(piece), _KINDS, lists=30)
    check_cache(lambda: _small(piece), lists=3)


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    def new_cache(size: CacheSize) -> BasicKvCache:
        return piece.MyContiguousCache(size.max_num_seqs, size.max_model_len, size.block_size)

    yield {"kv": new_cache, "max_model_len": 128, "max_num_seqs": 4}


EXERCISE = Exercise(
    names=("MyContiguousCache",),
    rules=RULES,
    hints=(
        "Draw the pool: runs of blocks_per_run blocks, one after another. Which block does run number i begin with?",
        "free_run: the runs that are taken are those of self.runs and, because copies are kept too, self._runs() has "
        "all of them. Try one start after another; the first that nothing has is free.",
        "reserve can fail in one way: the sequence would be longer than max_model_len. Compare first.",
        "Two lengths: reserve moves `reserved`, commit moves `computed`, truncate cuts both, and neither may grow.",
    ),
    solution=("forge.cache.basic.BasicKvCache",),
    check=check,
    engine=engine,
    own={"kv": "off"},
    beside="no cache",
    prompts=("Once upon a time",),
    params={"max_tokens": 96, "ignore_eos": True},
    view="blocks",
)
