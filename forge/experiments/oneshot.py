"""8. Prefill-only requests: judge, classify, score, embed.

[dim]forge oneshot --only run --requests 64[/dim]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rich.text import Text

from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.compare import CLASSES
from forge.cli.run_control import create_llm, run_label
from forge.engine_args import EngineArgs
from forge.option import option
from forge.reasons import Deferred
from forge.trace.records import StepRecord
from forge.views.charts import sparkline
from forge.views.formatting import NOTHING, count, plural, size
from forge.views.palette import ACCENT, QUIET, TITLE, sequence_style
from forge.views.progress import progress_line
from forge.views.request_sets import judging_object, judging_screen
from forge.views.screen import Part, Report, Table, report, title
from forge.views.summary import RunLabel
from forge.workload.judging import JudgeRun, judge_prompts, run_requests

WARM_UP = 2
"""Requests that are not timed."""
QUESTION = "What does a request that wants one token have to hold?"
STRIP_WIDTH = 40
STEPS_SHOWN = 6
_ENGINE = "model kv device threads num_blocks max_num_seqs prefill_only_tokens prefill_only_memory"


@dataclass(frozen=True)
class JudgeArgs:
    """The requests to judge."""

    requests: int = option(64, "How many requests.", "Requests", flags="--requests -n")
    max_tokens: int = option(1, "Of each answer; above 1 both are generations.", "Requests")


@experiment()
def oneshot(asked: JudgeArgs, engine: Annotated[EngineArgs, Takes(_ENGINE, kv="paged")]) -> Experiment:
    return Experiment(lambda: _measure(engine, asked.requests, asked.max_tokens))


def _measure(args: EngineArgs, requests: int, max_tokens: int) -> Report:
    """Run the same requests through each life once, on one model, after a few that are not timed."""
    llm = create_llm(args)
    prompts, label = judge_prompts(llm.tokenizer, requests), run_label(llm)
    runs: list[JudgeRun] = []
    steps: list[list[dict[str, Any]]] = []
    with progress_line() as progress:
        for name, keeps_nothing in CLASSES.items():
            progress(name)
            records: list[StepRecord] = []
            run_requests(llm.new_engine(prefill_only=keeps_nothing), prompts[:WARM_UP], max_tokens)
            engine = llm.new_engine(prefill_only=keeps_nothing)
            runs.append(run_requests(engine, prompts, max_tokens, on_step=records.append))
            steps.append([step_object(record) for record in records])
    scratch, layout = len(llm.engine.scheduler.prefill_only.scratch), llm.kv_layout
    facts = judging_object(label, list(CLASSES), runs, sum(map(len, prompts)))
    for side, per_step in zip(facts["sides"], steps, strict=True):
        side["per_step"] = per_step
    facts |= {
        "pool_blocks": llm.engine.cache.stats().num_blocks,
        "scratch_blocks": scratch,  # past the pool: room for one step's prefill-only requests
        "scratch_bytes": scratch * layout.block_size * layout.bytes_per_token,
    }
    return report(facts, lambda: screen(label, runs, facts), 0 if facts["identical"] else 1)


def step_object(record: StepRecord) -> dict[str, Any]:
    deferred = [wait.reason for wait in record.waiting if isinstance(wait.reason, Deferred)]
    return {
        "class": record.execution_class,
        "requests": len(record.items),
        "answered": len(record.finished),
        "rows": record.tokens_computed,
        "found": sum(item.start for item in record.items if item.phase == "prefill_only"),
        "blocks_held": record.cache.used_blocks,
        "deferred": len(deferred),
        "prefix_owners": sorted({reason.owner for reason in deferred}),
        "forward_ms": record.forward_ms,
    }


def screen(label: RunLabel, runs: Sequence[JudgeRun], facts: dict[str, Any]) -> Iterator[Part]:
    sides, names = facts["sides"], [side["value"] for side in facts["sides"]]
    yield from judging_screen(QUESTION, label, names, runs, facts["prompt_tokens"])
    yield from (None, *_strips(sides), None)
    yield title(f"The first steps as {names[-1]}", f"{TITLE} {ACCENT}")
    every = sides[-1]["per_step"]
    steps = [step | {"step": number} for number, step in enumerate(every[:STEPS_SHOWN], 1)]
    columns = ["step: {step}", "answered: {answered:count}", "rows: {rows:count}", "tokens found: {found:count}"]
    yield Table.of(steps, *columns, "deferred: {:waits}", formats={"waits": _waits}, names=0, lefts=(4,))
    if left := len(every) - len(steps):
        yield f"… and {plural(left, 'more step', 'more steps')}"
    room = f"{plural(facts['scratch_blocks'], 'scratch block')} ({size(facts['scratch_bytes'])})"
    yield f"The pool has {plural(facts['pool_blocks'], 'block')}; past it lie {room}."


def _strips(sides: Sequence[dict[str, Any]]) -> Iterator[Text]:
    """Draw rows computed and tokens held per step, each pair on one scale."""
    for heading, figure in (("rows in a step", "rows"), ("blocks held", "blocks_held")):
        series = [[step[figure] for step in side["per_step"]] for side in sides]
        scale = max(map(max, series))
        for index, (side, values) in enumerate(zip(sides, series, strict=True)):
            line = Text.assemble((f"{heading if index == 0 else '':<16}", QUIET), no_wrap=True)
            line.append(f"{side['value']:<13}{sparkline(values, scale, STRIP_WIDTH)}", sequence_style(index))
            yield line.append(f"  to {count(max(values))}", QUIET)


def _waits(facts: dict[str, Any]) -> str:
    """Format a wait: `63, while seq 0 computes their prefix`."""
    owners: Sequence[int] = facts["prefix_owners"]
    if not owners:
        return NOTHING
    named = ", ".join(map(str, owners[:3])) + (", …" if len(owners) > 3 else "")
    computes = f"seq {named} computes" if len(owners) == 1 else f"seqs {named} compute"
    return f"{count(facts['deferred'])}, while {computes} their prefix"
