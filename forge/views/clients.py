"""The serving chapter's screen: what the loop did, step by step, and what each of its clients saw of it."""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.clients import Crowded, Visit
from forge.trace.lives import percentile
from forge.views.charts import sparkline
from forge.views.figures import NOTHING, count, ms, percent, plural
from forge.views.metrics import flowing
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.terminal import print_table
from forge.views.text import one_line

QUESTION = "What do the clients of one loop see?"
STRIP_WIDTH = 50
ROWS_SHOWN = 10


def clients_object(result: Crowded, model: str, kv: str) -> dict[str, Any]:
    """For `--json`. Milliseconds throughout; a figure that this run does not have is None."""
    readers = result.of("reads")
    gaps = [gap for visit in readers for gap in visit.gaps_ms]
    return {
        "model": model,
        "kv": kv,
        "ready_seconds": result.ready_seconds,
        "num_clients": len(result.visits),
        "max_tokens": result.crowd.max_tokens,
        "first_ms": _spread([visit.first_ms for visit in readers if visit.first_ms is not None]),
        "gap_ms": _spread(gaps),
        "end_to_end_ms": _spread([_whole_ms(visit) for visit in readers]),
        "clients": [visit_object(visit) for visit in result.visits],
        "alone": visit_object(result.alone),
        "identical": result.alone.text == readers[0].text,
        "steps": _steps_object(result),
        "leaver": _leaver_object(result),
        "late": _late_object(result),
        "health": {"asked": len(result.health_ms), **_spread(result.health_ms)},
        "metrics": {
            "most_running": max((seen["running"] for seen in result.seen), default=0.0),
            "most_used": max((seen["usage"] for seen in result.seen), default=0.0),
            "aborted": result.afterwards["aborted"],
            "running_afterwards": result.afterwards["running"],
            "used_afterwards": result.afterwards["usage"],
        },
        "ending": {
            "finish_reason": result.ending.stream.finish_reason,
            "tokens": result.ending.stream.tokens,
            "refused": result.ending.refused,
            "exit_status": result.ending.exit_status,
            "seconds": result.ending.seconds,
        },
    }


def visit_object(visit: Visit) -> dict[str, Any]:
    gaps = visit.gaps_ms if visit.kind != "late" else []  # what lay there already says nothing
    return {
        "kind": visit.kind,
        "first_ms": visit.first_ms,
        "gap_ms": median(gaps) if gaps else None,
        "longest_gap_ms": max(gaps, default=None),
        "end_to_end_ms": _whole_ms(visit),
        "events": len(visit.events),
        "tokens": visit.tokens,
        "finish_reason": visit.finish_reason,
        "text": visit.text,
    }


def _whole_ms(visit: Visit) -> float:
    return (visit.ended - visit.asked) * 1e3


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 95th percentile and the largest."""
    if not values:
        return {"p50": None, "p95": None, "max": None}
    return {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95), "max": max(values)}


def _steps_object(result: Crowded) -> dict[str, Any]:
    records = result.crowded_records
    sizes = [len(record.items) for record in records]
    seconds = sum(record.ended - record.started for record in records)
    forwards = sum(record.forward_ms for record in records) / 1e3
    return {
        "seen": len(records),
        "missed": result.steps_missed,
        "batch_mean": mean(sizes) if sizes else None,
        "batch_max": max(sizes, default=None),
        "host_share": 1 - forwards / seconds if seconds else None,
        "ms": _spread([(record.ended - record.started) * 1e3 for record in records])["p50"],
    }


def _leaver_object(result: Crowded) -> dict[str, Any]:
    visit, held = result.leaver, None
    steps, seq_id = result.steps_with(visit), result.sequence_of(visit)
    if steps and steps[-1].cache.used_blocks:
        last = next(item for item in steps[-1].items if item.seq_id == seq_id)
        held = -(-(last.start + last.num_tokens) // steps[-1].cache.block_size)
    return {
        "events": len(visit.events),
        "steps": visit.num_steps,
        "steps_after": result.steps_after_leaving,
        "blocks": held,
    }


def _late_object(result: Crowded) -> dict[str, Any]:
    visit = result.late
    return {
        "tokens": visit.tokens,
        "done_after_ms": visit.engine_ms,
        "began_to_read_after_ms": (visit.began_to_read - visit.asked) * 1e3,
        "all_read_after_ms": _whole_ms(visit),
    }


def print_clients(console: Console, result: Crowded, facts: dict[str, Any]) -> None:
    """`facts`: those of `clients_object`."""
    crowd = result.crowd
    console.print(Text(QUESTION, TITLE))
    come = f"{plural(facts['num_clients'], 'client')}, one every {crowd.every * 1e3:.0f} ms"
    served = f"kv {facts['kv']} · {one_line(facts['model'])}"
    console.print(Text(f"{come}, {plural(crowd.max_tokens, 'token')} each · {served}", QUIET))
    console.print()
    for line in _strips(result):
        console.print(line)
    console.print()
    print_table(console, _table(result))
    left = len(result.visits) - ROWS_SHOWN
    if left > 0:
        console.print(Text(f"… and {plural(left, 'more reader')}", QUIET))
    console.print()
    for line in _sentences(facts):
        console.print(line)
    console.print()
    for line in flowing(_figures(facts), console.width):
        console.print(line)
    console.print()
    console.print(_verdict(facts))


def _strips(result: Crowded) -> list[Text]:
    records, lines = result.crowded_records, []
    for title, values in (
        ("in the batch", [len(record.items) for record in records]),
        ("rows in a step", [record.tokens_computed for record in records]),
        ("blocks in use", [record.cache.used_blocks for record in records]),
    ):
        most = max(values, default=0)
        strip = sparkline(values, most, STRIP_WIDTH)
        lines.append(Text.assemble((f"{title:<16}", QUIET), (strip, ACCENT), (f"  to {count(most)}", QUIET)))
    return lines


def _table(result: Crowded) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style=QUIET, header_style=TITLE, pad_edge=False, show_edge=False)
    table.add_column("client")
    for name in ("TTFT, ms", "ITL, ms", "longest", "all, ms", "tokens", "events"):
        table.add_column(name, justify="right")
    table.add_column("ended", no_wrap=True)
    for number, visit in enumerate(result.visits[:ROWS_SHOWN], 1):
        facts = visit_object(visit)
        table.add_row(
            f"{number} {visit.kind}",
            ms(facts["first_ms"]),
            ms(facts["gap_ms"]),
            ms(facts["longest_gap_ms"]),
            f"{facts['end_to_end_ms']:.0f}",
            NOTHING if visit.tokens is None else count(visit.tokens),
            count(len(visit.events)),
            visit.finish_reason or NOTHING,
        )
    return table


def _sentences(facts: dict[str, Any]) -> list[Text]:
    leaver, late, ending = facts["leaver"], facts["late"], facts["ending"]
    after = plural(leaver["steps_after"], "step")
    told = [
        (
            "leaves",
            f"{plural(leaver['steps'], 'step')} for it, {after} after it hung up"
            + (f"; {plural(leaver['blocks'], 'block')} given back" if leaver["blocks"] else ""),
        ),
        (
            "late",
            f"all was there after {late['done_after_ms'] or 0:.0f} ms, it read from "
            f"{late['began_to_read_after_ms']:.0f} ms on",
        ),
        (
            "SIGTERM",
            f"{plural(ending['tokens'] or 0, 'token')} for who was there, {ending['refused']} for who came; "
            f"exit {ending['exit_status']} after {ending['seconds']:.1f} s",
        ),
    ]
    return [Text.assemble((f"{name:<9}", QUIET), text) for name, text in told]


def _figures(facts: dict[str, Any]) -> list[tuple[str, str]]:
    health, metrics, steps = facts["health"], facts["metrics"], facts["steps"]
    found = [
        ("ready after", f"{facts['ready_seconds']:.1f} s"),
        ("steps", f"{count(steps['seen'])}, {ms(steps['ms'])} ms"),
        ("/health", f"{plural(health['asked'], 'time')}, {ms(health['p50'])} ms, {ms(health['max'])} at most"),
        ("/metrics", f"{metrics['most_running']:.0f} running, {percent(metrics['most_used'])} of the pool at most"),
        ("afterwards", f"{metrics['running_afterwards']:.0f} running, {percent(metrics['used_afterwards'])}"),
        ("aborted", f"{metrics['aborted']:.0f}"),
    ]
    if steps["missed"]:
        found.append(("steps not told", count(steps["missed"])))
    return found


def _verdict(facts: dict[str, Any]) -> Text:
    if facts["identical"]:
        return Text.assemble(("✓ identical", GOOD), ": the first client's story, in the crowd and alone")
    return Text("✗ the first client's story is another one alone", TROUBLE)
