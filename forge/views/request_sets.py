"""Two ways of serving many requests side by side: the same tokens? At what cost to whom?"""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from forge.trace.totals import Percentiles
from forge.views.curves import short_name
from forge.views.formatting import NOTHING, count, ms, percent, plural, rate, times
from forge.views.json_output import picked
from forge.views.metrics import verdict, with_unit
from forge.views.palette import QUIET, TITLE, sequence_style
from forge.views.run_summary import totals_object
from forge.views.summary import RunLabel
from forge.views.terminal import new_table, print_table
from forge.workload.requests import Workload
from forge.workload.ways import Measured, identical

_QUESTIONS = {
    "--requests": "What do more requests change for each of them?",
    "--batch": "What does it buy to run requests together, and who pays?",
    "--preempt": "Does it matter which request gives way?",
    "--mode": "Compute again, or swap?",
    "--order": "Who waits under another order?",
    "--chunked-prefill": "Who waits for a long prompt?",
}


def many_object(option: str, names: Sequence[str], sides: Sequence[Measured], in_common: int) -> dict[str, Any]:
    """The comparison for `--json`. `in_common`: how many requests both sides have, whose tokens are compared."""
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


def print_many(
    console: Console,
    option: str,
    names: Sequence[str],
    labels: Sequence[RunLabel],
    workloads: Sequence[Workload],
    sides: Sequence[Measured],
    in_common: int,
) -> None:
    """Question, table, verdict."""
    console.print(Text(_QUESTIONS.get(option, f"What does {option} change for many requests?"), TITLE))
    ran, requests = (
        " against ".join(dict.fromkeys(said)) for said in (map(str, labels), map(workload_text, workloads))
    )
    console.print(Text(f"{ran} · {requests}", QUIET))
    console.print()
    table = new_table()
    table.add_column("")
    for index, name in enumerate(names):
        style = sequence_style(index)
        table.add_column(Text(short_name(name), style), header_style=f"{TITLE} {style}", min_width=10)
    table.add_column("")
    for title, show in _ROWS:
        table.add_row(Text(title, QUIET), *map(show, sides), _ratio(title, sides))
    print_table(console, table)
    console.print()
    console.print(identity_text(sides, in_common))


def _ratio(title: str, sides: Sequence[Measured]) -> str:
    return times(sides[1].tokens_per_second / sides[0].tokens_per_second) if title == "throughput" else ""


def _time(name: str, part: str = "p50") -> Callable[[Measured], str]:
    def show(side: Measured) -> str:
        found: Percentiles | None = getattr(side.totals, name)
        return NOTHING if found is None else with_unit(ms(getattr(found, part)), "ms")

    return show


_ROWS: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("throughput", lambda side: with_unit(rate(side.tokens_per_second), "tok/s")),
    ("time per request", lambda side: with_unit(ms(side.ms_per_request), "ms")),
    ("queue, median", _time("queue")),
    ("first token, median", _time("first_token")),
    ("per output token, median", _time("per_token")),
    ("end to end, median", _time("end_to_end")),
    ("end to end, p99", _time("end_to_end", "p99")),
    ("steps", lambda side: count(side.totals.num_steps)),
    ("sequences in a step", lambda side: f"{side.totals.batch[0]:.1f}"),
    ("preemptions", lambda side: count(side.totals.preemptions)),
    ("tokens computed", lambda side: count(side.totals.tokens_computed)),
    ("of them again", lambda side: count(side.totals.tokens_recomputed)),
    ("pool used", lambda side: percent(side.totals.utilization[0])),
)


def workload_text(workload: Workload) -> str:
    """`64 requests, prompts of 16 tokens, outputs of 8 to 64`."""
    prompts = [len(request.prompt_token_ids) for request in workload.requests]
    outputs = [request.max_tokens for request in workload.requests]
    unit = "token" if max(prompts) == 1 else "tokens"
    return f"{plural(len(prompts), 'request')}, prompts of {_span(prompts)} {unit}, outputs of {_span(outputs)}"


def identity_text(measured: Sequence[Measured], requests: int | None = None) -> Text:
    """Whether every way gave the same tokens, to all requests or to the first `requests`, which all ways had."""
    if requests == 0:
        return Text("tokens not compared: the two sides have no request in common", QUIET)
    outputs = measured[0].tokens[:requests]
    partly = any(len(one.tokens) > len(outputs) for one in measured)
    common = " in both workloads (they differ)" if partly else ""
    same = f"{plural(len(outputs), 'request')}{common}, {count(sum(map(len, outputs)))} tokens each way"
    return verdict(identical(measured, requests), same, "the tokens differ between the ways")


def _span(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
