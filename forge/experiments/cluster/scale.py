"""`forge cluster --part scale`: routers before more engines than this machine has cores, on a simulated clock."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from forge.cluster.simulation import SimulationOptions, SimulationResult, StepTime, simulate
from forge.trace.totals import percentile
from forge.views.formatting import count
from forge.views.progress import progress_line
from forge.views.screen import Part, Report, Table, question, report
from forge.workload.conversations import TraceShape

REPLICAS = (2, 8, 32)
REQUESTS = 3000
COMPARED = ("round-robin", "least-tokens", "prefix-estimate", "prefix")
QUESTION = "What does a router find when there are more engines?"


def measure_scale(routers: Sequence[str]) -> Report:
    """Simulate every router with every number of engines. The load grows with their number, so each engine stays
    equally busy."""
    options, results = SimulationOptions(trace=TraceShape(num_requests=REQUESTS)), []
    with progress_line() as progress:
        for replicas in REPLICAS:
            for router in routers or COMPARED:
                progress(f"{replicas} engines, {router}")
                results.append(simulate(replace(options, replicas=replicas, router=router)))
    facts = scale_object(results)
    return report(facts, lambda: screen(facts, options.step_time))


def scale_object(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Return the facts by router and number of engines. Times are simulated, except the decisions per second."""
    facts: dict[str, Any] = {"requests": results[0].num_requests, "routers": {}}
    for result in results:
        by_size = facts["routers"].setdefault(result.options.router.replace("-", "_"), {})
        by_size[f"of_{result.options.replicas}"] = {
            "replicas": result.options.replicas,
            "hit_rate": result.hit_rate,
            "busiest_over_mean": result.balance,
            "ttft_p50_ms": percentile(result.ttft, 0.5),
            "ttft_p99_ms": percentile(result.ttft, 0.99),
            "decisions_per_second": result.decisions_per_second,
            "known_blocks": result.routing_entries,
        }
    return facts


def screen(facts: dict[str, Any], step_time: StepTime) -> Iterator[Part]:
    yield from question(
        QUESTION,
        f"{count(facts['requests'])} requests of conversations and agents, simulated: a step takes "
        f"{step_time.fixed:g} ms, and {step_time.prefill_token:g} ms for each token",
    )
    sizes = [{"router": name} | figures for name, by_size in facts["routers"].items() for figures in by_size.values()]
    columns = ["router: {router:dashed}", "engines: {replicas:count}", "found: {hit_rate:percent}"]
    columns += ["busiest: {busiest_over_mean:.2f}", "TTFT p50: {ttft_p50_ms:ms}", "p99: {ttft_p99_ms:ms}"]
    dashed = {"dashed": lambda name: name.replace("_", "-")}
    yield Table.of(sizes, *columns, "decisions/s: {decisions_per_second:rate}", formats=dashed, grouped=1)
    note = "busiest: requests over the mean. Milliseconds are simulated; decisions per second are this machine's."
    yield from (None, note)
