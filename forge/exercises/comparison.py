"""Two runs of the engine on the same requests: with the reader's part, and with the engine's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forge.exercises.exercise import Exercise
from forge.trace.records import StepRecord


@dataclass(frozen=True)
class Ran:
    """One run of the engine."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[StepRecord, ...]
    token_text: Callable[[int], str]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(record.ended - record.started for record in self.records)
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def fullest(self) -> StepRecord:
        """The step with most blocks in use."""
        return max(self.records, key=lambda record: (record.cache.used_blocks, record.cache.tokens_held))


@dataclass(frozen=True)
class Comparison:
    """The same requests with the reader's part and with the engine's own."""

    exercise: Exercise
    yours: Ran
    reference: Ran
    calls: Mapping[str, int]
    """How often the run called each of the reader's functions."""

    @property
    def identical(self) -> bool:
        return self.yours.token_ids == self.reference.token_ids
