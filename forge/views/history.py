"""A run as a view follows it: its records, the text they bring, and what a picture of each moment needs.

Nothing is dropped, so a view can show any step of the past: index i shows the run as it stood after step i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.trace.records import EndRecord, StepRecord
from forge.trace.timeline import RequestTimeline, Timeline
from forge.views.summary import RunLabel

_QUEUE_SHOWN = 64


@dataclass(frozen=True)
class Moment:
    """What is shown of a step beyond its own record."""

    running: tuple[int, ...]
    """Sequences with a place in the batch, in the order of their admission."""
    waiting: tuple[int, ...]
    """Queued sequences in the order in which they will be admitted; only so many as a screen has room for."""
    preemptions: int
    """Preemptions so far."""
    tokens_per_second: float
    """Tokens per second of this step alone."""


@dataclass
class History:
    """The records of a run and the moments after them."""

    label: RunLabel
    max_num_seqs: int | None = None
    order: str = "fcfs"
    """The admission order."""
    records: list[StepRecord] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    _timeline: Timeline = field(default_factory=Timeline)

    def feed(self, record: StepRecord) -> None:
        """Add the record of a step that has just ended."""
        running_before = self._timeline.running
        self._timeline.add(record)
        before = self.moments[-1].preemptions if self.moments else 0
        seconds = record.ended - record.started
        took_part = dict.fromkeys((*running_before, *self._timeline.running, *(item.seq_id for item in record.items)))
        lost = {victim.seq_id for victim in record.preempted}
        stays = self.moments and not (record.arrived or record.admitted or record.preempted or record.finished)
        queue = self.moments[-1].waiting if stays else self._timeline.queue(self.order, _QUEUE_SHOWN)
        self.records.append(record)
        running = tuple(seq_id for seq_id in took_part if seq_id not in lost)
        speed = len(record.tokens) / seconds if seconds > 0 else 0.0
        self.moments.append(Moment(running, queue, before + len(record.preempted), speed))

    def end(self, ends: Sequence[EndRecord]) -> None:
        """Note that requests have ended, some of them perhaps between two steps."""
        self._timeline.end_requests(ends)

    def requests(self) -> tuple[RequestTimeline, ...]:
        """Return the timeline of every sequence until now."""
        return self._timeline.requests()

    def __len__(self) -> int:
        return len(self.records)


class TextStreams:
    """Collects what each sequence has said. Sequences are numbered in the order in which they first appear."""

    def __init__(self):
        self.texts: list[str] = []
        self._index: dict[int, int] = {}

    def feed(self, record: StepRecord) -> None:
        """Take in one step."""
        for item in record.items:
            self.index_of(item.seq_id)
        said = [(token.seq_id, token.text) for token in record.tokens]
        said += [(finish.seq_id, finish.text) for finish in record.finished]
        for seq_id, text in said:
            self.texts[self.index_of(seq_id)] += text

    def index_of(self, seq_id: int) -> int:
        if seq_id not in self._index:
            self._index[seq_id] = len(self._index)
            self.texts.append("")
        return self._index[seq_id]
