"""4. The cache as virtual memory: a pool of blocks instead of one run per sequence.

[dim]forge paged --only run --num-blocks 96 --sequences 16[/dim]
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.arrivals import WatchedRun, arriving, same_tokens
from forge.cli.chapters import Experiment, experiment
from forge.cli.options import OutputArgs
from forge.cli.run_control import create_llm
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.views.block_map import pool_lines
from forge.views.blocks import legend_line
from forge.views.formatting import plural, share, size
from forge.views.metrics import verdict
from forge.views.palette import QUIET, TITLE
from forge.views.screen import Part, Report, leads_on, question, report, sentences, sides
from forge.views.text import one_line, tail

if TYPE_CHECKING:
    from forge.llm import LLM
    from forge.workload.requests import Request

LENGTHS = (0.5, 0.06, 0.25, 0.9, 0.12, 0.4)
"""Lengths that the stories grow to, as shares of the longest possible; in turn, over and over."""
ARRIVE_EVERY = 3
"""Steps between one story and the next."""
PACE = 40.0
QUESTION = "How many stories fit into the same memory?"
LEADS_ON = "One prompt, block by block:\n  forge generate --kv paged --num-blocks 64 --show blocks --n 3 Once"
NAMES = ("basic", "paged")
_MAP_ROWS = 8


@experiment(bugs=True)
def paged(
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    sequences: Annotated[
        int, typer.Option("--sequences", help="Stories, of different lengths.", rich_help_panel="Sizes")
    ] = 12,
    *,
    engine: Annotated[
        EngineArgs,
        Takes("model device threads block_size num_blocks max_model_len", kv="paged", num_blocks=64, max_model_len=256),
    ],
    output: Annotated[OutputArgs, Takes("pace", pace=PACE)],
    json: options.JsonOption = False,
) -> Experiment:
    if sequences < 1:
        raise UsageError(f"--sequences is at least 1, and {sequences} is less")
    return Experiment(lambda: _measure(options.read_prompt(prompt), sequences, engine, output.pace, json))


def _measure(prompt: str, sequences: int, engine: EngineArgs, pace: float, quiet: bool) -> Report:
    runs: dict[str, WatchedRun] = {}
    for kind in NAMES:
        llm = create_llm(engine, kv=kind, max_num_seqs=sequences)
        runs[kind] = WatchedRun.of(llm, _stories(llm, prompt, sequences), QUESTION, pace, quiet)
    facts = paged_object(prompt, llm.max_model_len, llm.kv_layout.bytes_per_token, runs)
    return report(facts, lambda: screen(runs, facts))


def _stories(llm: "LLM", prompt: str, sequences: int) -> "list[Request]":
    """Make requests that grow to different lengths and arrive one after another."""
    room = llm.max_model_len - len(llm.tokenizer.encode(prompt))
    stories = []
    for story in range(sequences):
        length = max(1, int(room * LENGTHS[story % len(LENGTHS)]))
        params = SamplingParams(max_tokens=length, temperature=0.8, seed=story, ignore_eos=True)
        stories.append(arriving(llm, prompt, params, story * ARRIVE_EVERY))
    return stories


def paged_object(
    prompt: str, max_model_len: int, bytes_per_token: int, runs: Mapping[str, WatchedRun]
) -> dict[str, Any]:
    """Return the experiment as facts. max_model_len: the tokens that the contiguous cache reserves for each story."""
    basic, paged = (_run_object(runs[name]) for name in NAMES)
    stories, figures = runs["paged"].watched, runs["paged"].figures
    lengths = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in stories.outputs]
    return {
        "prompt": prompt,
        "model": stories.label.model,
        "sequences": len(lengths),
        "lengths": lengths,
        "shortest": min(lengths),
        "longest": max(lengths),
        "max_model_len": max_model_len,
        "block_size": figures.block_size,
        "num_blocks": figures.num_blocks,
        "pool_bytes": figures.num_blocks * figures.block_size * bytes_per_token,
        "blocks_per_run": -(-max_model_len // figures.block_size),
        "identical": same_tokens(*runs.values()),
        "basic": basic,
        "paged": paged,
        "more_at_once": paged["most_running"] / basic["most_running"],
        "fewer_steps": basic["steps"] / paged["steps"],
        "speed_up": paged["tokens_per_second"] / basic["tokens_per_second"],
    }


def _run_object(run: WatchedRun) -> dict[str, Any]:
    """Return one run of all stories in one kind of cache as facts. What is said of steps is of the watched run."""
    records = run.watched.records
    return run.figures.as_object() | {
        "most_running": max(len(record.items) for record in records),
        "most_tokens_held": max(record.cache.tokens_held for record in records),
        "steps": len(run.timed.records),
        "steps_with_waiting": sum(bool(record.queues.waiting) for record in records),
        "preempted": sum(len(record.preempted) for record in records),
        "tokens_per_second": sum(map(len, run.timed.token_ids)) / run.timed.seconds,
        "tokens_computed": run.timed.tokens_computed,
        "milliseconds": run.timed.milliseconds,
    }


def screen(runs: Mapping[str, WatchedRun], facts: dict[str, Any]) -> Iterator[Part]:
    """Draw both pools at their fullest, the figures side by side, and sentences on them."""
    stories = f"{plural(facts['sequences'], 'story', 'stories')} of {facts['shortest']} to {facts['longest']} tokens"
    pool = f"{plural(facts['num_blocks'], 'block')} of {facts['block_size']} tokens, {size(facts['pool_bytes'])}"
    yield from question(QUESTION, f"{stories} · {pool}", one_line(tail(facts["prompt"], 200)))
    for name, run in runs.items():
        assert run.screen.fullest is not None, "at least one step ran"
        step, record = run.screen.fullest
        assert record.blocks is not None
        yield Text.assemble((name, TITLE), (f"  at its fullest, step {step}", QUIET))
        blocks, names = record.blocks, run.screen.names
        yield partial(pool_lines, blocks, names, max_rows=_MAP_ROWS)
        yield None
    gains = {"stories at once": facts["more_at_once"], "speed": facts["speed_up"]}
    yield from (lambda width: [legend_line(width)], None)
    yield from (sides(NAMES, [facts[name] for name in NAMES], *_ROWS, gains=gains), None)
    yield from sentences(paged_sentences(facts))
    told = plural(sum(map(len, runs["paged"].timed.token_ids)), "token")
    yield verdict(facts["identical"], f"{told} of {facts['sequences']} stories", "the stories differ")
    yield leads_on(LEADS_ON)


_ROWS = (
    "stories at once: {most_running:count}",
    "tokens held at once: {most_tokens_held:count}",
    "blocks used at once: {most_blocks:count}",
    "reserved and empty: {internal_fragmentation:share}",
    "steps: {steps:count}",
    "of them with a queue: {steps_with_waiting:count}",
    "preempted: {preempted:count}",
    "all steps: {milliseconds:ms ms}",
    "speed: {tokens_per_second:rate tok/s}",
)


def paged_sentences(facts: dict[str, Any]) -> list[str]:
    """Say in sentences what the figures show."""
    basic, paged = facts["basic"], facts["paged"]
    queued = f", and in {plural(basic['steps_with_waiting'], 'step')} others waited for it"
    return [
        f"Basic sets {facts['blocks_per_run']} blocks aside for a story when it begins, however short it will be: "
        f"{share(basic['internal_fragmentation'])} of what was reserved stayed empty"
        f"{queued if basic['steps_with_waiting'] else ''}.",
        f"Paged takes a block when a token needs one, wherever it is free: {share(paged['internal_fragmentation'])} "
        f"empty, less than {plural(facts['block_size'], 'slot')} per story.",
    ]
