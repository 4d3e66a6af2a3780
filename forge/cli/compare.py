"""`forge compare`: the same prompts on two sides that differ in one option. Same tokens? At what cost?"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli import options
from forge.cli.arguments import Takes, command, make, stated
from forge.cli.arrivals import arriving, drive_arrivals
from forge.cli.options import WORKLOAD, RequestArgs
from forge.cli.run_control import Found, create_llm, exit_status, run_label, warm_up
from forge.cli.versus import Versus, versus_of
from forge.engine.sampling_params import SamplingParams
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import option, settle
from forge.views.comparison import (
    ComparisonProgress,
    Side,
    compare_runs,
    comparison_object,
    comparison_screen,
    interrupted_screen,
    question_for,
)
from forge.views.screen import draw, report
from forge.views.terminal import open_console

if TYPE_CHECKING:
    import numpy as np

    from forge.trace.records import StepRecord

MANY = 32
"""Requests of a comparison that is about many and does not say how many."""
DIFFERENT = 1
"""The exit status when the two sides' tokens differ."""

CLASSES = {"generation": False, "prefill-only": True}
"""`--class`: whether a generation of one token is prefill-only."""
EVICTION = "--evict"
RETURNING = 4
"""Callers at once where the option is `--evict`: what others have cached is evicted between two of their requests."""
_JUDGING_QUESTIONS = {
    "--class": "What does a generation's life cost a request that wants one token?",
    "--prefix-planning": "What does it save when requests wait for what one of them computes?",
    EVICTION: "Which cached block should go, so that least is computed again?",
}
_WARM_UP = 2
"""Requests that are not timed."""


_OF_MANY = (
    "requests", "prompt_tokens", "output_tokens", "arrival", "workload", "batch", "max_num_batched_tokens",
    "chunked_prefill", "order", "preempt", "preemption",
)  # fmt: skip
"""Options that mean something for many requests alone."""


@dataclass(frozen=True)
class ManyArgs:
    """Options of a comparison that is about many requests, or several prompts."""

    prompts: str | None = option(
        None, "A file of prompts instead, one to a line. Each comes one step after the one before.", "Prompt"
    )
    output_tokens: str | None = option(None, "Tokens of each output: 64, or 8:64.", WORKLOAD, shown="MAX_TOKENS")
    batch: int | None = option(None, "Of many requests, how many run at once.", WORKLOAD)
    execution_class: str = option(
        "prefill-only",
        "Class of a request of one token: prefill-only, or generation.",
        WORKLOAD,
        flags="--class",
    )


@command
def compare(
    ctx: typer.Context,
    prompt: options.DefaultedPrompt = options.DEFAULT_PROMPT,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    *,
    sampling: Annotated[SamplingParams, Takes(without="max_tokens n logprobs prompt_logprobs", unmade=True)],
    engine_args: Annotated[EngineArgs, Takes(without="max_num_seqs prefill_only", unmade=True)],
    listed: Annotated[ManyArgs, Takes("prompts", unmade=True)],
    asked: Annotated[RequestArgs, Takes(without="max_tokens seed", unmade=True, requests=None, prompt_tokens="16:64")],
    many: Annotated[ManyArgs, Takes(without="prompts", unmade=True)],
    json: options.JsonOption = False,
) -> Found:
    """Run one prompt, or those of a file, on two sides that differ in one option, given as A vs B.

    A switch is given as --switch vs --no-switch, or --switch on vs off.

    With --requests, or an option of the scheduler, it runs many requests on either side.

    Every other option holds for both sides. Exit status 1 if the tokens differ.

    [dim]forge compare --kv off vs on "The fox and the lantern" 64[/dim]

    [dim]forge compare --kv paged vs prefix --prompts questions.txt[/dim]
    [dim]forge compare --class generation vs prefill-only --requests 64[/dim]

    [dim]forge compare --kv on --speculate off vs draft[/dim]
    """
    versus = versus_of(ctx)
    runs_many = any(options.was_given(ctx, option) for option in _OF_MANY)
    _settle(ctx, versus, runs_many)
    if versus.option in _JUDGING_QUESTIONS:
        return _compare_judging(ctx, versus)
    if runs_many:
        return _compare_many(ctx, versus)
    prompts = ctx.params["prompts"]
    if prompts is None:
        texts = [options.read_prompt(prompt)]
    else:
        texts, max_tokens = options.read_prompts(prompts), _number_alone(ctx, max_tokens)
    question = question_for(versus.option)
    console = open_console()
    sides: list[Side] = []
    with ComparisonProgress(console, question, versus.names, max_tokens, quiet=json) as progress:
        for name, values in zip(versus.names, (ctx.params, versus.right), strict=True):
            side = _run_side(name, {**values, "max_tokens": max_tokens}, texts, sides, progress.step_of)
            sides.append(side)
            if side.result.interrupted:
                break
    if sides[-1].result.interrupted:
        draw(console, interrupted_screen(sides))
        raise typer.Exit(exit_status(sides[-1].result))
    comparison = compare_runs(question, versus.option, *sides)
    shown = texts[0] if len(texts) == 1 else f"{len(texts)} prompts of {prompts}, each one step after the one before"
    status = 0 if comparison.identical else DIFFERENT
    return report(comparison_object(comparison), lambda: comparison_screen(comparison, shown), status)


def _settle(ctx: typer.Context, versus: Versus, runs_many: bool) -> None:
    """Give both sides the cache that they need, unless one was given, and take an option from the side where it means
    nothing. Raises `UsageError` for one that means nothing on both."""
    left, right, judges = ctx.params, versus.right, versus.option in _JUDGING_QUESTIONS
    more = {"planned": judges, "many": runs_many or judges}
    more["prompted"] = options.was_given(ctx, "prompt") and not _is_number_alone(ctx)
    speculates = any(side["speculate"] not in (None, "off") for side in (left, right))
    kv = "basic" if versus.option == "--kv-dtype" else None  # with the cache off nothing is kept between steps
    kv = "prefix" if judges else "paged" if runs_many or speculates else kv
    for side in (left, right):
        side["kv"] = side["kv"] or kv
    sides = [dict(side) | more for side in (left, right)]
    _, names, spelled = stated(ctx, left)
    settle(sides, names - {"prompts"} if judges else names, spelled)
    for side, settled in zip((left, right), sides, strict=True):
        side.update({name: settled[name] for name in side})


def _compare_judging(ctx: typer.Context, versus: Versus) -> Found:
    """Requests that begin alike: a file's, judge requests, or the prompt that was given. They come all at once, or a
    few at a time where the question is what stays cached between them. By default they have answers of one token."""
    from forge.views.progress import progress_line
    from forge.views.request_sets import judging_object, judging_screen, same_answers
    from forge.workload.judging import judge_prompts, returning_prompts, run_requests

    left, texts = ctx.params, None
    has_prompt = options.was_given(ctx, "prompt")
    max_tokens = left["max_tokens"] if has_prompt or options.was_given(ctx, "max_tokens") else 1
    if left["prompts"] is not None or left["requests"] is not None:
        max_tokens = _number_alone(ctx, max_tokens)
        texts = options.read_prompts(left["prompts"]) if left["prompts"] is not None else None
    elif has_prompt:
        texts = [options.read_prompt(left["prompt"])]
    for side in (left, versus.right):  # before anything is loaded
        _config(side)
    runs, labels, tokens = [], [], 0
    made_up, concurrency = (returning_prompts, RETURNING) if versus.option == EVICTION else (judge_prompts, None)
    with progress_line() as progress:
        for name, side in zip(versus.names, (left, versus.right), strict=True):
            progress(name)
            llm = create_llm(make(EngineArgs, {**side, "max_num_seqs": side["batch"]}, **_config(side)))
            prompts = (
                made_up(llm.tokenizer, side["requests"] or 64)
                if texts is None
                else [[*llm.tokenizer.encode(text)] for text in texts]
            )
            run_requests(llm.new_engine(), prompts[:_WARM_UP], max_tokens)
            runs.append(run_requests(llm.engine, prompts, max_tokens, concurrency))
            labels.append(run_label(llm))
            tokens = sum(map(len, prompts))
    return report(
        {"option": versus.option, **judging_object(labels[0], versus.names, runs, tokens)},
        lambda: judging_screen(_JUDGING_QUESTIONS[versus.option], labels[0], versus.names, runs, tokens, concurrency),
        0 if same_answers(runs) else DIFFERENT,
    )


def _config(side: Mapping[str, Any]) -> dict[str, bool]:
    """Return the options that `--class` means for a scheduler."""
    value = side["execution_class"]
    if value not in CLASSES:
        raise UsageError(f"--class is {' or '.join(CLASSES)}, and not {value!r}")
    return {"prefill_only": CLASSES[value]}


def _number_alone(ctx: typer.Context, max_tokens: int) -> int:
    """MAX_TOKENS where the prompts are not on the command line: what stands in their place can only be that.

    Raises `UsageError` for a prompt beside them.
    """
    prompt = ctx.params["prompt"]
    if _is_number_alone(ctx):
        return int(prompt)
    if options.was_given(ctx, "prompt") or options.was_given(ctx, "max_tokens"):
        raise UsageError(f"--prompts or --requests says what is asked: leave out {prompt!r}, and give MAX_TOKENS alone")
    return max_tokens


def _is_number_alone(ctx: typer.Context) -> bool:
    """Return whether the only word on the command line is a number: of many requests that is MAX_TOKENS."""
    prompt = ctx.params["prompt"]
    return options.was_given(ctx, "prompt") and not options.was_given(ctx, "max_tokens") and prompt.isdecimal()


def _compare_many(ctx: typer.Context, versus: Versus) -> Found:
    """Many requests on either side: prompts of random lengths, or the prompt that was given, over and over."""
    from forge.views.request_sets import many_object, many_screen
    from forge.workload.ways import identical, requests_in_common

    has_prompt = options.was_given(ctx, "prompt")
    left, right = dict(ctx.params), dict(versus.right)
    if _is_number_alone(ctx):
        has_prompt = False
        left["max_tokens"] = right["max_tokens"] = int(left["prompt"])
    workloads, labels, sides = zip(*(_serve_side(side, has_prompt) for side in (left, right)), strict=True)
    in_common = requests_in_common(*workloads)
    return report(
        many_object(versus.option, versus.names, sides, in_common),
        lambda: many_screen(versus.option, versus.names, labels, workloads, sides, in_common),
        0 if identical(sides, in_common) else DIFFERENT,
    )


def _serve_side(side: Mapping[str, Any], has_prompt: bool):
    """Load what this side asks for and serve its requests."""
    from forge.workload.requests import Range, Request, Workload
    from forge.workload.ways import measure_all

    number, length = side["requests"] or MANY, side["max_tokens"]
    output_tokens = side["output_tokens"] or str(length)
    Range.parse(output_tokens, "--output-tokens")
    asked = make(RequestArgs, {**side, "seed": None}, requests=number, max_tokens=output_tokens)
    llm = create_llm(make(EngineArgs, {**side, "max_num_seqs": side["batch"]}))
    if has_prompt and asked.workload is None:
        token_ids = tuple(llm.tokenizer.encode(options.read_prompt(side["prompt"])))
        workload = Workload((Request(token_ids, length),) * number)
    else:
        workload = asked.made(llm.tokenizer, priorities=side["order"] == "priority")
    (measured,) = measure_all(llm, workload, [("continuous", llm.max_num_seqs)])
    return workload, run_label(llm), measured


def _run_side(
    name: str,
    values: Mapping[str, Any],
    prompts: Sequence[str],
    earlier: Sequence[Side],
    on_step: "Callable[[int, StepRecord], None]",
) -> Side:
    """Load what this side asks for and run it. A seed that was not given is drawn once, for both sides."""
    params = make(SamplingParams, values)
    if params.seed is None:
        seed = earlier[0].result.output.seed if earlier else secrets.randbits(32)
        params = replace(params, seed=seed)
    llm = create_llm(make(EngineArgs, values))
    llm.engine.report_probabilities = True  # shown at the first difference
    warm_up(llm, prompts[0])
    arrivals = [arriving(llm, prompt, params, step) for step, prompt in enumerate(prompts)]
    logits: dict[int, list[np.ndarray]] = {}
    llm.engine.on_logits.append(lambda seq_id, row: logits.setdefault(seq_id, []).append(row))
    run = drive_arrivals(llm, arrivals, lambda record: on_step(len(earlier), record))
    kept = tuple(tuple(logits[seq_id]) for seq_id in sorted(logits))
    return Side(name, replace(run, sampled=not params.greedy, logits=kept))
