"""Where every block is, as text: the pool as a map of cells, the block table of each sequence, the cache's figures.

One character is one block, so that the map needs no colour: the number of the sequence that has it, or what is worth
more to know. Where the pool is too large for that, a character is several neighbours and shows the most telling one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from rich.text import Text

from forge.engine.outputs import RequestOutput
from forge.trace.records import BlockEvicted, BlockMap, BlockSplit, CacheRecord, StepRecord, TableRecord
from forge.views.formatting import count, plural, share, size
from forge.views.json_output import as_object
from forge.views.metrics import Fact
from forge.views.palette import QUIET, sequence_style

FREE, CACHED, RESERVED, OWNED, SHARED, WRITTEN = range(6)
"""A cell's state; of several that share a character the greatest is shown."""
_SIGNS = {FREE: "·", CACHED: "▒", RESERVED: "-", SHARED: "*", WRITTEN: "!"}
LEGEND = "0 1 2 whose   ! written now   * shared   - reserved, empty   ▒ cached   · free"
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SNAPSHOT = "s"
_ROW_LENGTHS = (64, 32, 16, 8)
_SPACED_ROWS = 4
"""A map of more rows than these has no gaps between its cells."""
_BAR = 16
_NARROW = 72
"""Columns from which on a block is drawn slot by slot."""


class SequenceNames:
    """Small numbers for sequences, in the order in which a view meets them: an engine's ids may begin anywhere."""

    def __init__(self):
        self._numbers: dict[int, int] = {}

    def number(self, seq_id: int) -> int:
        return self._numbers.setdefault(seq_id, len(self._numbers))

    def label(self, seq_id: int) -> str:
        return f"seq {self.number(seq_id)}"


class Cell(NamedTuple):
    """One character of the map."""

    state: int
    owner: int | None = None
    """The number of the first sequence that has the block; None for a snapshot's, and for a block without an owner."""

    def text(self) -> tuple[str, str]:
        """Return the cell's character and its style."""
        if self.state in (FREE, CACHED):
            return _SIGNS[self.state], QUIET
        style = QUIET if self.owner is None else sequence_style(self.owner)
        if self.state == RESERVED:
            return _SIGNS[RESERVED], style
        if self.state == OWNED:
            sign = _SNAPSHOT if self.owner is None else _DIGITS[self.owner % len(_DIGITS)]
            return sign, f"{style} reverse"
        return _SIGNS[self.state], f"{style} reverse bold"


def cells(block_map: BlockMap, names: SequenceNames) -> list[Cell]:
    """Return one cell per block of the pool, in order."""
    states = [Cell(FREE)] * len(block_map.reference_counts)
    for block in block_map.cached:
        states[block] = Cell(CACHED)
    written = set(block_map.written)
    owners = [None if table.is_snapshot else names.number(table.owner) for table in block_map.tables]
    for owner, table in reversed(list(zip(owners, block_map.tables, strict=True))):  # the first has the last word
        filled = -(-table.computed // block_map.block_size)
        for place, block in enumerate(table.blocks):
            if block in written:
                state = WRITTEN
            elif block_map.reference_counts[block] > 1:
                state = SHARED
            else:
                state = OWNED if place < filled else RESERVED
            states[block] = Cell(state, owner)
    return states


def pool_lines(
    block_map: BlockMap, names: SequenceNames, width: int, max_rows: int, hide_free: bool = False
) -> list[Text]:
    """Return the map, each row behind the number of its first block, and what a character stands for if not for one
    block.

    hide_free: only count the rows at the end, past one of them, in which all blocks are free.
    """
    every = cells(block_map, names)
    margin = len(str(len(every))) + 2
    per_row, gap, per_cell = _map_shape(len(every), width - margin, max_rows)
    shown = [max(every[start : start + per_cell], key=attrgetter("state")) for start in range(0, len(every), per_cell)]
    lines, hidden = [], 0
    if hide_free:
        used = max((place + 1 for place, cell in enumerate(shown) if cell.state != FREE), default=1)
        end = -(-used // per_row) * per_row + per_row
        shown, hidden = shown[:end], max(0, len(every) - end * per_cell)
    for start in range(0, len(shown), per_row):
        line = Text(f"{start * per_cell:>{margin - 2}}  ", QUIET, no_wrap=True)
        for sign, style in (cell.text() for cell in shown[start : start + per_row]):
            line.append(sign, style).append(" " * gap)
        line.rstrip()
        lines.append(line)
    if hidden:
        lines.append(Text(f"{'':{margin}}and {plural(hidden, 'more free block')}", QUIET))
    if per_cell > 1:
        lines.append(Text(f"each character is {per_cell} blocks and shows the most telling one", QUIET))
    return lines


def _map_shape(num_blocks: int, room: int, max_rows: int) -> tuple[int, int, int]:
    """Return the cells in a row, the spaces between them, and the blocks in a cell."""
    for gap, rows in ((1, min(max_rows, _SPACED_ROWS)), (0, max_rows)):
        per_row = next((length for length in _ROW_LENGTHS if length * (1 + gap) - gap <= room), _ROW_LENGTHS[-1])
        if num_blocks <= per_row * rows:
            return per_row, gap, 1
    return per_row, 0, -(-num_blocks // (per_row * (max_rows - 1 if max_rows > 1 else 1)))


def table_lines(block_map: BlockMap, names: SequenceNames, width: int, max_rows: int) -> list[Text]:
    """Return a heading and one line per table; those for which there is no line are counted."""
    tables, size = block_map.tables, block_map.block_size
    if not tables:
        return [Text("no sequence has a block", QUIET)]
    shown = tables if len(tables) <= max_rows else tables[: max(1, max_rows - 1)]
    labels = [_label(table, names) for table in shown]
    margin = max(len(label) for label in labels)
    bar = min(size, _BAR if width >= _NARROW else 6)
    fill = 2 * len(str(size)) + 1
    heading = f"{'':{margin}}  tokens  {'last block':<{bar + 1 + fill}}  blocks, in the order of positions"
    lines = [Text(heading[:width].rstrip(), QUIET)]
    for label, table in zip(labels, shown, strict=True):
        style = QUIET if table.is_snapshot else sequence_style(names.number(table.owner))
        held = (table.computed - 1) % size + 1 if table.computed else 0  # slots in use in the last block with any
        cells_filled = round(held / size * bar) if held in (0, size) else min(bar - 1, max(1, held * bar // size))
        line = Text.assemble(
            (f"{label:<{margin}}  ", style),
            f"{count(table.computed):>6}  ",
            ("▉" * cells_filled, style),
            ("░" * (bar - cells_filled), QUIET),
            f" {f'{held}/{size}':>{fill}}  ",
            no_wrap=True,
        )
        line.append_text(_fitted(_block_texts(table, block_map), width - line.cell_len))
        lines.append(line)
    hidden = tables[len(shown) :]
    if hidden:
        blocks = sum(len(table.blocks) for table in hidden)
        lines.append(Text(f"and {plural(len(hidden), 'more sequence')} with {plural(blocks, 'block')}", QUIET))
    return lines


def _label(table: TableRecord, names: SequenceNames) -> str:
    return f"snapshot {table.owner}" if table.is_snapshot else names.label(table.owner)


def _block_texts(table: TableRecord, block_map: BlockMap) -> list[str]:
    """Format blocks as `0 1 2*3 13!`: neighbours without a mark are drawn together as `4–9`; behind a `*` how many have
    the block."""
    written = set(block_map.written)

    def marks(block: int) -> str:
        references = block_map.reference_counts[block]
        return (f"*{references}" if references > 1 else "") + ("!" if block in written else "")

    texts = []
    runs = groupby(enumerate(table.blocks), key=lambda at: marks(at[1]) or at[1] - at[0])
    for key, run in runs:
        blocks = [block for _, block in run]
        if isinstance(key, str):
            texts += [f"{block}{key}" for block in blocks]
        elif len(blocks) > 2:
            texts.append(f"{blocks[0]}–{blocks[-1]}")
        else:
            texts += map(str, blocks)
    return texts


def _fitted(texts: Sequence[str], width: int) -> Text:
    """Join as many texts as fit into `width`: the first, and as many of the last, where sequences grow."""
    if len(" ".join(texts)) <= width:
        return Text(" ".join(texts))
    front: list[str] = list(texts[:1])
    back: list[str] = []
    for text in reversed(texts[1:]):
        if len(" ".join([*front, "…", text, *back])) > width:
            break
        back.insert(0, text)
    return Text(" ".join([*front, "…", *back])[: max(0, width)])


def cache_facts(cache: CacheRecord) -> list[Fact]:
    """Return what a cache's record says, in the order in which a reader asks. What cannot be there is left out."""
    facts = [
        ("used", f"{count(cache.used_blocks)} of {count(cache.num_blocks)} ({share(cache.utilization)})"),
        *([("cached", count(cache.cached_blocks))] if cache.kind == "prefix" else []),
        ("free", count(cache.free_blocks)),
        ("internal fragmentation", share(cache.internal_fragmentation)),
    ]
    if cache.kind in ("paged", "prefix"):
        facts += [("saved by sharing", share(cache.sharing)), ("copy-on-write", count(cache.splits))]
    if cache.kind == "prefix":
        facts += [
            ("prefix hits", f"{count(cache.prefix_hits)} of {plural(cache.prefix_queries, 'token')}"),
            ("evicted", count(cache.evictions)),
        ]
    return [*facts, ("KV held", f"{size(cache.bytes_held)} of {size(cache.bytes_reserved)} reserved")]


@dataclass(frozen=True)
class CacheFigures:
    """The cache's figures of one run, for tables and JSON."""

    kind: str
    block_size: int
    num_blocks: int
    most_blocks: int
    """Used at once."""
    most_bytes_held: int
    most_bytes_reserved: int
    internal_fragmentation: float | None
    """The share of reserved slots with nothing in them, over all steps together; None where nothing was reserved."""
    most_blocks_saved: int
    """References beyond the first, at once: blocks that sharing saved."""
    copy_on_write: int
    evictions: int
    prompt_tokens: int
    tokens_cached: int
    """Prompt tokens that were in the cache when their request began."""

    @classmethod
    def of(cls, records: Sequence[StepRecord], outputs: Sequence[RequestOutput]) -> "CacheFigures":
        """Add up the figures of a run. Raises ValueError if no step ran."""
        caches = [record.cache for record in records]
        events = [event for record in records for event in record.events]
        reserved = sum(cache.slots_reserved for cache in caches)
        samples = [sample.metrics for output in outputs for sample in output.outputs[:1]]
        return cls(
            kind=caches[0].kind,
            block_size=caches[0].block_size,
            num_blocks=caches[0].num_blocks,
            most_blocks=max(cache.used_blocks for cache in caches),
            most_bytes_held=max(cache.bytes_held for cache in caches),
            most_bytes_reserved=max(cache.bytes_reserved for cache in caches),
            internal_fragmentation=1 - sum(cache.tokens_held for cache in caches) / reserved if reserved else None,
            most_blocks_saved=max(cache.blocks_saved for cache in caches),
            copy_on_write=sum(isinstance(event, BlockSplit) for event in events),
            evictions=sum(isinstance(event, BlockEvicted) for event in events),
            prompt_tokens=sum(metrics.num_prompt_tokens for metrics in samples),
            tokens_cached=sum(metrics.tokens_cached for metrics in samples),
        )

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that needed no computing."""
        return self.tokens_cached / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def hits(self) -> str:
        """`96 of 140 (68.6 %)`."""
        return f"{count(self.tokens_cached)} of {count(self.prompt_tokens)} ({share(self.hit_rate)})"

    def as_object(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return as_object(self, "hit_rate", without=("kind",))
