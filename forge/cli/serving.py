"""`forge serving`: chapter 9. Its experiment: a real server, and clients who read, leave, and read late."""

import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.chapters import OnlyOption, PauseOption, read_chapter, reads_chapter
from forge.cli.running import Found
from forge.cli.serve import require_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forge.bench.clients import Crowd, Crowded
    from forge.bench.server_process import ServerProcess
    from forge.trace.records import StepRecord
    from forge.views.report import Report

_CLIENTS = "Clients"
LAST_STEPS = 2.0
"""Seconds that what a server told last may take to come in."""


def serving(
    ctx: typer.Context,
    clients: Annotated[
        int, typer.Option("--clients", "-n", help="Who read, beside two who do not.", rich_help_panel=_CLIENTS)
    ] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of each story.", rich_help_panel=_CLIENTS)] = 256,
    every: Annotated[
        float, typer.Option("--every", help="Milliseconds between two of them.", rich_help_panel=_CLIENTS)
    ] = 20.0,
    model: options.ModelOption = "tales",
    kv: options.KvOption = "prefix",
    device: options.DeviceOption = None,
    threads: options.ThreadsOption = None,
    num_blocks: options.NumBlocksOption = None,
    max_num_seqs: options.MaxNumSeqsOption = None,
    only: OnlyOption = None,
    pause: PauseOption = True,
    json: options.JsonOption = False,
) -> Found:
    """9. One loop, many clients: a server, and what those who use it see.

    [dim]forge serving --only run --clients 16[/dim]
    """
    from forge.bench.clients import Crowd
    from forge.errors import UsageError

    require_server()
    if clients < 1 or max_tokens < 1 or not 0 <= every <= 10_000:
        raise UsageError("--clients and --max-tokens are at least 1, --every 0 to 10,000 ms")
    if reads_chapter(only, json):
        return read_chapter(ctx, pause)
    given = options.model_options(
        device=device, threads=threads, num_blocks=num_blocks, max_num_seqs=max_num_seqs, model=model, kv=kv
    )
    spelled = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    report = _measure(Crowd(clients, max_tokens, every / 1e3), spelled, model, kv, json)
    return report.as_json() if json else report


def _measure(crowd: "Crowd", spelled: "Sequence[str]", model: str, kv: str, quiet: bool) -> "Report":
    from forge.bench.server_process import ServerProcess
    from forge.views.bench import BenchProgress
    from forge.views.clients import clients_object, print_clients
    from forge.views.report import Report
    from forge.views.summary import RunLabel
    from forge.views.terminal import can_redraw, open_console, open_error_console
    from forge.views.traffic import Traffic

    with ServerProcess(spelled) as server:
        with BenchProgress(open_error_console()) as progress:
            progress("starting forge serve")
            server.wait_until_ready()
        console = open_console()
        shows = can_redraw(console) and not quiet
        with Traffic(console, RunLabel(model, kv, "", "")) if shows else nullcontext() as traffic:
            result = _let_them_come(server, crowd, traffic.step if traffic else lambda record: None)
    facts = clients_object(result, model, kv)
    return Report(facts, lambda console: print_clients(console, result, facts), 0 if facts["identical"] else 1)


def _let_them_come(server: "ServerProcess", crowd: "Crowd", on_step: "Callable[[StepRecord], None]") -> "Crowded":
    """Follow the server's steps while the clients are there, and until it has ended."""
    import asyncio
    import time
    from dataclasses import replace

    from forge.bench.clients import Crowded, visit_all

    watcher = _Watcher(server.url, on_step)
    try:
        found, signalled = asyncio.run(visit_all(server.url, crowd, server.terminate, watcher.has_begun))
        status = server.wait()
        seconds = time.perf_counter() - signalled
        watcher.wait()
    finally:
        watcher.look_away()
    ending = replace(found.pop("ending"), exit_status=status, seconds=seconds)
    return Crowded(crowd, **found, ending=ending, records=tuple(watcher.records), ready_seconds=server.ready_seconds)


class _Watcher:
    """Follows a server's steps in a thread of its own, as `forge watch` does."""

    def __init__(self, url: str, on_step: "Callable[[StepRecord], None]"):
        self.records: list[StepRecord] = []
        self._url, self._on_step = url, on_step
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def has_begun(self) -> bool:
        return bool(self.records)

    def wait(self) -> None:
        """The server has ended: take in what it told last."""
        self._thread.join(LAST_STEPS)

    def look_away(self) -> None:
        """Nothing is shown from here on."""
        self._on_step = lambda record: None

    def _follow(self) -> None:
        from forge.cli.watch import steps_of
        from forge.errors import ForgeError

        with suppress(ForgeError):  # the server is gone
            for record in steps_of(self._url, None):
                self.records.append(record)
                self._on_step(record)
