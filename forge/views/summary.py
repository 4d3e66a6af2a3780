"""The figures of one run, worked out from its records: what every metrics block, table and JSON object shows.

Speeds come from the engine's own clock in the records, so that drawing between two steps never counts as decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from forge.engine.outputs import RequestOutput
from forge.reasons import Phase
from forge.trace.explain import explain_finish
from forge.trace.records import StepRecord

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class RunLabel:
    """What ran: enough to know a picture by, and the same on every screen."""

    model: str
    kv: str
    device: str
    device_description: str

    def __str__(self) -> str:
        return f"kv {self.kv} · {self.device} ({self.device_description}) · {self.model}"


@dataclass(frozen=True)
class Forward:
    """One forward pass, as a row of a chart."""

    number: int
    """Counted from 1 in its run."""
    phase: Phase
    tokens: int
    """Rows that went through the model."""
    ms: float
    num_draft_tokens: int = 0
    """Rows that verified draft tokens."""

    @classmethod
    def of(cls, number: int, record: StepRecord) -> "Forward":
        num_draft_tokens = sum([item.num_draft_tokens for item in record.items])
        return cls(number, record.phase, record.tokens_computed, record.forward_ms, num_draft_tokens)


class Spread(NamedTuple):
    """What describes `n` times in milliseconds, by the names that screens and JSON have for it."""

    min: float
    median: float
    max: float
    mean: float
    n: int


@dataclass(frozen=True)
class RunResult:
    """Requests that ran in one engine and are over, in most commands a single one: their steps in order."""

    label: RunLabel
    records: tuple[StepRecord, ...]
    outputs: tuple[RequestOutput, ...]
    """The outputs in the order in which the requests came. Their times, as those of the records, are without the time
    for which the reader looked at steps."""
    sampled: bool = False
    """Tokens were drawn, so the seed matters."""
    interrupted: bool = False
    """The reader pressed Ctrl-C, or left the run while stepping through it. The output is as it stood then."""
    left: bool = False
    """The reader left it, which is no error."""
    logits: "tuple[tuple[np.ndarray, ...], ...]" = ()
    """For each sequence, in that order, float32 `[vocab]` for each output token, if they were kept."""

    @property
    def output(self) -> RequestOutput:
        """The first request's."""
        return self.outputs[0]

    @cached_property
    def forwards(self) -> tuple[Forward, ...]:
        return tuple(Forward.of(number, record) for number, record in enumerate(self.records, start=1))

    @property
    def forward_ms(self) -> tuple[float, ...]:
        return tuple(forward.ms for forward in self.forwards)

    @property
    def spread(self) -> Spread | None:
        """The spread of the forwards' milliseconds; None if there was no forward."""
        times = self.forward_ms
        return Spread(min(times), median(times), max(times), fmean(times), len(times)) if times else None

    @property
    def time_to_first_token_ms(self) -> float | None:
        """The median of the requests'."""
        known = [output.metrics.time_to_first_token_ms for output in self.outputs]
        return median(value for value in known if value is not None) if any(known) else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens of decode steps, all samples together, per second of those steps; None if no step decoded."""
        return decode_rate(self.records)

    @property
    def tokens_computed(self) -> int:
        return sum(forward.tokens for forward in self.forwards)

    @property
    def kv_bytes_held(self) -> int:
        """Bytes of keys and values at the fullest moment of the run."""
        return max((record.cache.bytes_held for record in self.records), default=0)

    @property
    def last_over_second(self) -> float | None:
        """The last forward's time over the second's: how much slower the run had become. None with fewer than three."""
        times = self.forward_ms
        return times[-1] / times[1] if len(times) > 2 and times[1] > 0 else None

    @property
    def ending(self) -> str:
        """How the samples ended: `length`, or `stop, abort` where they differ."""
        return ", ".join(dict.fromkeys(self.endings))

    @cached_property
    def endings(self) -> tuple[str, ...]:
        """How each sample ended: `length`, or with the reason for it `length: the pool holds 32 tokens`."""
        arrived = [arrival for record in self.records for arrival in record.arrived]
        seq_ids = [arrival.seq_ids for arrival in arrived if arrival.request_id == self.output.request_id]
        finished = [finish for record in self.records for finish in record.finished if finish.why is not None]
        told = {finish.seq_id: explain_finish(finish) for finish in finished}
        samples = zip_longest(self.output.outputs, seq_ids[-1] if seq_ids else ())
        return tuple(told.get(seq_id) or sample.finish_reason or "unfinished" for sample, seq_id in samples)

    @property
    def seconds(self) -> float:
        """Seconds of all steps together: what lies between them, such as drawing, does not count."""
        return sum(record.ended - record.started for record in self.records)

    @property
    def milliseconds(self) -> float:
        return self.seconds * 1e3

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Every sample's, request by request."""
        return tuple(sample.token_ids for output in self.outputs for sample in output.outputs)


def decode_rate(records: Sequence[StepRecord]) -> float | None:
    """Return tokens per second over the steps in which every sequence was decoding."""
    decoding = [record for record in records if record.phase == "decode"]
    seconds = sum(record.ended - record.started for record in decoding)
    return sum(len(record.tokens) for record in decoding) / seconds if seconds > 0 else None
