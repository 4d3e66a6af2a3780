"""`--show blocks`: the pool and the block tables while tokens are generated, and what just happened in words.

On a terminal every step is drawn where the last one was, and stays for as long as `--pace` says: a token of a small
model takes a fraction of a millisecond, too fast to follow. The waiting lies between steps, so no figure contains
it. In a pipe a step is one line.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.text import Text

from forge.cache.kv_cache import CacheStats
from forge.trace.explain import explain, explain_finish, explain_preemption
from forge.trace.records import (
    AdmitRecord,
    BlockEvicted,
    BlockMap,
    BlockSplit,
    CacheRecord,
    ItemRecord,
    PrefixHit,
    StepRecord,
    TableRecord,
)
from forge.views.block_map import LEGEND, SequenceNames, cache_facts, pool_lines, table_lines
from forge.views.formatting import count, plural, share
from forge.views.generation import sample_texts
from forge.views.history import TextStreams
from forge.views.json_output import picked, run_object, to_json
from forge.views.metrics import flowing, metrics_lines, plain_metrics
from forge.views.palette import QUIET, TITLE, sequence_style
from forge.views.run_view import LiveView, RunView
from forge.views.screen import draw
from forge.views.summary import RunResult
from forge.views.terminal import cut, heading
from forge.views.text import neutralise, one_line, tail

MANY = 2
"""The most sequences doing the same that are named one by one; more are counted."""


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
        self._label, self._keeps = names.label, keeps
        self._before: dict[int, TableRecord] = {}
        self._steps = 0

    def tell(self, record: StepRecord) -> list[Sentence]:
        """Return what happened in a step, in the order in which it did. Steps are counted from the first that is
        told."""
        self._steps += 1
        sentences = [Sentence(self._steps, text) for text in (*self._beginnings(record), *self._changes(record))]
        sentences += [Sentence(self._steps, text, True) for text in (*self._waits(record), *self._writes(record))]
        sentences += [Sentence(self._steps, text) for text in self._ends(record)]
        self._before = _tables(record.blocks)
        return sentences

    def _beginnings(self, record: StepRecord) -> Iterator[str]:
        for victim in record.preempted:
            why = explain_preemption(victim, self._label)
            yield f"{self._label(victim.seq_id)} freed {_count(victim.blocks_freed)}, {why}"
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
            if owner in admitted:
                continue
            if before is None:
                forks.append(table)
            elif new := [block for block in table.blocks if block not in copied.union(before.blocks)]:
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
            blocks = f"{_count(sum(shared))} in their tables shared, none copied"
            yield f"{len(tables)} sequences began as forks: {blocks if any(shared) else 'all blocks copied'}"
            return
        for table, number in zip(tables, shared, strict=True):
            blocks = f"{_count(number)} shared, none copied" if number else "all blocks copied"
            yield f"{self._label(table.owner)} began as a fork: {blocks}"

    def _ends(self, record: StepRecord) -> Iterator[str]:
        tables = _tables(record.blocks)
        ended = [finish.seq_id for finish in record.finished if finish.seq_id in tables]
        held = {seq_id: len(tables[seq_id].blocks) for seq_id in ended}
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

    def _write(self, item: ItemRecord, table: TableRecord, block_size: int) -> str:
        first, last = item.start, item.start + item.num_tokens - 1
        if first == last:
            block, slot = table.blocks[first // block_size], first % block_size
            where = f"token {count(first + 1)} into block {block}, slot {slot}"
        else:
            blocks = table.blocks[first // block_size : last // block_size + 1]
            where = f"tokens {count(first + 1)} to {count(last + 1)} into {_blocks(blocks)}"
        return f"{self._label(item.seq_id)} wrote {where}"


def _tables(block_map: BlockMap | None) -> dict[int, TableRecord]:
    """Return each sequence's table."""
    return {} if block_map is None else {table.owner: table for table in block_map.tables if not table.is_snapshot}


def _blocks(blocks: Sequence[int]) -> str:
    """Format blocks as `block 7`, `blocks 0 1 2`, `blocks 0 1 2 … 127`."""
    shown = list(map(str, blocks)) if len(blocks) <= 8 else [*map(str, blocks[:4]), "…", str(blocks[-1])]
    return f"{'block' if len(blocks) == 1 else 'blocks'} {' '.join(shown)}"


def _count(number: int) -> str:
    return plural(number, "block")


QUESTION = "Where does every token's key and value live?"
LOG = 200
"""Sentences that are remembered."""
PICTURE_ROWS = 16
"""Rows of the map, and of the tables, in a picture that stays."""
PICTURE_SENTENCES = 14
_TALL = 30
"""Lines of a terminal from which on more of the past, and more texts, are shown."""


class BlockScreen:
    """What there is to see: kept up to date step by step, drawn at any size."""

    def __init__(self, question: str = QUESTION, keeps: bool = False):
        """keeps: sequences that end keep their blocks, as a conversation does between turns."""
        self.question = question
        self.since: CacheStats | None = None
        """The cache before the run, if it was not new: what it had counted by then is not this run's."""
        self.names = SequenceNames()
        self.sentences: deque[Sentence] = deque(maxlen=LOG)
        """Sentences about what was out of the ordinary, oldest first."""
        self.latest: list[Sentence] = []
        """All about the last step."""
        self.steps = 0
        self.record: StepRecord | None = None
        self.fullest: tuple[int, StepRecord] | None = None
        """The step that used the most blocks, of equals the last one; its number and its record."""
        self.split: tuple[int, StepRecord] | None = None
        """The first step in which a shared block was copied because a sequence wrote into it."""
        self.streams = TextStreams()
        self._story = BlockStory(self.names, keeps)

    def feed(self, record: StepRecord) -> list[Sentence]:
        """Take a step in; returns what it did, in words."""
        if self.since is not None:
            record = replace(record, cache=_counted_since(record.cache, self.since))
        self.steps += 1
        self.record = record
        if self.fullest is None or record.cache.used_blocks >= self.fullest[1].cache.used_blocks:
            self.fullest = self.steps, record
        if self.split is None and any(isinstance(event, BlockSplit) for event in record.events):
            self.split = self.steps, record
        self.streams.feed(record)
        self.latest = self._story.tell(record)
        self.sentences.extend(sentence for sentence in self.latest if not sentence.routine)
        return self.latest

    def frame(self, width: int, height: int) -> list[Text]:
        """Draw the last step, in no more than `height` lines."""
        record = self.record
        assert record is not None and record.blocks is not None, "a step with its blocks was fed before"
        facts = flowing(cache_facts(record.cache), width)
        texts, sentences = (2, 4) if height >= _TALL else (1, 3)
        room = height - len(facts) - 6 - texts - sentences
        tables = table_lines(record.blocks, self.names, width, max(2, min(len(record.blocks.tables), room - 4)))
        pool = pool_lines(record.blocks, self.names, width, max(2, room - len(tables)))
        lines = [_title(self.question, self.steps, record, width), Text(""), *pool, legend_line(width), Text("")]
        lines += [*tables, Text(""), *facts, Text(""), *self._log(width, sentences)]
        return [*lines, *self._texts(width, texts)][:height]

    def picture(self, width: int, moment: tuple[int, StepRecord] | None = None) -> list[Text]:
        """Draw one step (default: the one with most blocks in use), with its tables."""
        if self.fullest is None:
            return [Text("no step ran")]
        step, record = moment or self.fullest
        assert record.blocks is not None
        return [
            _title(self.question, step, record, width),
            Text(""),
            *pool_lines(record.blocks, self.names, width, PICTURE_ROWS, hide_free=True),
            legend_line(width),
            Text(""),
            *table_lines(record.blocks, self.names, width, PICTURE_ROWS),
            Text(""),
            *flowing(cache_facts(record.cache), width),
        ]

    def story_lines(self, width: int) -> list[Text]:
        """Return the sentences of the run: the first ones and the last ones where there are many."""
        lines = [_sentence(sentence, width) for sentence in self.sentences]
        if len(lines) > PICTURE_SENTENCES:
            half = PICTURE_SENTENCES // 2
            lines[half:-half] = [Text(f"… {count(len(lines) - 2 * half)} more", QUIET)]
        return lines

    def _log(self, width: int, rows: int) -> list[Text]:
        """Return the latest sentences, the last step's at the bottom and bright."""
        now = self.latest
        if len(now) > rows:
            now = [sentence for sentence in now if not sentence.routine][:rows]
        before = [sentence for sentence in self.sentences if sentence.step < self.steps][-rows:][len(now) :]
        lines = [_sentence(sentence, width, QUIET) for sentence in before]
        lines += [_sentence(sentence, width) for sentence in now]
        return lines + [Text("")] * (rows - len(lines))

    def _texts(self, width: int, rows: int) -> list[Text]:
        """Return the end of what the latest sequences say."""
        return [
            Text.assemble((f"{number} ", sequence_style(number)), _end_of(text, width - 4), no_wrap=True)
            for number, text in list(enumerate(self.streams.texts))[-rows:]
        ]


def _counted_since(cache: CacheRecord, since: CacheStats) -> CacheRecord:
    counters = ("prefix_queries", "prefix_hits", "splits", "evictions")
    return replace(cache, **{name: getattr(cache, name) - getattr(since, name) for name in counters})


class BlocksView(LiveView):
    """Feeds a screen with every step. On a terminal the frame of each stands in the place of the one before; at a
    `pace` other than 0 every frame is drawn, so many a second."""

    def __init__(self, console: Console, screen: BlockScreen, pace: float, quiet: bool = False):
        super().__init__(console, quiet)
        self.screen, self._pace = screen, pace
        self.frames_per_second = pace or LiveView.frames_per_second

    def step(self, record: StepRecord) -> None:
        self.screen.feed(record)
        self.redraw()
        if self._shows and self._pace:
            time.sleep(max(0.0, self._next_frame - time.monotonic()))

    def frame(self) -> Group:
        width, height = self._console.size
        return Group(*self.screen.frame(width, height - 1))


class BlockGeneration(BlocksView):
    """`forge generate --show blocks`: the steps as they happen, then the text, the fullest step, the figures."""

    def __init__(self, console: Console, prompt: str, echo: bool, pace: float):
        super().__init__(console, BlockScreen(), pace)
        self._prompt, self._echo = prompt if echo or self._shows else "", echo

    def step(self, record: StepRecord) -> None:
        super().step(record)
        if not self._shows:
            self._console.print(Text(step_line(self.screen)), soft_wrap=True)

    def finish(self, result: RunResult) -> None:
        self.close()
        console, width = self._console, self._console.width
        for text in sample_texts(result, self._prompt, quiet_prompt=self._shows and not self._echo):
            if text.plain:
                console.print()
                console.print(text, soft_wrap=not self._shows)
        draw(console, [None, *self.screen.picture(width), None])
        if self._shows:
            draw(console, [*self.screen.story_lines(width), None, *metrics_lines(result, width)])
        else:
            draw(console, map(Text, plain_metrics(result)))


class JsonGeneration(RunView):
    """`forge generate --json`: one object at the end, with every step's blocks if they are shown."""

    def __init__(self, console: Console, prompt: str, token_text: Callable[[int], str], shows_blocks: bool):
        self._console, self._prompt, self._token_text, self._shows_blocks = console, prompt, token_text, shows_blocks
        self._screen, self._blocks = BlockScreen(), list[dict[str, Any]]()

    def step(self, record: StepRecord) -> None:
        if record.blocks is not None:
            self._blocks.append(blocks_object(record, self._screen.feed(record), self._screen.names))

    def finish(self, result: RunResult) -> None:
        shown = run_object(result, self._token_text) | {"prompt": self._prompt}
        if self._shows_blocks:
            shown["blocks"] = self._blocks
        self._console.print(to_json(shown), soft_wrap=True)


def blocks_object(record: StepRecord, sentences: Sequence[Sentence], names: SequenceNames) -> dict[str, Any]:
    """Return a step's blocks for `--json`. Sequences are numbered as on the screen."""
    block_map, cache = record.blocks, record.cache
    assert block_map is not None
    return {
        **picked(cache, "used_blocks", "cached_blocks", "free_blocks", "internal_fragmentation", "sharing"),
        "tables": [
            {
                "sequence": None if table.is_snapshot else names.number(table.owner),
                "snapshot": table.owner if table.is_snapshot else None,
                "blocks": list(table.blocks),
                "reference_counts": [block_map.reference_counts[block] for block in table.blocks],
                "tokens": table.computed,
            }
            for table in block_map.tables
        ],
        "cached": list(block_map.cached),
        "written": list(block_map.written),
        "sentences": [sentence.text for sentence in sentences],
    }


def step_line(screen: BlockScreen) -> str:
    """Format a step as `step  41  used 10  cached 0  free 54  fragmentation 6.2 %  seq 0 took block 13; seq 0 wrote
    token 57 …`."""
    assert screen.record is not None, "a step was fed before"
    cache = screen.record.cache
    cached = f"  cached {cache.cached_blocks:>3}" if cache.kind == "prefix" else ""
    figures = f"used {cache.used_blocks:>3}{cached}  free {cache.free_blocks:>3}"
    texts = "; ".join(sentence.text for sentence in screen.latest)
    empty = share(cache.internal_fragmentation)
    return f"step {screen.steps:>3}  {figures}  fragmentation {empty:>6}  {texts}".rstrip()


def _title(question: str, step: int, record: StepRecord, width: int) -> Text:
    """Return the question on the left, and on the right when and of what, as far as there is room."""
    cache = record.cache
    now, blocks = f"step {count(step)}", plural(cache.num_blocks, "block")
    described = f"{now} · kv {cache.kind} · block size {cache.block_size} · {blocks}"
    return heading(question, TITLE, (described, f"{now} · {blocks} of {cache.block_size}", now), width)


def legend_line(width: int) -> Text:
    return Text(LEGEND if len(LEGEND) <= width else LEGEND[: width - 1] + "…", QUIET)


def _sentence(sentence: Sentence, width: int, style: str = "") -> Text:
    line = Text.assemble((f"step {sentence.step:>3}  ", QUIET), (sentence.text, style or "default"), no_wrap=True)
    return cut(line, width)


def _end_of(text: str, width: int) -> str:
    return tail(" ".join(neutralise(text).split()), width - 1)
