"""`forge cluster --part scale`: routers before more engines than this machine has cores, on a simulated clock."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from forge.cluster.simulation import SimulationOptions, SimulationResult, StepTime, simulate
from forge.views.formatting import count, ms, percent, rate
from forge.views.palette import QUIET, TITLE
from forge.views.progress import BenchProgress
from forge.views.report import Report
from forge.views.terminal import new_table, open_error_console, print_lines, print_table
from forge.workload.conversations import TraceShape

REPLICAS = (2, 8, 32)
REQUESTS = 3000
COMPARED = ("round-robin", "least-tokens", "prefix-estimate", "prefix")
QUESTION = "What does a router find when there are more engines?"


def measure_scale(routers: Sequence[str] | None) -> Report:
    """Every router with every number of engines. The load grows with them, so that each is as busy as the others."""
    options, results = SimulationOptions(trace=TraceShape(num_requests=REQUESTS)), []
    with BenchProgress(open_error_console()) as progress:
        for replicas in REPLICAS:
            for router in routers or COMPARED:
                progress(f"{replicas} engines, {router}")
                results.append(simulate(replace(options, replicas=replicas, router=router)))
    facts = scale_object(results)
    return Report(facts, lambda console: print_scale(console, facts, options.step_time))


def scale_object(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """By router and number of engines. Times are simulated, but for the decisions per second."""
    found: dict[str, Any] = {"requests": results[0].num_requests, "routers": {}}
    for result in results:
        by_size = found["routers"].setdefault(result.options.router.replace("-", "_"), {})
        by_size[f"of_{result.options.replicas}"] = {
            "replicas": result.options.replicas,
            "hit_rate": result.hit_rate,
            "busiest_over_mean": result.balance,
            "ttft_p50_ms": result.ttft_ms(0.5),
            "ttft_p99_ms": result.ttft_ms(0.99),
            "decisions_per_second": result.decisions_per_second,
            "known_blocks": result.routing_entries,
        }
    return found


def print_scale(console: Console, facts: dict[str, Any], step_time: StepTime) -> None:
    console.print(Text(QUESTION, TITLE))
    head = (
        f"{count(facts['requests'])} requests of conversations and agents, simulated: a step takes "
        f"{step_time.fixed:g} ms, and {step_time.prefill_token:g} ms for each token"
    )
    print_lines(console, [Text(head, QUIET), Text("")])
    table = new_table("router", "engines", "found", "busiest", "TTFT p50", "p99", "decisions/s")
    for router, by_size in facts["routers"].items():
        for number, one in enumerate(by_size.values()):
            table.add_row(
                router.replace("_", "-") if number == 0 else "",
                count(one["replicas"]),
                percent(one["hit_rate"]),
                f"{one['busiest_over_mean']:.2f}",
                ms(one["ttft_p50_ms"]),
                ms(one["ttft_p99_ms"]),
                rate(one["decisions_per_second"]),
            )
    print_table(console, table)
    note = "busiest: requests over the mean. Milliseconds are simulated; decisions per second are this machine's."
    print_lines(console, [Text(""), Text(note, QUIET)])
