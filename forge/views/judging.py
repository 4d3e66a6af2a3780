"""The same requests in two configurations, side by side: how fast they were answered, and what they held meanwhile."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from forge.views.comparison_rows import Row, milliseconds, row, two_sided_table
from forge.views.formatting import count, plural, rate, size, times
from forge.views.json_output import picked
from forge.views.metrics import verdict, with_unit
from forge.views.palette import QUIET, TITLE
from forge.views.summary import RunLabel
from forge.views.terminal import print_table
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


def print_judging(
    console: Console,
    question: str,
    label: RunLabel,
    names: Sequence[str],
    runs: Sequence[JudgeRun],
    prompt_tokens: int,
) -> None:
    requests = plural(len(runs[0].answers), "request")
    console.print(Text(question, TITLE))
    on = f"kv {label.kv} · {label.device} ({one_line(label.device_description)}) · {one_line(label.model)}"
    console.print(Text(f"{requests} at once, {plural(prompt_tokens, 'prompt token')}", QUIET))
    console.print(Text(on, QUIET))
    console.print()
    print_table(console, two_sided_table(names, judging_rows(runs)))
    console.print()
    tokens = plural(sum(map(len, runs[0].answers)), "token")
    differing = sum(one != other for one, other in zip(runs[0].answers, runs[1].answers, strict=True))
    different = f"{plural(differing, 'answer')} of {requests} differ"
    console.print(verdict(identical(runs), f"{tokens} of {requests}", different))


def judging_rows(runs: Sequence[JudgeRun]) -> list[Row]:
    speeds = [run.requests_per_second for run in runs]
    rows = [
        row("requests", lambda value: with_unit(rate(value), "/s"), speeds)._replace(
            ratio=times(speeds[1] / speeds[0])
        ),
        row("latency, median", milliseconds, [run.p50_ms for run in runs]),
        row("latency, 95th percentile", milliseconds, [run.p95_ms for run in runs]),
        row("steps", count, [run.num_steps for run in runs]),
        row("tokens computed", count, [run.tokens_computed for run in runs]),
        row("prompt tokens found", count, [run.tokens_cached for run in runs]),
        row("blocks held at once", count, [run.most_blocks for run in runs]),
        row("block-table entries", count, [run.most_table_entries for run in runs]),
        row("temporary memory", size, [run.most_temporary_bytes for run in runs]),
    ]
    if any(run.deferred for run in runs):
        rows.append(row("deferrals", count, [run.deferred for run in runs]))
    return rows
