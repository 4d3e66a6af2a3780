"""`forge trace-scheduler`: many requests at once, and what the scheduler decides in every step, with its reasons."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.cli.options import OutputArgs
from forge.cli.run_control import (
    INTERRUPTED,
    Found,
    StepSubscriber,
    advance,
    create_llm,
    end_record,
    new_history,
)
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.views.report import Report
from forge.views.run_summary import print_serving, print_tenants, print_throughput, serving_object, tenant_objects
from forge.views.terminal import can_redraw, open_console
from forge.views.traffic import serving_view
from forge.workload.requests import Arrival, Range, WorkloadRun, make_workload, recorded_requests, recorded_workload

if TYPE_CHECKING:
    from rich.console import Console

    from forge.llm import LLM
    from forge.workload.requests import Workload

_WORKLOAD = "Requests"


@command
def trace_scheduler(
    requests: Annotated[
        int, typer.Option("--requests", "-n", help="How many requests.", rich_help_panel=_WORKLOAD)
    ] = 64,
    arrival: Annotated[
        str,
        typer.Option(
            "--arrival",
            help="all at once, poisson:20 (a second, by the clock on the wall), or every:3 (one in 3 steps).",
            rich_help_panel=_WORKLOAD,
        ),
    ] = "all",
    prompt_tokens: options.PromptTokensOption = "16:64",
    max_tokens: options.OutputTokensOption = "64",
    seed: options.WorkloadSeedOption = 0,
    workload: options.WorkloadOption = None,
    *,
    engine_args: Annotated[EngineArgs, Takes(kv="paged")],
    output: Annotated[OutputArgs, Takes(without="show pace")],
    tenants: Annotated[
        str | None,
        typer.Option(
            "--tenants",
            help="Draft tokens a cycle of each tenant, 0 for none: 4,2,0 gives the requests in turn to three tenants.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    chart: Annotated[
        bool, typer.Option("--chart", help="Draw the throughput over time.", rich_help_panel="Output")
    ] = False,
) -> Found:
    """Run many requests at once and see who runs, who waits, and why.

    With --order priority each request draws a priority of 0, 1 or 2; a lower one is served first.

    [dim]forge trace-scheduler --requests 64 --num-blocks 48 --preempt lifo --preemption recompute --step[/dim]
    [dim]forge trace-scheduler --workload run.jsonl --max-num-seqs 4[/dim]
    """
    limits = (
        tuple(options.parse_numbers(tenants, "--tenants", "4,2,0", "numbers of draft tokens", 0)) if tenants else ()
    )
    prompt_range = Range.parse(prompt_tokens, "--prompt-tokens")
    output_range = Range.parse(max_tokens, "--max-tokens")
    arrivals = Arrival.parse(arrival)
    if workload is not None:
        recorded_requests(workload)  # a wrong file is refused before the model is loaded
    subscriber = StepSubscriber(output.trace, output.step)
    llm = create_llm(engine_args)
    priorities = engine_args.order == "priority"
    if workload is not None:
        planned = recorded_workload(workload, llm.tokenizer, seed)
    else:
        planned = make_workload(
            llm.tokenizer, requests, prompt_range, output_range, arrivals, priorities=priorities, seed=seed
        )
    planned = replace(
        planned,
        requests=tuple(
            replace(request, num_speculative_tokens=limits[number % len(limits)]) if limits else request
            for number, request in enumerate(planned.requests)
        ),
    )
    return _run(llm, planned, subscriber, output, limits, chart)


def _run(
    llm: "LLM",
    workload: "Workload",
    subscriber: StepSubscriber,
    output: OutputArgs,
    tenants: tuple[int, ...],
    chart: bool,
) -> Found:
    engine = llm.engine
    history = new_history(llm, engine)
    run = WorkloadRun(engine, workload)
    console = open_console()
    quiet = output.json or subscriber.steps or not (output.lines or can_redraw(console))
    with serving_view(console, history, quiet) as view:
        driven = advance(llm, engine, run, view.step, subscriber, history)
    if not history.records and run.refused:
        raise UsageError(f"no request can run: {run.refused[0][1]}")
    history.end([end_record(output) for output in run.outputs])
    if output.svg is not None:
        from forge.views.picture import save_serving

        save_serving(output.svg, history)
    requests = history.requests()
    numbered = [(int((request.request_id or "0").rpartition("-")[2]), request) for request in requests]
    by_tenant = [
        (limit, [request for number, request in numbered if number % len(tenants) == tenant])
        for tenant, limit in enumerate(tenants)
    ]

    def draw(console: "Console") -> None:
        print_serving(console, history, requests)
        if chart:
            print_throughput(console, history.records)
        print_tenants(console, by_tenant)

    return Report(
        serving_object(history.label, history.records, requests) | {"tenants": tenant_objects(by_tenant)},
        draw,
        INTERRUPTED if driven.interrupted and not driven.left else 0,
    )
