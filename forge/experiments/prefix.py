"""5. Prefix reuse: what was computed once serves all that begin alike.

[dim]forge prefix --only run --branches 5 --requests 8[/dim]
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.arrivals import Arrival, WatchedRun, drive_arrivals, watch_arrivals, whole
from forge.cli.bugs import BugOption, run_bug
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.options import OutputArgs
from forge.cli.run_control import Found, forget_prefixes, load_model
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import option
from forge.trace.records import BlockSplit, PrefixHit
from forge.views.blocks import BlockScreen
from forge.views.comparison_rows import Row, milliseconds, row, two_sided_table
from forge.views.formatting import NOTHING, count, plural, share, times
from forge.views.json_output import as_object
from forge.views.metrics import verdict
from forge.views.palette import ACCENT, QUIET, TITLE, sequence_style
from forge.views.report import Report
from forge.views.summary import RunsResult
from forge.views.terminal import print_lines, print_table
from forge.views.text import neutralise, one_line, tail

if TYPE_CHECKING:
    from forge.llm import LLM

_SIZES = "Sizes"
STORY_TOKENS = 48
LEAD = 6
"""Tokens by which the story is past the branching point when the branches come."""
ANSWER_TOKENS = 12
PACE = 8.0
RUBRIC = (
    "You read a story and then answer a question about it. Answer with one word, and take it from the story. "
    "The story: The fox lived in a den under an old oak, and every evening a little turtle came to visit. One day the "
    "turtle lent the fox a lantern. The fox took it to the bridge to show it to the birds, but a storm came, and the "
    "lantern fell into the river. The fox told the truth, and the turtle forgave him.\n"
)
QUESTIONS = (
    "Question: Who came to visit? Answer:",
    "Question: What fell into the river? Answer:",
    "Question: Where did the fox live? Answer:",
    "Question: Who told the truth? Answer:",
)
FORK_QUESTION = "What does a story cost that begins as another did?"
RUBRIC_QUESTION = "What does a rubric cost that every request begins with?"
LEADS_ON = "Your own prompts, one to a line:\n  forge compare --kv paged vs prefix --prompts FILE"
NAMES = ("paged", "prefix")
_BAR = 40
_SHOWN = 160
"""Characters of a text that are worth seeing."""


@dataclass(frozen=True)
class Sizes:
    """How many, and where."""

    branches: int = option(3, "Ways in which the story goes on.", _SIZES)
    branch_at: int | None = option(
        None,
        "Output tokens that the branches share with the story.",
        _SIZES,
        shown="half of it, to the middle of a block",
    )
    requests: int = option(4, "Requests that share the rubric.", _SIZES)


@command
def prefix(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = STORY_TOKENS,
    *,
    sizes: Sizes,
    rubric: Annotated[
        str | None,
        typer.Option("--rubric", help="A file with the text that they share.", rich_help_panel="Prompt"),
    ] = None,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot", help="What a snapshot of the story's cache holds and shares.", rich_help_panel="Prompt"
        ),
    ] = False,
    engine: Annotated[EngineArgs, Takes("model device threads block_size num_blocks", kv="prefix", num_blocks=64)],
    output: Annotated[OutputArgs, Takes("pace json", pace=PACE)],
    only: OnlyOption = None,
    pause: PauseOption = True,
    bug: BugOption = None,
) -> Found:
    if bug is not None:
        return run_bug("prefix", bug, engine, output.json)
    branches, branch_at, requests = sizes.branches, sizes.branch_at, sizes.requests
    for name, value, least in (("--branches", branches, 1), ("--requests", requests, 2), ("MAX_TOKENS", max_tokens, 4)):
        if value < least:
            raise UsageError(f"{name} is at least {least}, and {value} is less")
    if branch_at is not None and not 0 < branch_at < max_tokens:
        raise UsageError(f"--branch-at is between 1 and {max_tokens - 1}, a place in the story, and {branch_at} is not")
    if reads_chapter(only, output.json or snapshot):
        return read_chapter(ctx, pause)
    text = options.read_prompt(prompt)
    shared = RUBRIC if rubric is None else options.read_text(rubric)
    engine = replace(engine, max_num_seqs=max(16, branches + 1, requests))
    if snapshot:
        from forge.experiments.snapshot import snapshot_report

        llm = load_model(engine)
        start = len(llm.tokenizer.encode(text))
        place = branch_at if branch_at is not None else _middle_of_a_block(start, max_tokens, engine.block_size)
        report = snapshot_report(llm, text, max_tokens, place)
    else:
        report = _measure(text, max_tokens, branches, branch_at, shared, requests, engine, output)
    return report.as_json() if output.json else report


def _measure(
    prompt: str,
    max_tokens: int,
    branches: int,
    branch_at: int | None,
    rubric: str,
    requests: int,
    engine: EngineArgs,
    output: OutputArgs,
) -> Report:
    llm, pace, quiet = load_model(engine), output.pace, output.json
    fork = _fork_story(llm, prompt, max_tokens, branches, branch_at, pace, quiet)
    texts = [rubric + QUESTIONS[number % len(QUESTIONS)] for number in range(requests)]
    shared = _share_rubric(llm, texts, pace, quiet)
    alone = _share_rubric(load_model(engine, kv="paged"), texts, 0.0, quiet=True)
    experiment = PrefixExperiment(prompt, fork, len(llm.tokenizer.encode(rubric)), alone, shared)
    return Report(prefix_object(experiment), lambda console: print_prefix(console, experiment))


def _fork_story(
    llm: "LLM", prompt: str, max_tokens: int, branches: int, branch_at: int | None, pace: float, quiet: bool
) -> "Fork":
    """Let a story run, and others begin as it did when it is a little past the branching point."""
    greedy = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    story = whole(drive_arrivals(llm, [Arrival(prompt, greedy, 0)])).outputs[0]  # what it will say
    start = len(story.prompt_token_ids)
    place = branch_at if branch_at is not None else _middle_of_a_block(start, max_tokens, llm.engine.cache.block_size)
    beginning = [*story.prompt_token_ids, *story.outputs[0].token_ids[:place]]
    drawn = SamplingParams(max_tokens=max(1, max_tokens - place), temperature=0.9, seed=1, n=branches, ignore_eos=True)
    arrivals = [Arrival(prompt, greedy, 0), Arrival(beginning, drawn, min(place + LEAD, max_tokens - 1))]
    forget_prefixes(llm)
    screen = BlockScreen(FORK_QUESTION)
    result = watch_arrivals(llm, arrivals, screen, pace, quiet)
    forget_prefixes(llm)
    return Fork(screen, result, place, llm.tokenizer.decode(beginning))


def _middle_of_a_block(start: int, max_tokens: int, block_size: int) -> int:
    """About half of the story; where that shares only whole blocks, half a block further on or back.

    The last of the tokens that are shared is computed anew, for its logits.
    """
    place = max(1, max_tokens // 2)
    offset = (start + place - 1) % block_size
    shifted = place + block_size // 2 - offset
    return shifted if 0 < shifted < max_tokens - 1 else place


def _share_rubric(llm: "LLM", texts: list[str], pace: float, quiet: bool) -> WatchedRun:
    """Requests that come one step after another, once to be seen and then to be timed."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    arrivals = [Arrival(text, params, step) for step, text in enumerate(texts)]
    return WatchedRun.of(llm, arrivals, RUBRIC_QUESTION, pace, quiet)


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
class PrefixExperiment:
    """The results of `forge prefix`."""

    prompt: str
    fork: Fork
    rubric_tokens: int
    alone: WatchedRun
    """With `paged`: every request computes the rubric."""
    shared: WatchedRun
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
                {"sequence": fork.screen.names.number(split.seq_id), **as_object(split, without=("seq_id",))}
                for split in fork.splits
            ],
            "copies": len(fork.splits),
            "num_branches": len(branches.outputs),
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


def _run_object(run: WatchedRun) -> dict[str, Any]:
    return run.figures.as_object() | {
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
    missing = len(fork.result.outputs[1].prompt_token_ids) - fork.hit.num_tokens
    why = ", for its logits" if missing == 1 else ""
    copies = "block was copied" if len(fork.splits) == 1 else "blocks were copied"
    return [
        f"The branches found {plural(fork.hit.num_tokens, 'token')} of their beginning in "
        f"{plural(len(fork.hit.blocks), 'block')} of the story; the first of them computed "
        f"{plural(missing, 'more token')}{why}. {len(fork.splits)} {copies} because a sequence wrote into a block that "
        "it shared.",
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
    same = f"{plural(sum(map(len, shared.timed.token_ids)), 'token')} of {requests}"
    console.print(verdict(experiment.identical, same, "the answers differ"))


def _rows(*runs: WatchedRun) -> list[Row]:
    figures = [run.figures for run in runs]
    first = [run.timed.time_to_first_token_ms for run in runs]
    gained = times(first[0] / first[1]) if first[0] is not None and first[1] else NOTHING
    return [
        row("tokens computed", count, [run.timed.tokens_computed for run in runs]),
        row("prompt tokens found", share, [one.hit_rate for one in figures]),
        row("first token, median", milliseconds, first)._replace(ratio=gained),
        row("all steps", milliseconds, [run.timed.seconds * 1e3 for run in runs]),
        row("blocks used at once", count, [one.most_blocks for one in figures]),
        row("blocks saved at once", count, [one.most_blocks_saved for one in figures]),
        row("copied on write", count, [one.copy_on_write for one in figures]),
    ]


def _clean(text: str) -> str:
    return one_line(neutralise(tail(text, _SHOWN)))
