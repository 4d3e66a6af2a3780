"""6. One decision per iteration: requests together, static and continuous.

[dim]forge batching --only run --requests 32[/dim]
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Annotated, Any

from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.options import RequestArgs, parse_numbers
from forge.cli.run_control import create_llm, run_label
from forge.engine_args import EngineArgs
from forge.llm import LLM
from forge.option import option
from forge.trace.records import StepRecord
from forge.trace.timeline import timeline_of
from forge.trace.totals import Percentiles, totals_of
from forge.views.charts import bar
from forge.views.formatting import count, ms, percent, plural, times
from forge.views.json_output import as_object
from forge.views.palette import ACCENT
from forge.views.progress import progress_line
from forge.views.request_sets import identity_text, workload_text
from forge.views.run_summary import totals_object
from forge.views.screen import Part, Report, Table, question, report, sentences
from forge.views.summary import RunLabel
from forge.workload.requests import Arrival, Range, Workload, WorkloadRun, make_workload
from forge.workload.ways import How, Measured, identical, measure_all, speed_up

LOAD_SLOTS = 8
LOAD_QUESTION = "What do requests notice as the load grows?"
WAYS: Sequence[tuple[How, int]]
WAYS = (("continuous", 1), ("static", 4), ("continuous", 4), ("static", 16), ("continuous", 16))
"""One at a time, then each size static and continuous."""
TURNS = 3
"""Turns of each way; the median is shown."""
STEADY = 1.15
"""If a way's slowest turn takes this many times as long as its fastest, two ways cannot be compared by their times."""
QUESTION = "What does it buy to run requests together, and who pays?"
BUDGET_QUESTION = "What does a long prompt cost those that decode beside it?"
NUM_STORIES, STORY_TOKENS = 8, 96
NUM_PROMPTS, LONG_PROMPT, STEPS_BETWEEN = 6, 400, 12
"""How many long prompts come while the stories decode, their tokens, and the steps between two of them."""
_BAR = 14
_WIDE = 94
"""Columns from which on there is room for a bar."""


@dataclass(frozen=True)
class BatchingArgs:
    """Other questions than what it buys to run requests together."""

    budgets: str | None = option(
        None, "Long prompts that come while stories decode, with these tokens a step instead: 32,128,512.", "Scheduler"
    )
    loads: str | None = option(
        None, f"Instead: requests arrive at these shares of what {LOAD_SLOTS} slots can serve: 50,80,95.", "Scheduler"
    )


@experiment(bugs=True)
def batching(
    asked: Annotated[RequestArgs, Takes("requests prompt_tokens max_tokens seed", requests=96, max_tokens="8:64")],
    instead: BatchingArgs,
    engine: Annotated[EngineArgs, Takes("model device threads", kv="paged")],
) -> Experiment:
    if instead.budgets is not None:
        limits = sorted({*parse_numbers(instead.budgets, "--budgets", "32,128")})
        return Experiment(lambda: measure_budgets(engine, limits, asked.seed))
    if instead.loads is not None:
        loads = sorted({*parse_numbers(instead.loads, "--loads", "50,80,95")})
        return Experiment(lambda: measure_loads(engine, loads, asked.requests, asked.seed))
    return Experiment(lambda: measure_ways(engine, asked, WAYS, TURNS))


def measure_ways(engine: EngineArgs, asked: RequestArgs, ways: Sequence[tuple[How, int]], turns: int) -> Report:
    """Load the model, run the requests in every way, and report."""
    llm = create_llm(engine)
    workload = asked.made(llm.tokenizer)
    with progress_line() as progress:
        measured = measure_all(llm, workload, ways, turns, progress)
    label = run_label(llm)
    about = f"{label} · {workload_text(workload)}{turns_text(measured)}"
    facts = batching_object(label, workload, measured)
    return report(facts, lambda: screen(about, measured), 0 if identical(measured) else 1)


@dataclass(frozen=True)
class BudgetRun:
    """One run under one token budget per step: stories decode while long prompts arrive."""

    name: str
    budget: int | None
    """Tokens that a step may compute; None where prompts are computed whole, in steps of their own."""
    num_steps: int
    tokens_per_second: float
    rows: Percentiles
    """Rows that the model computed from one token of a story to its next, the story's own included."""
    gap_ms: Percentiles
    """The milliseconds from one token of a story to its next."""
    first_token_ms: float
    """The median time to first token of the long prompts."""

    @property
    def shown(self) -> str:
        return "whole prompts" if self.budget is None else count(self.budget)


def measure_budgets(engine: EngineArgs, budgets: Sequence[int], seed: int) -> Report:
    """Run the same stories and prompts under every budget, and with whole prompts."""
    llm = create_llm(engine)
    stories = make_workload(llm.tokenizer, NUM_STORIES, Range(16, 16), Range(STORY_TOKENS, STORY_TOKENS), seed=seed)
    length = min(LONG_PROMPT, llm.max_model_len - 8)
    arrival = Arrival("every", STEPS_BETWEEN)
    prompts = make_workload(llm.tokenizer, NUM_PROMPTS, Range(length, length), Range(4, 4), arrival, seed=seed + 1)
    late = [replace(request, arrival=request.arrival + STEPS_BETWEEN) for request in prompts.requests]
    workload = Workload((*stories.requests, *late), "steps")
    runs = []
    with progress_line() as progress:
        for budget in [*budgets, None]:
            progress("whole prompts" if budget is None else f"{budget} tokens a step")
            turns = [_run_budget(llm, workload, budget) for _ in range(TURNS)]
            runs.append(min(turns, key=lambda run: run.gap_ms.p99))
    label = run_label(llm)
    facts = {**as_object(label), "prompt_tokens": length, "stories": NUM_STORIES, "prompts": NUM_PROMPTS}
    about = f"{label} · {NUM_STORIES} stories decode, {NUM_PROMPTS} prompts of {length} tokens come"
    return report(facts | {run.name: as_object(run) for run in runs}, lambda: budgets_screen(about, runs))


def _run_budget(llm: LLM, workload: Workload, budget: int | None) -> BudgetRun:
    longest = max(len(request.prompt_token_ids) for request in workload.requests)
    engine = llm.new_engine(
        max_num_seqs=len(workload.requests),
        max_num_batched_tokens=longest if budget is None else budget,
        chunked_prefill=budget is not None,
    )
    steps = list(WorkloadRun(engine, workload))
    rows, gaps = [], []
    for seq_id in range(NUM_STORIES):
        with_token = [
            number for number, step in enumerate(steps) if any(token.seq_id == seq_id for token in step.tokens)
        ]
        for before, after in pairwise(with_token):
            rows.append(float(sum(step.tokens_computed for step in steps[before + 1 : after + 1])))
            gaps.append((steps[after].ended - steps[before].ended) * 1e3)
    requests = timeline_of(steps).requests()
    totals = totals_of(steps, requests)
    late = [request.time_to_first_token_ms for request in requests[NUM_STORIES:]]
    name = "whole" if budget is None else f"chunks_{budget}"
    speed = totals.tokens_per_second or 0.0
    return BudgetRun(name, budget, len(steps), speed, _all_of(rows), _all_of(gaps), _all_of(late).p50)


def _all_of(values: Sequence[float | None]) -> Percentiles:
    percentiles = Percentiles.of(values)
    assert percentiles is not None, "there is a story, and it has several tokens"
    return percentiles


def budgets_screen(about: str, runs: Sequence[BudgetRun]) -> Iterator[Part]:
    """Draw a row per budget: the stories' gaps, and the prompts' time to first token."""
    yield from question(BUDGET_QUESTION, f"{about}, the best of {TURNS} turns")
    columns = ["tokens a step: {shown}", "steps: {num_steps:count}", "tok/s: {tokens_per_second:rate}"]
    columns += ["rows between: {rows.p50:,.0f}", "most: {rows.maximum:,.0f}"]
    columns += ["gap p50: {gap_ms.p50:ms}", "p99: {gap_ms.p99:ms}", "TTFT: {first_token_ms:ms}"]
    yield from (Table.of(runs, *columns), None)
    note = (
        "rows between: what the model computes from one token of a story to its next, the median and the most. "
        "gap: the same in milliseconds. TTFT: of the long prompts, the median."
    )
    yield from sentences([note])


@dataclass(frozen=True)
class LoadRun:
    """One run under one load: requests arrive at random, at a share of what the slots can serve."""

    load: int
    """The share of that, in percent."""
    busy_slots: float
    """Busy slots on average, while requests still arrived."""
    waited_steps: Percentiles
    """Steps that a request stood in the queue."""
    first_token_ms: Percentiles
    per_token_ms: Percentiles
    tokens_per_second: float


def measure_loads(engine: EngineArgs, loads: Sequence[int], number: int, seed: int) -> Report:
    """Run the same requests at every load. They arrive on the engine's clock of steps, so every machine sees the same
    queue; milliseconds are this machine's."""
    llm = create_llm(engine, max_num_seqs=LOAD_SLOTS)
    workload = make_workload(llm.tokenizer, number, Range(16, 16), Range(8, 64), seed=seed)
    runs = []
    with progress_line() as progress:
        _run_load(llm, Workload(workload.requests[:2], "steps"), 100, seed)
        for load in loads:
            progress(f"{load} % of what {LOAD_SLOTS} slots can serve")
            runs.append(_run_load(llm, workload, load, seed))
    label = run_label(llm)
    facts = {**as_object(label), "slots": LOAD_SLOTS, "requests": number, "runs": [as_object(run) for run in runs]}
    return report(facts, lambda: loads_screen(f"{label} · {plural(number, 'request')}", runs))


def _run_load(llm: LLM, workload: Workload, load: int, seed: int) -> LoadRun:
    """Run at one load: interarrival times are exponential, with a mean that keeps the slots busy `load` percent of the
    time."""
    every = workload.output_tokens / len(workload.requests) / LOAD_SLOTS / (load / 100)
    times = Arrival("poisson", 1 / every).times(len(workload.requests), Random(seed))
    requests = tuple(replace(request, arrival=at) for request, at in zip(workload.requests, times, strict=True))
    steps = list(WorkloadRun(llm.new_engine(max_num_seqs=LOAD_SLOTS), Workload(requests, "steps")))
    totals = totals_of(steps, timeline_of(steps).requests())
    arriving = [step for step in steps if step.queues.waiting or step.queues.finished < len(requests) // 2]
    busy_slots = sum(len(step.items) for step in arriving) / max(1, len(arriving))
    waited_steps, first_token = _all_of(_steps_in_queue(steps)), totals.first_token
    assert first_token is not None, "at least one request ran"
    per_token, speed = totals.per_token or first_token, totals.tokens_per_second or 0.0
    return LoadRun(load, busy_slots, waited_steps, first_token, per_token, speed)


def _steps_in_queue(steps: Sequence[StepRecord]) -> list[float]:
    """Return each request's steps between its arrival and the first step that computes it, in the order of arrival."""
    began: dict[int, int] = {}
    for number, step in enumerate(steps):
        for item in step.items:
            began.setdefault(item.seq_id, number)
    arrived = [step.queues.waiting + step.queues.running + step.queues.finished for step in steps]
    return [float(began[seq_id] - bisect_right(arrived, place)) for place, seq_id in enumerate(sorted(began))]


def loads_screen(about: str, runs: Sequence[LoadRun]) -> Iterator[Part]:
    """Draw a row per load."""
    yield from question(LOAD_QUESTION, f"{about} arrive at random, {LOAD_SLOTS} slots")
    columns = ["load: {load} %", f"busy of {LOAD_SLOTS}: {{busy_slots:.1f}}"]
    columns += ["steps in queue p50: {waited_steps.p50:.0f}"]
    columns += ["p99: {waited_steps.p99:.0f}", "TTFT p50: {first_token_ms.p50:ms}", "p99: {first_token_ms.p99:ms}"]
    columns += ["TPOT: {per_token_ms.p50:ms}", "tok/s: {tokens_per_second:rate}"]
    yield from (Table.of(runs, *columns), None)
    note = "load: of what the slots can serve. The steps are the same on every machine; times are ms of this one."
    yield from sentences([note])


def batching_object(label: RunLabel, workload: Workload, measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the experiment as facts: one object per way, under its name: `sequential`, `static_4`, `continuous_16`."""
    names = [way.how if way.how == "sequential" else f"{way.how}_{way.batch}" for way in measured]
    return {
        **as_object(label),
        "requests": len(workload.requests),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in workload.requests),
        "max_output_tokens": workload.output_tokens,
        "identical": identical(measured),
        "steady": max(max(way.all_seconds) / min(way.all_seconds) for way in measured) < STEADY,
        **{name: _way_object(way, measured[0]) for name, way in zip(names, measured, strict=True)},
    }


def _way_object(way: Measured, baseline: Measured) -> dict[str, Any]:
    facts = as_object(way, "tokens_per_second", "ms_per_request", without=("totals", "tokens"))
    return facts | {"speed_up": speed_up(way, baseline), "totals": totals_object(way.totals)}


def screen(about: str, measured: Sequence[Measured]) -> Iterator[Part]:
    """Draw the table, its sentences, and whether the tokens are identical."""
    yield from question(QUESTION, about)
    yield lambda width: [ways_table(measured, width)]
    yield from (None, *sentences(batching_sentences(measured)), identity_text(measured))


def turns_text(measured: Sequence[Measured]) -> str:
    turns = len(measured[0].all_seconds)
    return {1: "", 2: ", the faster of 2 turns"}.get(turns, f", median of {turns} turns")


def ways_table(measured: Sequence[Measured], width: int) -> Table:
    most = max(way.tokens_per_second for way in measured)
    shown = {
        "way": lambda way: f"{way.batch} {way.how}" if way.how != "sequential" else "sequential",
        "gain": lambda way: times(speed_up(way, measured[0])),
        "bar": lambda value: bar(value, most, _BAR),
    }
    columns = ["at once: {:way}", "tok/s: {tokens_per_second:rate}", ": {:gain}", "ms/req: {ms_per_request:ms}"]
    columns += ["TTFT: {totals.first_token.p50:ms}", "TPOT: {totals.per_token.p50:ms}"]
    columns += ["e2e: {totals.end_to_end.p50:ms}", "e2e p99: {totals.end_to_end.p99:ms}"]
    columns += [": {tokens_per_second:bar}"] if width >= _WIDE else []
    return Table.of(measured, *columns, formats=shown, styles={8: ACCENT}, lefts=(8,))


def batching_sentences(measured: Sequence[Measured]) -> list[str]:
    """Say in sentences what the table shows."""
    first, best = measured[0], max(measured, key=lambda way: way.tokens_per_second)
    lines = [
        "ms/req: the whole time by the number of requests. TTFT, TPOT, end to end: medians, from the request's arrival."
    ]
    if best is not first:
        lines.append(
            f"{best.batch} at once, {best.how}: {times(speed_up(best, first))} the tokens per second of "
            f"{_phrase(first)}, while a token takes {ms(_per_token(best))} ms instead of {ms(_per_token(first))}."
        )
    pairs = {(way.how, way.batch): way for way in measured}
    for way in measured:
        if way.how == "speculative":
            exact = "exact" if identical([first, way]) else "not exact"
            rate_text = "nothing was proposed" if way.acceptance is None else f"{percent(way.acceptance)} accepted"
            lines.append(f"{way.batch} speculative: {rate_text}, {count(way.totals.num_steps)} steps, {exact}.")
    for way in measured:
        static = pairs.get(("static", way.batch))
        if way.how == "continuous" and static is not None and way.batch == best.batch:
            lines.append(
                f"Of {way.batch} slots, {static.totals.batch[0]:.1f} are busy on average in static batches, "
                f"{way.totals.batch[0]:.1f} with continuous batching: {count(static.totals.num_steps)} "
                f"steps become {count(way.totals.num_steps)}."
            )
    return lines


def _phrase(way: Measured) -> str:
    return "one request after another" if way.how == "sequential" or way.batch == 1 else f"{way.batch}, {way.how}"


def _per_token(way: Measured) -> float | None:
    return way.totals.per_token.p50 if way.totals.per_token else None
