"""The same requests served in two ways, side by side: the same tokens or answers? At what cost to whom?"""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from forge.views.formatting import count, plural
from forge.views.json_output import picked
from forge.views.metrics import verdict
from forge.views.palette import QUIET
from forge.views.run_summary import totals_object
from forge.views.screen import Part, question, title
from forge.views.screen import sides as side_by_side
from forge.views.summary import RunLabel
from forge.views.text import one_line
from forge.workload.judging import JudgeRun
from forge.workload.requests import Workload
from forge.workload.ways import Measured, identical

_QUESTIONS = {
    "--requests": "What do more requests change for each of them?",
    "--batch": "What does it buy to run requests together, and who pays?",
    "--preempt": "Does it matter which request gives way?",
    "--preemption": "Compute again, or swap?",
    "--order": "Who waits under another order?",
    "--chunked-prefill": "Who waits for a long prompt?",
}


def many_object(option: str, names: Sequence[str], sides: Sequence[Measured], in_common: int) -> dict[str, Any]:
    """Return the comparison for `--json`. `in_common`: how many requests both sides have, whose tokens are compared."""
    return {
        "option": option,
        "identical": identical(sides, in_common) if in_common else None,
        "requests_compared": in_common,
        "sides": [
            {
                "value": name,
                **picked(side, "batch", "seconds", "tokens_per_second", "ms_per_request"),
                "totals": totals_object(side.totals),
            }
            for name, side in zip(names, sides, strict=True)
        ],
    }


def many_screen(
    option: str,
    names: Sequence[str],
    labels: Sequence[RunLabel],
    workloads: Sequence[Workload],
    sides: Sequence[Measured],
    in_common: int,
) -> Iterator[Part]:
    """Draw question, table and verdict."""
    ran = " against ".join(dict.fromkeys(map(str, labels)))
    requests = " against ".join(dict.fromkeys(map(workload_text, workloads)))
    asked = _QUESTIONS.get(option, f"What does {option} change for many requests?")
    yield from question(asked, f"{ran} · {requests}")
    gains = {"throughput": sides[1].tokens_per_second / sides[0].tokens_per_second}
    yield from (side_by_side(names, sides, *_WAY_ROWS, gains=gains), None, identity_text(sides, in_common))


_WAY_ROWS = (
    "throughput: {tokens_per_second:rate tok/s}",
    "time per request: {ms_per_request:ms ms}",
    "queue, median: {totals.queue.p50:ms ms}",
    "first token, median: {totals.first_token.p50:ms ms}",
    "per output token, median: {totals.per_token.p50:ms ms}",
    "end to end, median: {totals.end_to_end.p50:ms ms}",
    "end to end, p99: {totals.end_to_end.p99:ms ms}",
    "steps: {totals.num_steps:count}",
    "sequences in a step: {totals.batch.0:.1f}",
    "preemptions: {totals.preemptions:count}",
    "tokens computed: {totals.tokens_computed:count}",
    "of them again: {totals.tokens_recomputed:count}",
    "pool used: {totals.utilization.0:percent}",
)


def workload_text(workload: Workload) -> str:
    """Format a workload: `64 requests, prompts of 16 tokens, outputs of 8 to 64`."""
    prompts = [len(request.prompt_token_ids) for request in workload.requests]
    outputs = [request.max_tokens for request in workload.requests]
    unit = "token" if max(prompts) == 1 else "tokens"
    return f"{plural(len(prompts), 'request')}, prompts of {_span(prompts)} {unit}, outputs of {_span(outputs)}"


def identity_text(measured: Sequence[Measured], requests: int | None = None) -> Text:
    """Return whether every way gave the same tokens, to all requests or to the first `requests`, which all ways had."""
    if requests == 0:
        return Text("tokens not compared: the two sides have no request in common", QUIET)
    outputs = measured[0].tokens[:requests]
    partly = any(len(side.tokens) > len(outputs) for side in measured)
    common = " in both workloads (they differ)" if partly else ""
    same = f"{plural(len(outputs), 'request')}{common}, {count(sum(map(len, outputs)))} tokens each way"
    return verdict(identical(measured, requests), same, "the tokens differ between the ways")


def _span(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def judging_object(label: RunLabel, names: Sequence[str], runs: Sequence[JudgeRun], prompt_tokens: int):
    """Return the comparison's facts, for `--json`."""
    return {
        **picked(label, "model", "kv", "device"),
        "requests": len(runs[0].answers),
        "prompt_tokens": prompt_tokens,
        "identical": same_answers(runs),
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


def same_answers(runs: Sequence[JudgeRun]) -> bool:
    return len({run.answers for run in runs}) == 1


def judging_screen(
    asked: str,
    label: RunLabel,
    names: Sequence[str],
    runs: Sequence[JudgeRun],
    prompt_tokens: int,
    concurrency: int | None = None,
) -> Iterator[Part]:
    """Draw the comparison of two runs of judge requests. concurrency: requests that run at a time; None for all."""
    requests = plural(len(runs[0].answers), "request")
    yield title(asked)
    at_a_time = " at once" if concurrency is None else f", {concurrency} at a time"
    yield f"{requests}{at_a_time}, {plural(prompt_tokens, 'prompt token')}"
    yield f"kv {label.kv} · {label.device} ({one_line(label.device_description)}) · {one_line(label.model)}"
    deferrals = ["deferrals: {deferred:count}"] if any(run.deferred for run in runs) else []
    gains = {"requests": runs[1].requests_per_second / runs[0].requests_per_second}
    yield from (None, side_by_side(names, runs, *_JUDGING_ROWS, *deferrals, gains=gains), None)
    tokens = plural(sum(map(len, runs[0].answers)), "token")
    differing = sum(ours != theirs for ours, theirs in zip(runs[0].answers, runs[1].answers, strict=True))
    different = f"{plural(differing, 'answer')} of {requests} differ"
    yield verdict(same_answers(runs), f"{tokens} of {requests}", different)


_JUDGING_ROWS = (
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
