"""`forge trace-scheduler`: many requests at once, and what the scheduler decides in every step, with its reasons."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Annotated

from forge.cli.arguments import Takes, command
from forge.cli.options import OUTPUT, WORKLOAD, OutputArgs, RequestArgs, parse_numbers
from forge.cli.run_control import Found, StepSubscriber, create_llm, drive, end_record, exit_status, new_history
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import option
from forge.trace.timeline import RequestTimeline
from forge.views.run_summary import (
    Tenants,
    serving_object,
    serving_screen,
    tenant_objects,
    tenants_screen,
    throughput_screen,
)
from forge.views.screen import Part, report
from forge.views.terminal import can_redraw, open_console
from forge.views.traffic import ServingView
from forge.workload.requests import WorkloadRun


@dataclass(frozen=True)
class TenantArgs:
    """To whom the requests belong, and whether a chart of the run is drawn."""

    tenants: str | None = option(
        None,
        "Draft tokens a cycle of each tenant, 0 for none: 4,2,0 gives the requests in turn to three tenants.",
        WORKLOAD,
    )
    chart: bool = option(False, "Draw the throughput over time.", OUTPUT)


@command
def trace_scheduler(
    asked: Annotated[RequestArgs, Takes(prompt_tokens="16:64")],
    engine_args: Annotated[EngineArgs, Takes(kv="paged")],
    output: Annotated[OutputArgs, Takes(without="show pace")],
    shared: TenantArgs,
) -> Found:
    """Run many requests at once and see who runs, who waits, and why.

    With --order priority each request draws a priority of 0, 1 or 2; a lower one is served first.

    [dim]forge trace-scheduler --requests 64 --num-blocks 48 --preempt lifo --preemption recompute --step[/dim]
    [dim]forge trace-scheduler --workload run.jsonl --max-num-seqs 4[/dim]
    """
    limits: list[int] = []
    if shared.tenants:
        limits = parse_numbers(shared.tenants, "--tenants", "4,2,0", "numbers of draft tokens", 0)
    subscriber = StepSubscriber(output.trace, output.step)
    llm, console = create_llm(engine_args), open_console()
    planned = asked.made(llm.tokenizer, priorities=engine_args.order == "priority")
    if limits:
        of_tenants = zip(planned.requests, cycle(limits), strict=False)
        requests = [replace(request, num_speculative_tokens=limit) for request, limit in of_tenants]
        planned = replace(planned, requests=tuple(requests))
    history, run = new_history(llm), WorkloadRun(llm.engine, planned)
    quiet = output.json or subscriber.steps or not (output.lines or can_redraw(console))
    with ServingView(console, history, quiet) as view:
        driven = drive(llm, run, view.step, subscriber)
    if not history.records and run.refused:
        raise UsageError(f"no request can run: {run.refused[0][1]}")
    history.end([end_record(output) for output in run.outputs])
    if output.svg is not None:
        from forge.views.picture import save_serving

        save_serving(output.svg, history)
    timelines = history.requests()
    by_tenant = _by_tenant(timelines, limits)

    def screen() -> Iterator[Part]:
        yield from serving_screen(history, timelines)
        yield from throughput_screen(history.records) if shared.chart else ()
        yield from tenants_screen(by_tenant)

    facts = serving_object(history.label, history.records, timelines) | {"tenants": tenant_objects(by_tenant)}
    return report(facts, screen, exit_status(driven))


def _by_tenant(requests: Sequence[RequestTimeline], limits: Sequence[int]) -> Tenants:
    numbered = [(int((request.request_id or "0").rpartition("-")[2]), request) for request in requests]
    return [
        (limit, [request for number, request in numbered if number % len(limits) == tenant])
        for tenant, limit in enumerate(limits)
    ]
