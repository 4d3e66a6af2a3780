"""The screen of `forge bench serve`: throughput, then a table of latencies."""

from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge.bench.serve import METRICS, PERCENTILES, ServeBenchmark, goodput, output_tokens, percentile
from forge.views.figures import count, percent, rate
from forge.views.palette import QUIET, TITLE, TROUBLE
from forge.views.terminal import print_table
from forge.views.text import one_line

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end to end"}


def print_serve_benchmark(console: Console, result: ServeBenchmark) -> None:
    plan, good = result.plan, result.good
    speed = f"{plan.request_rate:g} requests/s" if plan.request_rate else "as fast as they are answered"
    console.print(Text(f"{plan.num_prompts} requests to {one_line(result.model)}, {plan.concurrency} at once", TITLE))
    console.print(Text(f"{plan.input_tokens} tokens in, {plan.output_tokens} out, {speed}", QUIET))
    if failed := len(result.requests) - len(good):
        first = next(one.error or "no text" for one in result.requests if one not in good)
        console.print(Text(f"{count(failed)} failed, the first with {one_line(first)}", TROUBLE))
    if not good:
        return
    console.print()
    for name, value in _throughput(result):
        console.print(Text(f"{name:<24}{value}"))
    console.print()
    print_table(console, _latencies(result, "ms"))
    if result.peer is not None and result.peer.good:
        print_table(console, _latencies(result.peer, "ms, the peer"))
    if result.health_ms:
        health = f"p50 {percentile(result.health_ms, 50):.1f}, p99 {percentile(result.health_ms, 99):.1f} ms"
        console.print(Text(f"/health meanwhile: {health}", QUIET))
    waited = f"the server's first answer came after {result.ready_after:.2f} s, "
    console.print(Text(f"{waited}the client took {percent(result.client_cpu_share)} of one CPU", QUIET))


def _throughput(result: ServeBenchmark) -> list[tuple[str, str]]:
    good, seconds = result.good, result.duration
    tokens_in = sum(one.prompt_tokens or result.plan.input_tokens for one in good)
    tokens_out = sum(map(output_tokens, good))
    lines = [
        ("requests per minute", rate(60 * len(good) / seconds)),
        ("input tokens/s", rate(tokens_in / seconds)),
        ("output tokens/s", rate(tokens_out / seconds)),
    ]
    if result.turns:
        lines += _comparison(result)
    if (met := goodput(result)) is not None:
        lines.append(("goodput, requests/s", rate(met)))
    return lines


def _comparison(result: ServeBenchmark) -> list[tuple[str, str]]:
    """Turn by turn, against another server or the engine alone: the median, the least and the most."""
    ratios, other = result.ratios, rate(result.other_tokens_per_second)
    if result.peer is None:
        middle, least, most = (percent(share) for share in (median(ratios), ratios[0], ratios[-1]))
        return [("the engine's own", other), ("share of it", f"{middle} ({least} to {most})")]
    failed = len(result.peer.requests) - len(result.peer.good)
    lines = [("the peer's", other + (f", {count(failed)} failed" if failed else ""))]
    return [*lines, ("times the peer", f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")]


def _latencies(result: ServeBenchmark, title: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(title)
    for share in PERCENTILES:
        table.add_column(f"p{share}", justify="right")
    for metric in METRICS:
        values = result.values(metric)
        if values:
            table.add_row(_NAMES[metric], *(f"{percentile(values, share):.2f}" for share in PERCENTILES))
    return table
