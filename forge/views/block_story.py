"""What a step did to the blocks, in sentences: "seq 2 wrote into block 7, shared by 2: copied to 11"."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forge.trace.explain import explain, explain_finish, explain_preemption
from forge.trace.records import (
    AdmitRecord,
    BlockEvicted,
    BlockMap,
    BlockSplit,
    ItemRecord,
    PreemptRecord,
    PrefixHit,
    StepRecord,
    TableRecord,
)
from forge.views.block_map import SequenceNames
from forge.views.formatting import count, plural
from forge.views.text import one_line

MANY = 2
"""More sequences than these that do the same are counted."""


class Sentence(NamedTuple):
    """What one thing did in a step."""

    step: int
    text: str
    routine: bool = False
    """A token in its slot, a sequence that waits: of interest in this step only."""


class BlockStory:
    """Tells step by step; what sequences had before is remembered from the step before."""

    def __init__(self, names: SequenceNames, keeps: bool = False):
        """keeps: sequences that end retain their blocks, for a continuation."""
        self._names, self._keeps = names, keeps
        self._before: dict[int, TableRecord] = {}
        self._steps = 0

    def tell(self, record: StepRecord) -> list[Sentence]:
        """What happened in a step, in the order in which it did. Steps are counted from the first that is told."""
        self._steps += 1
        sentences = [Sentence(self._steps, text) for text in (*self._beginnings(record), *self._changes(record))]
        sentences += [Sentence(self._steps, text, True) for text in (*self._waits(record), *self._writes(record))]
        sentences += [Sentence(self._steps, text) for text in self._ends(record)]
        self._before = _tables(record.blocks)
        return sentences

    def _beginnings(self, record: StepRecord) -> Iterator[str]:
        for preemption in record.preempted:
            yield self._preemption(preemption)
        hits = {event.seq_id: event for event in record.events if isinstance(event, PrefixHit)}
        for admission in record.admitted:
            yield self._admission(admission, hits.get(admission.seq_id), _tables(record.blocks))

    def _waits(self, record: StepRecord) -> Iterator[str]:
        for wait in record.waiting:
            yield f"{self._label(wait.seq_id)} waits: {explain(wait.reason, self._label)}"

    def _changes(self, record: StepRecord) -> Iterator[str]:
        for event in record.events:
            if isinstance(event, BlockSplit):
                why = f"shared by {event.references}" if event.references > 1 else "cached for later prompts"
                label = self._label(event.seq_id)
                yield f"{label} wrote into block {event.source}, {why}: copied to {event.destination}"
        evicted = [event for event in record.events if isinstance(event, BlockEvicted)]
        if evicted:
            tokens = sum(event.num_tokens for event in evicted)
            yield f"{_blocks([event.block for event in evicted])} evicted: {plural(tokens, 'cached token')} forgotten"
        admitted = {admission.seq_id for admission in record.admitted}
        copied = {event.destination for event in record.events if isinstance(event, BlockSplit)}
        grown: list[tuple[int, list[int]]] = []
        forks: list[TableRecord] = []
        for owner, table in _tables(record.blocks).items():
            before = self._before.get(owner)
            if before is None:
                if owner not in admitted:
                    forks.append(table)
            elif owner not in admitted:
                known = copied.union(before.blocks)
                if new := [block for block in table.blocks if block not in known]:
                    grown.append((owner, new))
        if record.blocks is not None:
            yield from self._forks(forks, record.blocks)
        if len(grown) > MANY:
            yield f"{len(grown)} sequences took {plural(sum(len(new) for _, new in grown), 'block')}"
        else:
            for owner, taken in grown:
                yield f"{self._label(owner)} took {_blocks(taken)}"

    def _forks(self, tables: Sequence[TableRecord], block_map: BlockMap) -> Iterator[str]:
        shared = [sum(block_map.reference_counts[block] > 1 for block in table.blocks) for table in tables]
        if len(tables) > MANY:
            blocks = (
                f"{_count(sum(shared))} in their tables shared, none copied" if any(shared) else "all blocks copied"
            )
            yield f"{len(tables)} sequences began as forks: {blocks}"
            return
        for table, number in zip(tables, shared, strict=True):
            blocks = f"{_count(number)} shared, none copied" if number else "all blocks copied"
            yield f"{self._label(table.owner)} began as a fork: {blocks}"

    def _ends(self, record: StepRecord) -> Iterator[str]:
        tables = _tables(record.blocks)
        held = {one.seq_id: len(tables[one.seq_id].blocks) for one in record.finished if one.seq_id in tables}
        if len(held) > MANY:
            yield f"{len(held)} sequences ended and freed {_count(sum(held.values()))}"
            return
        for finish in record.finished:
            verb = "keeps its" if self._keeps else "freed"
            blocks = f" and {verb} {_count(held[finish.seq_id])}" if finish.seq_id in held else ""
            yield f"{self._label(finish.seq_id)} ended ({one_line(explain_finish(finish))}){blocks}"

    def _writes(self, record: StepRecord) -> Iterator[str]:
        if record.blocks is None:
            return
        tables = _tables(record.blocks)
        items = [item for item in record.items if item.num_tokens and item.seq_id in tables]
        decodes = [item for item in items if item.num_tokens == 1]
        if len(decodes) > MANY:
            yield f"{len(decodes)} sequences wrote a token each"
            items = [item for item in items if item.num_tokens > 1]
        for item in items[:MANY]:
            yield self._write(item, tables[item.seq_id], record.blocks.block_size)

    def _admission(self, admission: AdmitRecord, hit: PrefixHit | None, tables: dict[int, TableRecord]) -> str:
        label, again = self._label(admission.seq_id), " again" if admission.how != "new" else ""
        table = tables.get(admission.seq_id)
        if hit is not None:
            return f"{label} began{again} with {plural(hit.num_tokens, 'token')} from {_blocks(hit.blocks)}"
        if admission.how == "handoff":
            return f"{label} began with {plural(admission.num_cached, 'token')} that another engine computed"
        if admission.how == "swap":
            return f"{label} came back with {plural(admission.num_cached, 'token')} in {_count(admission.num_blocks)}"
        if admission.num_cached:
            return f"{label} went on with {plural(admission.num_cached, 'token')}, which it had kept"
        where = f": {_blocks(table.blocks)}" if table is not None else ""
        return f"{label} began{again}{where}"

    def _preemption(self, preemption: PreemptRecord) -> str:
        blocks = _count(preemption.blocks_freed)
        return f"{self._label(preemption.seq_id)} freed {blocks}, {explain_preemption(preemption, self._label)}"

    def _write(self, item: ItemRecord, table: TableRecord, block_size: int) -> str:
        first, last = item.start, item.start + item.num_tokens - 1
        if first == last:
            block, slot = table.blocks[first // block_size], first % block_size
            where = f"token {count(first + 1)} into block {block}, slot {slot}"
        else:
            blocks = table.blocks[first // block_size : last // block_size + 1]
            where = f"tokens {count(first + 1)} to {count(last + 1)} into {_blocks(blocks)}"
        return f"{self._label(item.seq_id)} wrote {where}"

    def _label(self, seq_id: int) -> str:
        return self._names.label(seq_id)


def _tables(block_map: BlockMap | None) -> dict[int, TableRecord]:
    """Each sequence's table."""
    return {} if block_map is None else {table.owner: table for table in block_map.tables if not table.is_snapshot}


def _blocks(blocks: Sequence[int]) -> str:
    """`block 7`, `blocks 0 1 2`, `blocks 0 1 2 … 127`."""
    shown = list(map(str, blocks)) if len(blocks) <= 8 else [*map(str, blocks[:4]), "…", str(blocks[-1])]
    return f"{'block' if len(blocks) == 1 else 'blocks'} {' '.join(shown)}"


def _count(number: int) -> str:
    return plural(number, "block")
