"""6. One decision per iteration: requests together, static and continuous.

[dim]forge batching --only run --requests 32[/dim]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.bugs import BugOption, run_bug
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.run_control import Found, load_model, run_label
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.trace.timeline import timeline_of
from forge.trace.totals import Percentiles, totals_of
from forge.views.charts import bar
from forge.views.formatting import count, ms, percent, rate, times
from forge.views.json_output import as_object
from forge.views.palette import ACCENT, QUIET, TITLE
from forge.views.progress import BenchProgress
from forge.views.report import Report
from forge.views.request_sets import identity_text, workload_text
from forge.views.run_summary import totals_object
from forge.views.summary import RunLabel
from forge.views.terminal import new_table, open_error_console, print_table
from forge.workload.requests import Arrival as WorkloadArrival
from forge.workload.requests import Range, Workload, WorkloadRun, make_workload
from forge.workload.ways import Measured, identical, measure_all, speed_up

if TYPE_CHECKING:
    from forge.llm import LLM
    from forge.workload.ways import How

_WORKLOAD = "Requests"
BATCHES = (1, 4, 16)
TURNS = 2
"""Of each way; the faster one is shown."""
QUESTION = "What does it buy to run requests together, and who pays?"
BUDGET_QUESTION = "What does a long prompt cost those that decode beside it?"
NUM_STORIES, STORY_TOKENS = 8, 96
NUM_PROMPTS, LONG_PROMPT, STEPS_BETWEEN = 6, 400, 12
"""Long prompts come one by one while the stories decode."""
_BAR = 14
_WIDE = 94
"""Columns from which on there is room for a bar."""


@command
def batching(
    ctx: typer.Context,
    requests: Annotated[
        int, typer.Option("--requests", "-n", help="How many requests.", rich_help_panel=_WORKLOAD)
    ] = 96,
    prompt_tokens: options.PromptTokensOption = "16",
    max_tokens: options.OutputTokensOption = "8:64",
    seed: options.WorkloadSeedOption = 0,
    *,
    engine: Annotated[EngineArgs, Takes("model device threads", kv="paged")],
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            help="Long prompts that come while stories decode, with these tokens a step instead: 32,128,512.",
            rich_help_panel="Scheduler",
        ),
    ] = None,
    only: OnlyOption = None,
    pause: PauseOption = True,
    bug: BugOption = None,
    json: options.JsonOption = False,
) -> Found:
    if bug is not None:
        return run_bug("batching", bug, engine, json)
    limits = None if budgets is None else parse_budgets(budgets)
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    if limits is not None:
        report = measure_budgets(engine, limits, seed)
        return report.as_json() if json else report
    report = measure_ways(engine, (requests, prompt_tokens, max_tokens, seed), ways_of(BATCHES), TURNS)
    return report.as_json() if json else report


def ways_of(batches: Sequence[int]) -> "list[tuple[How, int]]":
    """One at a time, then each size static and continuous."""
    larger = [batch for batch in batches if batch > 1]
    ways: list[tuple[How, int]] = [("continuous", 1)]
    for batch in larger:
        ways += [("static", batch), ("continuous", batch)]
    return ways


def measure_ways(
    engine: EngineArgs,
    asked: tuple[int, str, str, int],
    ways: "Sequence[tuple[How, int]]",
    turns: int,
) -> Report:
    """Load the model, run the workload that `asked` describes (requests, prompt tokens, output tokens, seed) in every
    way, and report."""
    number, prompt_tokens, max_tokens, seed = asked
    prompt_range = Range.parse(prompt_tokens, "--prompt-tokens")
    output_range = Range.parse(max_tokens, "--max-tokens")
    llm = load_model(engine)
    workload = make_workload(llm.tokenizer, number, prompt_range, output_range, seed=seed)
    with BenchProgress(open_error_console()) as progress:
        measured = measure_all(llm, workload, ways, turns, progress)
    label = run_label(llm)
    return Report(
        batching_object(label, workload, measured),
        lambda console: print_batching(console, label, workload, measured),
        0 if identical(measured) else 1,
    )


@dataclass(frozen=True)
class BudgetRun:
    """Stories that decode while long prompts come, with one limit of tokens a step."""

    name: str
    budget: int | None
    """Tokens that a step may compute; None where prompts are computed whole, in steps of their own."""
    num_steps: int
    tokens_per_second: float
    rows: Percentiles
    """What the model computed from one token of a story to its next: rows, the story's own included."""
    gap_ms: Percentiles
    """The same as time."""
    first_token_ms: float
    """Of the long prompts, the median."""


def parse_budgets(text: str) -> list[int]:
    """`32,128,512`. Raises `UsageError`."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= 1 for word in words):
        raise UsageError(f"--budgets takes numbers of tokens with commas between them, such as 32,128, not {text!r}")
    return sorted({int(word) for word in words})


def measure_budgets(engine: EngineArgs, budgets: Sequence[int], seed: int) -> Report:
    """The same stories and prompts with every budget, and with whole prompts."""
    llm = load_model(engine)
    stories = make_workload(llm.tokenizer, NUM_STORIES, Range(16, 16), Range(STORY_TOKENS, STORY_TOKENS), seed=seed)
    length = min(LONG_PROMPT, llm.max_model_len - 8)
    arrival = WorkloadArrival("every", STEPS_BETWEEN)
    prompts = make_workload(llm.tokenizer, NUM_PROMPTS, Range(length, length), Range(4, 4), arrival, seed=seed + 1)
    late = [replace(one, arrival=one.arrival + STEPS_BETWEEN) for one in prompts.requests]
    workload = Workload((*stories.requests, *late), "steps")
    runs = []
    with BenchProgress(open_error_console()) as progress:
        for budget in [*budgets, None]:
            progress("whole prompts" if budget is None else f"{budget} tokens a step")
            turns = [_run_budget(llm, workload, budget) for _ in range(TURNS)]
            runs.append(min(turns, key=lambda one: one.gap_ms.p99))
    label = run_label(llm)
    facts = {**as_object(label), "prompt_tokens": length, "stories": NUM_STORIES, "prompts": NUM_PROMPTS}
    return Report(
        facts | {one.name: as_object(one) for one in runs},
        lambda console: print_budgets(console, label, length, runs),
    )


def _run_budget(llm: "LLM", workload: Workload, budget: int | None) -> BudgetRun:
    longest = max(len(request.prompt_token_ids) for request in workload.requests)
    engine = llm.new_engine(
        max_num_seqs=len(workload.requests),
        max_num_batched_tokens=longest if budget is None else budget,
        chunked_prefill=budget is not None,
    )
    steps = list(WorkloadRun(engine, workload))
    rows, gaps = [], []
    for seq_id in range(NUM_STORIES):
        own = [number for number, step in enumerate(steps) if any(token.seq_id == seq_id for token in step.tokens)]
        for before, after in pairwise(own):
            rows.append(float(sum(step.tokens_computed for step in steps[before + 1 : after + 1])))
            gaps.append((steps[after].ended - steps[before].ended) * 1e3)
    requests = timeline_of(steps).requests()
    totals = totals_of(steps, requests)
    late = [request.time_to_first_token_ms for request in requests[NUM_STORIES:]]
    name = "whole" if budget is None else f"chunks_{budget}"
    speed = totals.tokens_per_second or 0.0
    return BudgetRun(name, budget, len(steps), speed, _all_of(rows), _all_of(gaps), _all_of(late).p50)


def _all_of(values: Sequence[float | None]) -> Percentiles:
    found = Percentiles.of(values)
    assert found is not None, "there is a story, and it has several tokens"
    return found


def print_budgets(console: Console, label: RunLabel, length: int, runs: Sequence[BudgetRun]) -> None:
    """A row per budget: what the stories notice, and what the prompts do."""
    console.print(Text(BUDGET_QUESTION, TITLE))
    about = f"{NUM_STORIES} stories decode, {NUM_PROMPTS} prompts of {length} tokens come"
    console.print(Text(f"{label} · {about}, the better of {TURNS} turns", QUIET))
    console.print()
    table = new_table("tokens a step", "steps", "tok/s", "rows between", "most", "gap p50", "p99", "TTFT")
    for one in runs:
        table.add_row(
            "whole prompts" if one.budget is None else count(one.budget),
            count(one.num_steps),
            rate(one.tokens_per_second),
            count(round(one.rows.p50)),
            count(round(one.rows.maximum)),
            ms(one.gap_ms.p50),
            ms(one.gap_ms.p99),
            ms(one.first_token_ms),
        )
    print_table(console, table)
    console.print()
    console.print(
        Text(
            "rows between: what the model computes from one token of a story to its next, the median and the most. "
            "gap: the same in milliseconds. TTFT: of the long prompts, the median."
        )
    )


def way_name(one: Measured) -> str:
    """How facts name it: `sequential`, `static_4`, `continuous_16`."""
    return one.how if one.how == "sequential" else f"{one.how}_{one.batch}"


def batching_object(label: RunLabel, workload: Workload, measured: Sequence[Measured]) -> dict[str, Any]:
    """The experiment as facts: one object per way, under its name."""
    return {
        **as_object(label),
        "requests": len(workload.requests),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in workload.requests),
        "max_output_tokens": workload.output_tokens,
        "identical": identical(measured),
        **{way_name(one): _way_object(one, measured[0]) for one in measured},
    }


def _way_object(one: Measured, first: Measured) -> dict[str, Any]:
    found = as_object(one, "tokens_per_second", "ms_per_request", without=("totals", "tokens"))
    return found | {"speed_up": speed_up(one, first), "totals": totals_object(one.totals)}


def print_batching(console: Console, label: RunLabel, workload: Workload, measured: Sequence[Measured]) -> None:
    """The table, what it shows, and whether the tokens are the same."""
    console.print(Text(QUESTION, TITLE))
    console.print(Text(f"{label} · {workload_text(workload)}{turns_text(measured)}", QUIET))
    console.print()
    print_table(console, ways_table(measured, console.width))
    console.print()
    for sentence in batching_sentences(measured):
        console.print(Text(sentence))
    console.print(identity_text(measured))


def turns_text(measured: Sequence[Measured]) -> str:
    turns = len(measured[0].all_seconds)
    return {1: "", 2: ", the faster of 2 turns"}.get(turns, f", median of {turns} turns")


def ways_table(measured: Sequence[Measured], width: int) -> Table:
    figures = ("tok/s", "", "ms/req", "TTFT", "TPOT", "e2e", "e2e p99")
    table = new_table("at once", *figures, last="" if width >= _WIDE else None)
    most = max(one.tokens_per_second for one in measured)
    for one in measured:
        totals = one.totals
        row: list[Text | str] = [
            Text(f"{one.batch} {one.how}" if one.how != "sequential" else "sequential"),
            rate(one.tokens_per_second),
            times(speed_up(one, measured[0])),
            ms(one.ms_per_request),
            ms(totals.first_token.p50 if totals.first_token else None),
            ms(totals.per_token.p50 if totals.per_token else None),
            ms(totals.end_to_end.p50 if totals.end_to_end else None),
            ms(totals.end_to_end.p99 if totals.end_to_end else None),
        ]
        if width >= _WIDE:
            row.append(Text(bar(one.tokens_per_second, most, _BAR), ACCENT))
        table.add_row(*row)
    return table


def batching_sentences(measured: Sequence[Measured]) -> list[str]:
    """What the table shows, as measured."""
    first, best = measured[0], max(measured, key=lambda one: one.tokens_per_second)
    said = [
        "ms/req: the whole time by the number of requests. TTFT, TPOT, end to end: medians, from the request's arrival."
    ]
    if best is not first:
        said.append(
            f"{best.batch} at once, {best.how}: {times(speed_up(best, first))} the tokens per second of "
            f"{_phrase(first)}, while a token takes {ms(_per_token(best))} ms instead of {ms(_per_token(first))}."
        )
    pairs = {(one.how, one.batch): one for one in measured}
    for one in measured:
        if one.how == "speculative":
            exact = "exact" if identical([first, one]) else "not exact"
            rate_text = "nothing was proposed" if one.acceptance is None else f"{percent(one.acceptance)} accepted"
            said.append(f"{one.batch} speculative: {rate_text}, {count(one.totals.num_steps)} steps, {exact}.")
    for one in measured:
        static = pairs.get(("static", one.batch))
        if one.how == "continuous" and static is not None and one.batch == best.batch:
            said.append(
                f"Of {one.batch} slots, {static.totals.batch[0]:.1f} are busy on average in static batches, "
                f"{one.totals.batch[0]:.1f} with continuous batching: {count(static.totals.num_steps)} "
                f"steps become {count(one.totals.num_steps)}."
            )
    return said


def _phrase(one: Measured) -> str:
    return "one request after another" if one.how == "sequential" or one.batch == 1 else f"{one.batch}, {one.how}"


def _per_token(one: Measured) -> float | None:
    return one.totals.per_token.p50 if one.totals.per_token else None
