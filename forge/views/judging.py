"""The same requests in two configurations, side by side: how fast they were answered, and what they held meanwhile."""

from collections.abc import Iterator, Sequence
from typing import Any

from forge.views.formatting import plural
from forge.views.json_output import picked
from forge.views.metrics import verdict
from forge.views.screen import Part, sides, title
from forge.views.summary import RunLabel
from forge.views.text import one_line
from forge.workload.judging import JudgeRun


def judging_object(label: RunLabel, names: Sequence[str], runs: Sequence[JudgeRun], prompt_tokens: int):
    """For `--json`."""
    return {
        **picked(label, "model", "kv", "device"),
        "requests": len(runs[0].answers),
        "prompt_tokens": prompt_tokens,
        "identical": identical(runs),
        "speed_up": runs[1].requests_per_second / runs[0].requests_per_second,
        "sides": [{"value": name, **run_object(run)} for name, run in zip(names, runs, strict=True)],
    }


def run_object(run: JudgeRun) -> dict[str, Any]:
    return {
        **picked(run, "seconds", "requests_per_second"),
        "latency_p50_ms": run.p50_ms,
        "latency_p95_ms": run.p95_ms,
        "steps": run.num_steps,
        **picked(run, "tokens_computed", "tokens_cached"),
        "blocks_held": run.most_blocks,
        "block_table_entries": run.most_table_entries,
        "temporary_bytes": run.most_temporary_bytes,
        **picked(run, "deferred", "answers"),
    }


def identical(runs: Sequence[JudgeRun]) -> bool:
    return len({run.answers for run in runs}) == 1


def judging_screen(
    question: str, label: RunLabel, names: Sequence[str], runs: Sequence[JudgeRun], prompt_tokens: int
) -> Iterator[Part]:
    requests = plural(len(runs[0].answers), "request")
    yield title(question)
    yield f"{requests} at once, {plural(prompt_tokens, 'prompt token')}"
    yield f"kv {label.kv} · {label.device} ({one_line(label.device_description)}) · {one_line(label.model)}"
    deferrals = ["deferrals: {deferred:count}"] if any(run.deferred for run in runs) else []
    gains = {"requests": runs[1].requests_per_second / runs[0].requests_per_second}
    yield from (None, sides(names, runs, *_ROWS, *deferrals, gains=gains), None)
    tokens = plural(sum(map(len, runs[0].answers)), "token")
    differing = sum(one != other for one, other in zip(runs[0].answers, runs[1].answers, strict=True))
    different = f"{plural(differing, 'answer')} of {requests} differ"
    yield verdict(identical(runs), f"{tokens} of {requests}", different)


_ROWS = (
    "requests: {requests_per_second:rate /s}",
    "latency, median: {p50_ms:ms ms}",
    "latency, 95th percentile: {p95_ms:ms ms}",
    "steps: {num_steps:count}",
    "tokens computed: {tokens_computed:count}",
    "prompt tokens found: {tokens_cached:count}",
    "blocks held at once: {most_blocks:count}",
    "block-table entries: {most_table_entries:count}",
    "temporary memory: {most_temporary_bytes:size}",
)
