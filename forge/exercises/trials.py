"""Trials that several exercises share: of a cache, and of a whole engine.

`search` runs random operations on a trial until one fails, and shortens the list that leads there.

`CacheTrial` runs a reader's cache under the random operations of `forge.testing`, with each call written down as
Python. The oracle of the conformance tests finds what is wrong; here its words are given a rule of the exercise, the
calls that led there, and a picture of the blocks.

`EngineTrial` runs an engine of the hash model on the reader's code: requests run to their ends, with every rule of the
scheduler looked at after each step, and compared with what each request says alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

from forge.cache.block_pool import BlockError
from forge.cache.kv_cache import KvCache, OutOfBlocks
from forge.engine.sampling_params import SamplingParams
from forge.engine.sequence import Sequence as TokenSequence
from forge.exercises.exercise import BROKEN, Mistake, Trial
from forge.exercises.loading import line_in, time_limit
from forge.llm import LLM
from forge.testing.caches import Operation, Oracle, failure, random_operations, shrunk
from forge.trace.records import BlockMap

_TRIES = 400
"""Shorter lists that a failing list is compared with, at most."""
_LENGTHS = (4, 8, 16, 40, 120)
"""Lengths of random lists of operations: short ones first, so that the first failing list is short."""
Words = Sequence[tuple[str, str]]
"""(a pattern in what the oracle says, the rule that this breaks), the first that fits."""


class CacheTrial(Trial):
    """Runs a reader's cache beside an oracle and records the calls."""

    def __init__(self, piece: ModuleType, line: str, new_cache: Callable[[], KvCache], num_blocks: int, words: Words):
        """line: Python that creates the cache."""
        super().__init__(piece, line)
        self.words = words
        self.available, self.needed = 0, ""
        self.cache = new_cache()
        self.oracle = Oracle(self.cache, num_blocks, call=self.record)

    def draw(self) -> str:
        return drawing(self.cache.block_map())

    def capture(self) -> Callable[[], str]:
        return partial(drawing, self.cache.block_map())

    def perform(self, operation: Operation) -> None:
        try:
            self.oracle.perform(operation)
        except AssertionError as error:
            raise self.named(error) from None
        except BROKEN as error:
            raise self.mistake_of(error) from None

    def named(self, error: BaseException, line: str | None = None) -> Mistake:
        """Translate a conformance failure into the exercise's own rule and message."""
        message = str(error)
        rule = next((rule for pattern, rule in self.words if re.search(pattern, message)), "conforms")
        if message == "blocks_needed was wrong":
            taken = self.available - self.cache.num_available
            message = f"before the last call {self.needed}; it took {taken} of {self.available} available blocks"
        return self.broken(rule, message, line)

    def record(self, name: str, *arguments: Any) -> Any:
        """Make one call of the reader's code, write it down, and check what it returns or raises."""
        self.available = self.cache.num_available
        line = f"cache.{name}({', '.join(map(_literal, arguments))})"
        try:
            returned = self.call(line, getattr(self.cache, name), *arguments, expect=(OutOfBlocks, BlockError))
        except BlockError as error:
            raise self.named(error, line_in(self.path, error)) from None
        if name == "remove" and arguments[0] in self.cache:
            raise self.broken("removed", f"the cache still has sequence {arguments[0]}")
        if name == "blocks_needed":
            self.needed = self.calls.pop()  # the oracle asks before each reserve
        return returned


def _literal(value: Any) -> str:
    return repr(list(value)) if isinstance(value, list | tuple) and not hasattr(value, "_fields") else repr(value)


def search(new: Callable[[], Any], weighted: Mapping[str, int], lists: int = 60) -> None:
    """Run random lists of operations. Raises the `Mistake` of the shortest list that fails."""
    for length in _LENGTHS:
        for seed in range(lists if length <= 16 else lists // 4):
            operations = random_operations(seed + 1000 * length, length, weighted)
            failed = failure(new, operations)
            if failed is None:
                continue
            if isinstance(failed[1], Mistake) and failed[1].rule == "endless":
                raise failed[1]  # each list that is tried would take seconds
            shortest = shrunk(new, operations, _TRIES)
            raise failed[1] if shortest is None else _with_small_numbers(new, *shortest)


def _with_small_numbers(new: Callable[[], Any], error: Exception, operations: list[Operation]) -> Exception:
    """Run the failing list with ever smaller counts and return the failure of the smallest that still fails."""
    for index, (kind, which, count, word) in enumerate(operations):
        for smaller in range(count):
            changed = [*operations[:index], (kind, which, smaller, word), *operations[index + 1 :]]
            failed = failure(new, changed)
            if failed is not None and failed[0] == len(operations):
                error, operations = failed[1], changed
                break
    return error


def drawing(block_map: BlockMap) -> str:
    """Draw the pool and the tables as `--show blocks` does."""
    from forge.views.block_map import SequenceNames, pool_lines, table_lines

    names = SequenceNames()
    for table in block_map.tables:
        names.number(table.owner)
    lines = [*pool_lines(block_map, names, 72, 4), *table_lines(block_map, names, 72, 8)]
    return "\n".join(line.plain for line in lines)


def oldest_first(running: Sequence[TokenSequence], requester: TokenSequence) -> TokenSequence | None:
    """Choose the first of the other sequences, which the plan has usually scheduled already."""
    return next((sequence for sequence in running if sequence is not requester), None)


_MOST_STEPS = 1500
_RUN_SECONDS = 20
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


class EngineTrial(Trial):
    """A subclass sets `llm` and `n`, the samples of each request."""

    llm: LLM
    n: int = 1

    def draw(self) -> str:
        scheduler = self.llm.engine.scheduler
        running = " ".join(str(seq_id) for seq_id in scheduler.running) or "none"
        waiting = " ".join(str(sequence.seq_id) for sequence in scheduler.queue) or "none"
        return f"running {running}   waiting {waiting}   free blocks {self.llm.engine.cache.num_available}"

    def run(self, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        """Run the requests, check every rule of the scheduler after each step, and return each sample's tokens."""
        run = self.llm.start(prompts, SamplingParams(**GREEDY, n=self.n))
        self.calls.append(f"run = llm.start({prompts}, SamplingParams(**{GREEDY}, n={self.n}))".replace("'", '"'))
        self.calls.append("")
        steps = iter(run)
        for number in range(1, _MOST_STEPS):
            self.calls[-1] = f"for _ in range({number}): next(run)"
            before = self.capture()
            try:
                next(steps)
            except StopIteration:
                samples = [sample for output in run.outputs for sample in output.outputs]
                return [tuple(sample.token_ids) for sample in samples]
            self.before = before
            try:
                self.llm.engine.scheduler.check_invariants()
            except AssertionError as error:
                raise self.broken("conforms", str(error)) from None
        raise self.broken("ends", f"after {_MOST_STEPS} steps requests still run")

    def compare(self, prompts: list[list[int]]) -> None:
        try:
            with time_limit(_RUN_SECONDS):
                samples = self.run(prompts)
        except BROKEN as error:
            raise self.mistake_of(error) from None
        expected = _alone(tuple(map(tuple, prompts)), self.n)
        for number, (ours, theirs) in enumerate(zip(samples, expected, strict=True)):
            self.require(ours == theirs, "same-tokens", f"sample {number} says {ours[:8]}…, and alone {theirs[:8]}…")


@cache
def _alone(prompts: tuple[tuple[int, ...], ...], n: int) -> list[tuple[int, ...]]:
    """Generate each request alone and without a cache, and return its samples' tokens."""
    llm = LLM("hash", kv="off", max_num_seqs=1)
    outputs = llm.generate([list(prompt) for prompt in prompts], SamplingParams(**GREEDY, n=n))
    return [tuple(sample.token_ids) for output in outputs for sample in output.outputs]
