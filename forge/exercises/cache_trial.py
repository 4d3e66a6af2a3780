"""A reader's cache under the random operations of `forge.testing`, with each call written down as Python.

The oracle of the conformance tests finds what is wrong; here its words are given a rule of the exercise, the calls that
led there, and a picture of the blocks.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from forge.cache.block_pool import BlockError
from forge.cache.kv_cache import KvCache, OutOfBlocks
from forge.exercises.exercise import BROKEN, Mistake, Operation, Trial, copied, drawing, same
from forge.exercises.limits import time_limit
from forge.exercises.loading import line_in
from forge.testing.caches import Oracle
from forge.trace.records import BlockMap

Words = Sequence[tuple[str, str]]
"""(a pattern in what the oracle says, the rule that this breaks), the first that fits."""


class CacheTrial(Trial):
    """Runs a reader's cache beside an oracle and records the calls."""

    def __init__(self, piece: ModuleType, line: str, new_cache: Callable[[], KvCache], num_blocks: int, words: Words):
        """line: Python that creates the cache."""
        super().__init__(piece, line)
        self.words = words
        self.state: BlockMap | None = None
        self.available, self.needed = 0, ""
        self.cache = new_cache()
        self.oracle = Oracle(self.cache, num_blocks, self.cache.block_size, call=self.record)

    def draw(self) -> str:
        return drawing(self.cache.block_map())

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

    def broken(self, rule: str, finding: str, line: str | None = None) -> Mistake:
        if self.state is not None:
            self.before = partial(drawing, self.state)
        return super().broken(rule, finding, line)

    def record(self, name: str, *arguments: Any) -> Any:
        """Make one call of the reader's code, write it down, and check what it returns or raises."""
        self.state, self.available = self.cache.block_map(), self.cache.num_available
        self.calls.append(f"cache.{name}({', '.join(map(_literal, arguments))})")
        copies = [copied(argument) for argument in arguments]
        try:
            with time_limit():
                returned = getattr(self.cache, name)(*arguments)
        except OutOfBlocks as error:
            self.calls[-1] += f"  # OutOfBlocks(needed={error.needed}, free={error.free})"
            raise
        except BlockError as error:
            raise self.named(error, line_in(self.path, error)) from None
        except BROKEN as error:
            raise self.mistake_of(error) from None
        self.require(all(map(same, arguments, copies)), "untouched", f"{copies} have become {list(arguments)}")
        if name == "remove" and arguments[0] in self.cache:
            raise self.broken("removed", f"the cache still has sequence {arguments[0]}")
        if returned not in (None, ()):
            self.calls[-1] += f"  # {returned!r}"
        if name == "blocks_needed":
            self.needed = self.calls.pop()  # the oracle asks before each reserve
        return returned


def _literal(value: Any) -> str:
    return repr(list(value)) if isinstance(value, list | tuple) and not hasattr(value, "_fields") else repr(value)
