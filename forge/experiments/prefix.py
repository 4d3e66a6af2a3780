"""5. Prefix reuse: what was computed once serves all that begin alike.

[dim]forge prefix --only run --branches 5 --requests 8[/dim]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.arrivals import WatchedRun, arriving, drive_arrivals, same_tokens, watch_arrivals, whole
from forge.cli.chapters import Experiment, experiment
from forge.cli.options import OutputArgs
from forge.cli.run_control import create_llm, forget_prefixes
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import option
from forge.trace.records import BlockEvicted, BlockSplit, PrefixHit, StepRecord
from forge.views.blocks import BlockScreen
from forge.views.formatting import count, plural
from forge.views.json_output import as_object, picked
from forge.views.metrics import verdict
from forge.views.palette import QUIET, sequence_style
from forge.views.screen import Part, Report, fill, leads_on, question, report, sentences, sides
from forge.views.summary import RunResult
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
_BAR, _EVICTIONS = 40, 4
_SHOWN = 160
"""Characters of a text that are worth seeing."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of continuations and requests, and where the continuations branch."""

    branches: int = option(3, "Ways in which the story goes on; 0 leaves it out.", _SIZES)
    branch_at: int | None = option(
        None,
        "Output tokens that the branches share with the story.",
        _SIZES,
        shown="half of it, to the middle of a block",
    )
    requests: int = option(4, "Requests that share the rubric.", _SIZES)
    rubric: str | None = option(None, "A file with the text that they share.", "Prompt")
    snapshot: bool = option(False, "What a snapshot of the story's cache holds and shares.", "Prompt")


@experiment(bugs=True)
def prefix(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = STORY_TOKENS,
    *,
    sizes: Sizes,
    engine: Annotated[EngineArgs, Takes("model device threads block_size num_blocks", kv="prefix", num_blocks=64)],
    output: Annotated[OutputArgs, Takes("pace", pace=PACE)],
    json: options.JsonOption = False,
) -> Experiment:
    branches, branch_at, requests = sizes.branches, sizes.branch_at, sizes.requests
    for name, value, least in (("--branches", branches, 0), ("--requests", requests, 2), ("MAX_TOKENS", max_tokens, 4)):
        if value < least:
            raise UsageError(f"{name} is at least {least}, and {value} is less")
    if branch_at is not None and not 0 < branch_at < max_tokens:
        raise UsageError(f"--branch-at is between 1 and {max_tokens - 1}, a place in the story, and {branch_at} is not")
    engine = replace(engine, max_num_seqs=max(16, branches + 1, requests))
    shared = RUBRIC if sizes.rubric is None else options.read_text(sizes.rubric)

    def run() -> Report:
        text, llm = options.read_prompt(prompt), create_llm(engine)
        place = branch_at or _middle_of_a_block(len(llm.tokenizer.encode(text)), max_tokens, engine.block_size)
        if sizes.snapshot:
            from forge.experiments.snapshot import snapshot_report

            return snapshot_report(llm, text, max_tokens, place)
        fork = _fork_story(llm, text, max_tokens, branches, place, output.pace, json) if branches else None
        texts = [shared + QUESTIONS[number % len(QUESTIONS)] for number in range(requests)]
        with_index = _share_rubric(llm, texts, output.pace, json)
        alone = _share_rubric(create_llm(engine, kv="paged"), texts, 0.0, quiet=True)
        facts = prefix_object(text, fork, len(llm.tokenizer.encode(shared)), alone, with_index)
        return report(facts, lambda: screen(facts, fork, alone, with_index))

    return Experiment(run, alone=sizes.snapshot or not branches)


def _fork_story(
    llm: "LLM", prompt: str, max_tokens: int, branches: int, place: int, pace: float, quiet: bool
) -> "Fork":
    """Run a story, and start others with the same beginning when it is a little past the branching point."""
    first = arriving(llm, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0)
    story = whole(drive_arrivals(llm, [first])).outputs[0]  # what it will say
    beginning = [*story.prompt_token_ids, *story.outputs[0].token_ids[:place]]
    drawn = SamplingParams(max_tokens=max(1, max_tokens - place), temperature=0.9, seed=6, n=branches, ignore_eos=True)
    arrivals = [first, arriving(llm, beginning, drawn, min(place + LEAD, max_tokens - 1))]
    forget_prefixes(llm)
    screen = BlockScreen(FORK_QUESTION)
    result = watch_arrivals(llm, arrivals, screen, pace, quiet)
    forget_prefixes(llm)
    return Fork(screen, result, place, llm.tokenizer.decode(beginning))


def _middle_of_a_block(start: int, max_tokens: int, block_size: int) -> int:
    """Return about half of the story; if that shares only whole blocks, half a block more or less.

    The last of the tokens that are shared is computed anew, for its logits.
    """
    place = max(1, max_tokens // 2)
    offset = (start + place - 1) % block_size
    shifted = place + block_size // 2 - offset
    return shifted if 0 < shifted < max_tokens - 1 else place


def _share_rubric(llm: "LLM", texts: list[str], pace: float, quiet: bool) -> WatchedRun:
    """Run requests that arrive one step after another, once to be shown and once to be timed."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    arrivals = [arriving(llm, text, params, step) for step, text in enumerate(texts)]
    return WatchedRun.of(llm, arrivals, RUBRIC_QUESTION, pace, quiet)


@dataclass(frozen=True)
class Fork:
    """A story, and others that start with its first tokens while it still runs."""

    screen: BlockScreen
    result: RunResult
    branch_at: int
    """Output tokens of the story that the branches begin with."""
    beginning: str
    """The text that they begin with."""

    @property
    def hit(self) -> PrefixHit | None:
        """The branches' cache hit."""
        return next((event for event in self._events if isinstance(event, PrefixHit)), None)

    @property
    def splits(self) -> list[BlockSplit]:
        return [event for event in self._events if isinstance(event, BlockSplit)]

    @property
    def tokens_without(self) -> int:
        """The tokens that would have been computed had every branch computed its beginning."""
        branches = self.result.outputs[1]
        branch_tokens = sum(len(sample.token_ids) - 1 for sample in branches.outputs)
        story = self.result.outputs[0]
        alone = len(story.prompt_token_ids) + len(story.outputs[0].token_ids) - 1
        return alone + len(branches.outputs) * len(branches.prompt_token_ids) + branch_tokens

    @property
    def _events(self):
        return [event for record in self.result.records for event in record.events]


@dataclass(frozen=True)
class Eviction:
    """A cached block that was evicted, and its place in the last table that had it."""

    step: int
    block: int
    seq_id: int
    place: int
    """Counted from 1."""
    num_full: int
    """The full blocks of that table: only these are cached."""


_EVICTED = (
    "step {step:>3}  block {block} evicted: number {place} of the {num_full:plural full block} that seq {seq_id} had"
)


def evictions(records: Sequence[StepRecord]) -> list[Eviction]:
    """Return the evictions of a run that was recorded with its blocks."""
    had: dict[int, tuple[int, int, int]] = {}
    found = []
    for step, record in enumerate(records, start=1):
        evicted = [event.block for event in record.events if isinstance(event, BlockEvicted)]
        found += [Eviction(step, block, *had[block]) for block in evicted if block in had]
        for table in record.blocks.tables if record.blocks is not None else ():
            num_full = table.computed // record.cache.block_size
            had |= {block: (table.owner, place, num_full) for place, block in enumerate(table.blocks, start=1)}
    return found


def prefix_object(
    prompt: str, fork: Fork | None, rubric_tokens: int, alone: WatchedRun, shared: WatchedRun
) -> dict[str, Any]:
    """Return the experiment as facts. fork: None if no branch was requested. alone: the run with `paged`, in which
    every request computes the rubric. shared: the run with `prefix`."""
    return {
        "model": shared.timed.label.model,
        "prompt": prompt,
        "block_size": shared.figures.block_size,
        "num_blocks": shared.figures.num_blocks,
        "story": None if fork is None else _fork_object(fork),
        "rubric": {
            "tokens": rubric_tokens,
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
            "evicted": [as_object(eviction) for eviction in evictions(shared.watched.records)],
            "fewer_tokens": alone.timed.tokens_computed / shared.timed.tokens_computed,
        },
        "identical": same_tokens(alone, shared),
    }


def _fork_object(fork: Fork) -> dict[str, Any]:
    story, branches = fork.result.outputs
    return {
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
        "most_blocks_saved": max(record.cache.blocks_saved for record in fork.result.records),
        "tokens_computed": fork.result.tokens_computed,
        "tokens_without_sharing": fork.tokens_without,
    }


def _run_object(run: WatchedRun) -> dict[str, Any]:
    timed = picked(run.timed, "tokens_computed", "time_to_first_token_ms", "milliseconds")
    return run.figures.as_object() | timed


def screen(facts: dict[str, Any], fork: Fork | None, alone: WatchedRun, shared: WatchedRun) -> Iterator[Part]:
    """Draw the fork with the moment of its first split, then the rubric request by request, then both caches."""
    if fork is not None:
        yield from (*_fork_parts(fork), None)
    yield from (*_rubric_parts(facts, alone, shared), leads_on(LEADS_ON))


def _fork_parts(fork: Fork) -> Iterator[Part]:
    yield lambda width: [*fork.screen.picture(width, fork.screen.split), None, *fork.screen.story_lines(width), None]
    yield _clean(fork.beginning)
    texts = [fork.result.outputs[0].outputs[0].text, *(sample.text for sample in fork.result.outputs[1].outputs)]
    prompt_length = len(fork.beginning) - len(fork.result.outputs[0].prompt or "")
    for number, text in enumerate((texts[0][prompt_length:], *texts[1:])):
        line = Text.assemble((f"  {number} ", sequence_style(number)), f"…{_clean(text)}", no_wrap=True)
        line.overflow = "ellipsis"
        yield line
    yield from (None, *sentences(fork_sentences(fork)))


def fork_sentences(fork: Fork) -> list[str]:
    """Say what the branches shared, and what was copied."""
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


def _rubric_parts(facts: dict[str, Any], alone: WatchedRun, shared: WatchedRun) -> Iterator[Part]:
    requests = plural(len(shared.timed.outputs), "request")
    same = f"that begin with the same {count(facts['rubric']['tokens'])} tokens"
    yield from question(RUBRIC_QUESTION, f"{requests}, one step after another, {same}")
    yield lambda width: _request_lines(shared, min(_BAR, max(8, width - 44)))
    first, second = (run.timed.time_to_first_token_ms for run in (alone, shared))
    gains = {"first token, median": first / second if first is not None and second else None}
    if evicted := evictions(shared.watched.records):
        yield from (None, *sentences(fill(_EVICTED, eviction) for eviction in evicted[:_EVICTIONS]))
    yield from (None, sides(NAMES, (alone, shared), *_ROWS, gains=gains), None)
    told = plural(sum(map(len, shared.timed.token_ids)), "token")
    yield verdict(facts["identical"], f"{told} of {requests}", "the answers differ")


def _request_lines(shared: WatchedRun, width: int) -> Iterator[Text]:
    """Draw each prompt's cached and computed tokens."""
    every = [output.metrics for output in shared.timed.outputs]
    longest = max(metrics.num_prompt_tokens for metrics in every)
    for number, metrics in enumerate(every):
        drawn, reused = (
            round(tokens / longest * width) for tokens in (metrics.num_prompt_tokens, metrics.tokens_cached)
        )
        yield Text.assemble(
            (f"request {number + 1}  ", sequence_style(number)),
            ("░" * reused, QUIET),
            ("█" * (drawn - reused), sequence_style(number)),
            f"  {count(metrics.num_prompt_tokens - metrics.tokens_cached):>4} computed",
            (f"  {count(metrics.tokens_cached):>4} found", QUIET),
            no_wrap=True,
        )


_ROWS = (
    "tokens computed: {timed.tokens_computed:count}",
    "prompt tokens found: {figures.hit_rate:share}",
    "first token, median: {timed.time_to_first_token_ms:ms ms}",
    "all steps: {timed.milliseconds:ms ms}",
    "blocks used at once: {figures.most_blocks:count}",
    "blocks saved at once: {figures.most_blocks_saved:count}",
    "copied on write: {figures.copy_on_write:count}",
    "evicted: {figures.evictions:count}",
)


def _clean(text: str) -> str:
    return one_line(neutralise(tail(text, _SHOWN))).strip("\ufffd")  # half a character where a text was cut
