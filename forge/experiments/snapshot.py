"""`forge prefix --snapshot`: what a snapshot of a sequence's cache holds, and what it shares with the sequence.

The story is advanced step by step, and the cache is asked for a snapshot between two steps, as the engine asks it for a
fork. The snapshot's keys and values are read when it is taken and again at the end.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from forge.engine.sampling_params import SamplingParams
from forge.trace.records import TableRecord
from forge.views.formatting import NOTHING, plural
from forge.views.metrics import verdict
from forge.views.screen import Part, Report, Table, question, report
from forge.views.text import neutralise, one_line, tail

if TYPE_CHECKING:
    import numpy as np

    from forge.llm import LLM

QUESTION = "What does a snapshot hold, and what is shared?"
_RESTORED = -1
"""The id of the sequence that begins from the snapshot: no request has it."""


@dataclass(frozen=True)
class Moment:
    """The cache at one moment of the story or its snapshot."""

    event: str
    story: str
    """The blocks of the sequence, those that something else refers to as well with a star."""
    snapshot: str
    used: int
    cached: int
    saved: int
    """Blocks that sharing saves."""


@dataclass(frozen=True)
class SnapshotStory:
    """A snapshot's life from its creation to its release."""

    beginning: str
    tokens: int
    """Computed tokens in the snapshot."""
    moments: tuple[Moment, ...]
    unchanged: bool
    """Whether its keys and values are the same at the end, to the last bit."""
    cache: str
    """The cache at the end, in its own words."""


def snapshot_report(llm: "LLM", prompt: str, max_tokens: int, place: int) -> Report:
    """Run the story of a snapshot that is taken after `place` tokens of output."""
    story = _run(llm, prompt, max_tokens, place)
    about = f"kv prefix · block size {llm.engine.cache.block_size} · {llm.model_name}"
    return report(asdict(story), lambda: _screen(story, about))


def _run(llm: "LLM", prompt: str, max_tokens: int, place: int) -> SnapshotStory:
    engine, cache, storage = llm.engine, llm.engine.cache, llm.engine.storage
    run = llm.start([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
    steps = iter(run)
    for _ in range(place):
        record = next(steps)
    (seq_id,) = {item.seq_id for item in record.items}
    beginning = prompt + run.outputs[0].outputs[0].text
    moments = [_moment(llm, f"{plural(cache.computed_length(seq_id), 'token')} computed", seq_id)]
    with engine.lock:
        snapshot, copies = cache.snapshot(seq_id)
        storage.copy_blocks(copies)
    (taken,) = (table for table in cache.block_map().tables if table.is_snapshot)
    held = _keys_and_values(llm, taken)
    moments.append(_moment(llm, "snapshot taken", seq_id))
    next(steps)
    moments.append(_moment(llm, "one token more is written", seq_id))
    for _ in steps:
        pass
    moments.append(_moment(llm, "the story ends", seq_id))
    with engine.lock:
        storage.copy_blocks(cache.restore(snapshot, _RESTORED))
        moments.append(_moment(llm, "restored as a new sequence", _RESTORED))
        unchanged = all((before == now).all() for before, now in zip(held, _keys_and_values(llm, taken), strict=True))
        cache.remove(_RESTORED)
        cache.release(snapshot)
    moments.append(_moment(llm, "both released", seq_id))
    return SnapshotStory(beginning, taken.computed, tuple(moments), unchanged, repr(cache))


def _moment(llm: "LLM", event: str, seq_id: int) -> Moment:
    stats, tables = llm.engine.cache.stats(), llm.engine.cache.block_map()
    story = next((table for table in tables.tables if table.owner == seq_id and not table.is_snapshot), None)
    snapshot = next((table for table in tables.tables if table.is_snapshot), None)

    def blocks(table: TableRecord | None) -> str:
        counts = tables.reference_counts
        held = table.blocks if table is not None else ()
        return " ".join(f"{block}*" if counts[block] > 1 else str(block) for block in held) or NOTHING

    return Moment(event, blocks(story), blocks(snapshot), stats.used_blocks, stats.cached_blocks, stats.blocks_saved)


def _keys_and_values(llm: "LLM", table: TableRecord) -> "list[np.ndarray]":
    """Return every layer's keys and values in the blocks of a table."""
    layers = range(llm.engine.storage.layout.num_layers)
    gathered = (llm.engine.storage.gather(layer, table.blocks, table.computed) for layer in layers)
    return [array for pair in gathered for array in pair]


def _screen(story: SnapshotStory, about: str) -> Iterator[Part]:
    yield from question(QUESTION, about, neutralise(one_line(tail(story.beginning, 200))))
    columns = ["blocks of the: {event}", "sequence: {story}", "snapshot: {snapshot}"]
    yield Table.of(
        story.moments, *columns, "used: {used:count}", "cached: {cached:count}", "saved: {saved:count}", names=3
    )
    note = "* also in another table. A block that two tables have is copied before one of them writes into it."
    yield from (None, Text(note), None)
    same = f"the snapshot's {plural(story.tokens, 'token')} kept their keys and values to the last bit"
    yield verdict(story.unchanged, same, "the snapshot's keys and values changed")
    yield story.cache
