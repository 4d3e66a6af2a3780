"""The prefix chapter's experiment: a story forks in the middle of a block that both go on to write, and requests that
begin with the same rubric compute it once between them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.text import Text

from forge.trace.records import BlockSplit, PrefixHit
from forge.views.blocks import BlockScreen, print_lines
from forge.views.cache_figures import CacheFigures, cache_figures_object
from forge.views.comparison_rows import Row, milliseconds, row, two_sided_table
from forge.views.figures import NOTHING, count, plural, share, times
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE, sequence_style
from forge.views.summary import RunsResult
from forge.views.terminal import print_table
from forge.views.text import neutralise, one_line, tail

FORK_QUESTION = "What does a story cost that begins as another did?"
RUBRIC_QUESTION = "What does a rubric cost that everybody reads?"
LEADS_ON = "Your own prompts, one to a line:\n  forge compare --kv paged vs prefix --prompts FILE"
NAMES = ("paged", "prefix")
_BAR = 40
_SHOWN = 160
"""Characters of a text that are worth seeing."""


@dataclass(frozen=True)
class Fork:
    """A story, and others that begin with its first tokens while it goes on."""

    screen: BlockScreen
    result: RunsResult
    branch_at: int
    """Output tokens of the story that the branches begin with."""
    beginning: str
    """The text that they begin with."""

    @property
    def hit(self) -> PrefixHit | None:
        """What the branches found."""
        return next((event for event in self._events if isinstance(event, PrefixHit)), None)

    @property
    def splits(self) -> list[BlockSplit]:
        return [event for event in self._events if isinstance(event, BlockSplit)]

    @property
    def tokens_without(self) -> int:
        """What would have been computed if every branch had computed its beginning."""
        branches = self.result.outputs[1]
        own = sum(len(sample.token_ids) - 1 for sample in branches.outputs)
        story = self.result.outputs[0]
        alone = len(story.prompt_token_ids) + len(story.outputs[0].token_ids) - 1
        return alone + len(branches.outputs) * len(branches.prompt_token_ids) + own

    @property
    def most_saved(self) -> int:
        return max(record.cache.blocks_saved for record in self.result.records)

    @property
    def _events(self):
        return [event for record in self.result.records for event in record.events]


@dataclass(frozen=True)
class RubricRun:
    """The requests in one kind of cache."""

    screen: BlockScreen
    watched: RunsResult
    timed: RunsResult
    """The same with nobody watching, the fastest of a few times."""

    @cached_property
    def figures(self) -> CacheFigures:
        return CacheFigures.of(self.timed.records, self.timed.outputs)


@dataclass(frozen=True)
class PrefixExperiment:
    prompt: str
    fork: Fork
    rubric_tokens: int
    alone: RubricRun
    """With `paged`: everybody computes the rubric."""
    shared: RubricRun
    """With `prefix`."""

    @property
    def identical(self) -> bool:
        results = [result for run in (self.alone, self.shared) for result in (run.watched, run.timed)]
        return len({result.token_ids for result in results}) == 1


def prefix_object(experiment: PrefixExperiment) -> dict[str, Any]:
    """The experiment as facts."""
    fork, alone, shared = experiment.fork, experiment.alone, experiment.shared
    story, branches = fork.result.outputs
    return {
        "model": fork.result.label.model,
        "prompt": experiment.prompt,
        "block_size": shared.figures.block_size,
        "num_blocks": shared.figures.num_blocks,
        "story": {
            "text": story.outputs[0].text,
            "tokens": len(story.prompt_token_ids) + len(story.outputs[0].token_ids),
            "branch_at": fork.branch_at,
            "beginning": fork.beginning,
            "beginning_tokens": len(branches.prompt_token_ids),
            "branches": [sample.text for sample in branches.outputs],
            "hit_tokens": fork.hit.num_tokens if fork.hit else 0,
            "hit_blocks": list(fork.hit.blocks) if fork.hit else [],
            "splits": [
                {
                    "sequence": fork.screen.names.number(split.seq_id),
                    "source": split.source,
                    "destination": split.destination,
                    "references": split.references,
                }
                for split in fork.splits
            ],
            "most_blocks_saved": fork.most_saved,
            "tokens_computed": fork.result.tokens_computed,
            "tokens_without_sharing": fork.tokens_without,
        },
        "rubric": {
            "tokens": experiment.rubric_tokens,
            "requests": [
                {
                    "prompt_tokens": output.metrics.num_prompt_tokens,
                    "tokens_cached": output.metrics.tokens_cached,
                    "time_to_first_token_ms": output.metrics.time_to_first_token_ms,
                    "text": output.outputs[0].text,
                }
                for output in shared.timed.outputs
            ],
            "paged": _run_object(alone),
            "prefix": _run_object(shared),
            "hit_rate": shared.figures.hit_rate,
            "fewer_tokens": alone.timed.tokens_computed / shared.timed.tokens_computed,
        },
        "identical": experiment.identical,
    }


def _run_object(run: RubricRun) -> dict[str, Any]:
    return cache_figures_object(run.figures) | {
        "tokens_computed": run.timed.tokens_computed,
        "time_to_first_token_ms": run.timed.time_to_first_token_ms,
        "milliseconds": run.timed.seconds * 1e3,
    }


def print_prefix(console: Console, experiment: PrefixExperiment) -> None:
    """The fork with the moment of its first split, then the rubric request by request, then both caches."""
    _print_fork(console, experiment.fork)
    console.print()
    _print_rubric(console, experiment)
    console.print()
    console.print(Text(LEADS_ON, ACCENT))


def _print_fork(console: Console, fork: Fork) -> None:
    width = console.width
    print_lines(console, [*fork.screen.picture(width, fork.screen.split), Text("")])
    print_lines(console, [*fork.screen.story_lines(width), Text("")])
    console.print(Text(_clean(fork.beginning), QUIET))
    texts = [fork.result.outputs[0].outputs[0].text, *(sample.text for sample in fork.result.outputs[1].outputs)]
    own = len(fork.beginning) - len(fork.result.outputs[0].prompt or "")
    for number, text in enumerate((texts[0][own:], *texts[1:])):
        line = Text.assemble((f"  {number} ", sequence_style(number)), f"…{_clean(text)}", no_wrap=True)
        line.truncate(width, overflow="ellipsis")
        console.print(line)
    console.print()
    for sentence in fork_sentences(fork):
        console.print(Text(sentence))


def fork_sentences(fork: Fork) -> list[str]:
    """What the branches shared, and what was copied."""
    if fork.hit is None:
        return ["The branches found nothing: they begin with less than the story had computed of its first block."]
    computed, without = fork.result.tokens_computed, fork.tokens_without
    copies = len(fork.splits)
    return [
        f"The branches found {plural(fork.hit.num_tokens, 'token')} of their beginning in "
        f"{plural(len(fork.hit.blocks), 'block')} of the story and computed one, for its logits. "
        f"{plural(copies, 'block')} had to be copied, because somebody wrote where others read.",
        f"{count(computed)} tokens went through the model; without sharing it would have been {count(without)}.",
    ]


def _print_rubric(console: Console, experiment: PrefixExperiment) -> None:
    alone, shared = experiment.alone, experiment.shared
    console.print(Text(RUBRIC_QUESTION, TITLE))
    requests = plural(len(shared.timed.outputs), "request")
    heading = f"{requests}, one step after another, that begin with the same {count(experiment.rubric_tokens)} tokens"
    print_lines(console, [Text(heading, QUIET), Text("")])
    longest = max(output.metrics.num_prompt_tokens for output in shared.timed.outputs)
    bar = min(_BAR, max(8, console.width - 44))
    for number, output in enumerate(shared.timed.outputs):
        metrics = output.metrics
        drawn = round(metrics.num_prompt_tokens / longest * bar)
        found = round(metrics.tokens_cached / longest * bar)
        line = Text.assemble(
            (f"request {number + 1}  ", sequence_style(number)),
            ("░" * found, QUIET),
            ("█" * (drawn - found), sequence_style(number)),
            f"  {count(metrics.num_prompt_tokens - metrics.tokens_cached):>4} computed",
            (f"  {count(metrics.tokens_cached):>4} found", QUIET),
            no_wrap=True,
        )
        console.print(line)
    console.print()
    print_table(console, two_sided_table(NAMES, _rows(alone, shared)))
    console.print()
    if experiment.identical:
        tokens = sum(map(len, shared.timed.token_ids))
        console.print(Text.assemble(("✓ identical", GOOD), f": {plural(tokens, 'token')} of {requests}"))
    else:
        console.print(Text("✗ the answers differ", TROUBLE))


def _rows(*runs: RubricRun) -> list[Row]:
    figures = [run.figures for run in runs]
    first = [run.timed.time_to_first_token_ms for run in runs]
    gained = times(first[0] / first[1]) if first[0] is not None and first[1] else NOTHING
    return [
        row("tokens computed", count, [run.timed.tokens_computed for run in runs]),
        row("prompt tokens found", share, [one.hit_rate for one in figures]),
        row("first token, median", milliseconds, first)._replace(ratio=gained),
        row("all steps", milliseconds, [run.timed.seconds * 1e3 for run in runs]),
        row("blocks used at once", count, [one.most_blocks for one in figures]),
        row("blocks saved at once", count, [one.most_saved for one in figures]),
        row("copied on write", count, [one.splits for one in figures]),
    ]


def _clean(text: str) -> str:
    return one_line(neutralise(tail(text, _SHOWN)))
