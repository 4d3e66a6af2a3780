"""9. One loop, many clients: a server, and what those who use it see.

[dim]forge serving --only run --clients 16[/dim]
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from statistics import mean
from typing import Annotated, Any

from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.serve import require_server, steps_of
from forge.engine_args import EngineArgs
from forge.errors import ForgeError, UsageError
from forge.experiments.serving.clients import Crowd, Crowded, Ending, Visit, visit_all
from forge.option import flag_of, option
from forge.server.server_process import ServerProcess
from forge.trace.records import StepRecord
from forge.trace.totals import percentile
from forge.views.charts import sparkline
from forge.views.formatting import count, ms, percent, plural
from forge.views.json_output import as_object
from forge.views.metrics import flowing, verdict
from forge.views.palette import ACCENT, QUIET
from forge.views.progress import progress_line
from forge.views.screen import Hanging, Part, Report, Table, question, report
from forge.views.summary import RunLabel
from forge.views.terminal import can_redraw, open_console
from forge.views.text import one_line
from forge.views.traffic import Traffic

_CLIENTS = "Clients"
_SERVER = "model kv device threads num_blocks max_num_seqs"
"""The options of the engine that its server is started with."""
LAST_STEPS = 2.0
"""Seconds that what a server told last may take to come in."""
QUESTION = "What do the clients of one loop see?"
STRIP_WIDTH = 50
ROWS_SHOWN = 10


@dataclass(frozen=True)
class ClientArgs:
    """The clients: how many, how often, and how many tokens each."""

    clients: int = option(8, "Who read, beside three who do not.", _CLIENTS, flags="--clients -n")
    max_tokens: int = option(256, "Of each story.", _CLIENTS)
    every: float = option(20.0, "Milliseconds between two of them.", _CLIENTS)

    def __post_init__(self) -> None:
        if self.clients < 1 or self.max_tokens < 1 or not 0 <= self.every <= 10_000:
            raise UsageError("--clients and --max-tokens are at least 1, --every 0 to 10,000 ms")


@experiment()
def serving(
    asked: ClientArgs,
    engine: Annotated[EngineArgs, Takes(_SERVER, kv="prefix", max_num_seqs=64)],
    json: options.JsonOption = False,
) -> Experiment:
    require_server()
    crowd = Crowd(asked.clients, asked.max_tokens, asked.every / 1e3, max_queue=max(64, asked.clients + 8))
    settings = {name: getattr(engine, name) for name in _SERVER.split()} | {"max_queue": crowd.max_queue}
    spelled = [word for name, value in settings.items() if value is not None for word in (flag_of(name), str(value))]
    return Experiment(lambda: _measure(crowd, spelled, str(engine.model), str(engine.cache), json))


def _measure(crowd: Crowd, spelled: Sequence[str], model: str, kv: str, quiet: bool) -> Report:
    with ServerProcess(spelled) as server:
        with progress_line() as progress:
            progress("starting forge serve")
            server.wait_until_ready()
        console = open_console()
        shows = can_redraw(console) and not quiet
        with Traffic(console, RunLabel(model, kv, "", "")) if shows else nullcontext() as traffic:
            result = _let_them_come(server, crowd, traffic.step if traffic else lambda record: None)
    facts = clients_object(result, model, kv)
    return report(facts, lambda: screen(result, facts), 0 if facts["identical"] else 1)


def _let_them_come(server: ServerProcess, crowd: Crowd, on_step: Callable[[StepRecord], None]) -> Crowded:
    """Run the clients, and follow the server's steps until it has ended."""
    records: list[StepRecord] = []
    is_over = threading.Event()

    def follow() -> None:
        with suppress(ForgeError):  # the server is gone
            for record in steps_of(server.url, None):
                records.append(record)
                if not is_over.is_set():
                    on_step(record)

    following = threading.Thread(target=follow, daemon=True)
    following.start()
    try:
        observed, (stream, refused, signalled) = asyncio.run(
            visit_all(server.url, crowd, server.terminate, lambda: bool(records))
        )
        ending = Ending(stream, refused, server.wait(), time.perf_counter() - signalled)
        following.join(LAST_STEPS)
    finally:
        is_over.set()
    return Crowded(crowd, **observed, ending=ending, records=tuple(records), ready_seconds=server.ready_seconds)


def clients_object(result: Crowded, model: str, kv: str) -> dict[str, Any]:
    """Return the facts for `--json`. Times are milliseconds; a figure that this run does not have is None."""
    readers = result.of("reads")
    gaps = [gap for visit in readers for gap in visit.itls_ms]
    return {
        "model": model,
        "kv": kv,
        "ready_seconds": result.ready_seconds,
        "num_clients": len(result.visits),
        "max_tokens": result.crowd.max_tokens,
        "first_ms": _spread(visit.ttft_ms for visit in readers),
        "per_token_ms": _spread(visit.per_token_ms for visit in readers),
        "longest_gap_ms": max(gaps, default=None),
        "end_to_end_ms": _spread(visit.e2el_ms for visit in readers),
        "clients": [visit_object(visit) for visit in result.visits],
        "alone": visit_object(result.alone),
        "identical": result.alone.text != "" and result.alone.text == readers[0].text,
        "steps": _steps_object(result),
        "leaver": _leaver_object(result),
        "late": {
            "tokens": result.late.completion_tokens,
            "done_after_ms": result.late.engine_ms,
            "began_to_read_after_ms": (result.late.began_to_read - result.late.started) * 1e3,
            "all_read_after_ms": result.late.e2el_ms,
        },
        "overload": as_object(result.overload),
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
            "tokens": result.ending.stream.completion_tokens,
            **as_object(result.ending, without=("stream",)),
        },
    }


def visit_object(visit: Visit) -> dict[str, Any]:
    gaps = visit.itls_ms if visit.kind != "late" else []  # what lay there already says nothing
    return {
        "kind": visit.kind,
        "first_ms": visit.ttft_ms,
        "per_token_ms": visit.per_token_ms if gaps else None,
        "longest_gap_ms": max(gaps, default=None),
        "end_to_end_ms": visit.e2el_ms,
        "events": len(visit.chunks),
        "tokens": visit.completion_tokens,
        "finish_reason": visit.finish_reason,
        "text": visit.text,
    }


def _spread(measured: Iterable[float | None]) -> dict[str, float | None]:
    """Return the median, the 95th percentile and the maximum of the values that are not None."""
    values = [value for value in measured if value is not None]
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
        "rows": sum(record.tokens_computed for record in records),
        "preemptions": sum(len(record.preempted) for record in records),
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
        "events": len(visit.chunks),
        "steps": visit.num_steps,
        "steps_after": result.steps_after_leaving,
        "blocks": held,
    }


def screen(result: Crowded, facts: dict[str, Any]) -> Iterator[Part]:
    """Draw the whole experiment. `facts`: from `clients_object`."""
    crowd = result.crowd
    come = f"{plural(facts['num_clients'], 'client')}, one every {crowd.every * 1e3:.0f} ms"
    served = f"kv {facts['kv']} · {one_line(facts['model'])}"
    yield from question(QUESTION, f"{come}, {plural(crowd.max_tokens, 'token')} each · {served}")
    yield from (*_strips(result), None)
    clients = [client | {"number": number} for number, client in enumerate(facts["clients"][:ROWS_SHOWN], 1)]
    columns = ["client: {number} {kind}", "TTFT, ms: {first_ms:ms}", "TPOT, ms: {per_token_ms:ms}"]
    columns += ["longest: {longest_gap_ms:ms}", "all, ms: {end_to_end_ms:,.0f}", "tokens: {tokens:count}"]
    yield Table.of(clients, *columns, "events: {events:count}", "ended: {finish_reason}", lefts=(7,))
    if (left := len(result.visits) - ROWS_SHOWN) > 0:
        yield f"… and {plural(left, 'more reader')}"
    yield from (None, *(Hanging(line, 10) for line in _sentences(facts)), None)
    yield from (lambda width: flowing(_figures(facts), width), None)
    same, differs = "the first client's story, in the crowd and alone", "the first client's story is another one alone"
    yield verdict(facts["identical"], same, differs)


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


def _sentences(facts: dict[str, Any]) -> list[Text]:
    leaver, late, ending, overload = facts["leaver"], facts["late"], facts["ending"], facts["overload"]
    after = plural(leaver["steps_after"], "step")
    told = [
        (
            "leaves",
            f"{plural(leaver['steps'], 'step')} for it, {after} after it hung up"
            + (f"; {plural(leaver['blocks'], 'block')} given back" if leaver["blocks"] else ""),
        ),
        (
            "late",
            f"all was there after {late['done_after_ms'] or 0:,.0f} ms, it read from "
            f"{late['began_to_read_after_ms']:,.0f} ms on",
        ),
        (
            "overload",
            f"{plural(overload['prompts'], 'prompt')} more at once: {overload['status']} after {ms(overload['ms'])} ms"
            + (f", come again in {overload['retry_after']} s" if overload["retry_after"] else "")
            + f"; 1 prompt when the others had gone: {overload['status_later']}",
        ),
        (
            "SIGTERM",
            f"{plural(ending['tokens'] or 0, 'token')} for who was there, {ending['refused']} for who came; "
            f"exit {ending['exit_status']} after {ending['seconds']:.1f} s",
        ),
    ]
    return [Text.assemble((f"{name:<10}", QUIET), text) for name, text in told]


def _figures(facts: dict[str, Any]) -> list[tuple[str, str]]:
    health, metrics, steps = facts["health"], facts["metrics"], facts["steps"]
    figures = [
        ("ready after", f"{facts['ready_seconds']:.1f} s"),
        ("steps", f"{count(steps['seen'])}, {ms(steps['ms'])} ms"),
        ("/health", f"{plural(health['asked'], 'time')}, {ms(health['p50'])} ms, {ms(health['max'])} at most"),
        ("/metrics", f"{metrics['most_running']:.0f} running, {percent(metrics['most_used'])} of the pool at most"),
        ("afterwards", f"{metrics['running_afterwards']:.0f} running, {percent(metrics['used_afterwards'])}"),
        ("aborted", f"{metrics['aborted']:.0f}"),
    ]
    if steps["missed"]:
        figures.append(("steps not told", count(steps["missed"])))
    return figures
