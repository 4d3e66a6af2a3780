"""`forge bench serve --concurrency 1,4,16,64`: the same requests with more and more of them under way.

One row per level, and latency drawn over throughput: from the level on that only goes up, further clients only wait.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from forge.errors import ForgeError
from forge.experiments.bench.results import Facts
from forge.experiments.bench.serve import ServeBenchmark, percentile, serve_object
from forge.experiments.bench.tables import Part, Table, draw, title, trouble
from forge.views.charts import row_of, throughput_plot
from forge.views.formatting import count, rate
from forge.views.palette import ACCENT
from forge.views.text import one_line

_SHARES = (50, 95, 99)
_WIDTH, _HEIGHT = 60, 8


def sweep_object(results: Sequence[ServeBenchmark]) -> Facts:
    return {"levels": [serve_object(one) for one in results]}


def sweep_screen(results: Sequence[ServeBenchmark]) -> Iterator[Part]:
    """A row per level of concurrency, and latency over throughput."""
    plan = results[0].plan
    yield title(f"{plan.num_prompts} requests to {one_line(results[0].model)}, by how many are under way")
    yield f"{plan.input_tokens} tokens in, {plan.output_tokens} out, prefix reuse {plan.prefix_reuse}"
    for one in results:
        if failed := len(one.requests) - len(one.good):
            yield trouble(f"{count(failed)} failed with {one.plan.concurrency} at once")
    good = [one for one in results if one.good]
    if not good:
        return
    facts = [serve_object(one) for one in good]
    speeds = [
        (f"{count(one.plan.concurrency)} at once", rate(found["requests_per_minute"]), rate(found["output_throughput"]))
        for one, found in zip(good, facts, strict=True)
    ]
    for metric, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "end to end")):
        rows = [
            (*speed, *(f"{percentile(values, share):.1f}" for share in _SHARES))
            for speed, one in zip(speeds, good, strict=True)
            if (values := one.values(metric))
        ]
        if rows:
            headings = (f"{name}, ms", "requests/min", "tok/s", *(f"p{share}" for share in _SHARES))
            yield from (None, Table(headings, rows))
    yield None
    yield f"the server's first answer came after {results[0].ready_after:.2f} s"
    if len(good) > 1:
        yield from (None, title("End-to-end latency, median, over output tokens/s", style=""))
        yield from latency_over_throughput(good)


def latency_over_throughput(results: Sequence[ServeBenchmark]) -> list[Text]:
    """Each level's number at its place: to the right more tokens per second, upwards more milliseconds."""
    points = [(serve_object(one)["output_throughput"], percentile(one.values("e2el"), 50)) for one in results]
    speed, latency = (max(values) for values in zip(*points, strict=True))
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for one, (x, y) in zip(results, points, strict=True):
        name = str(one.plan.concurrency)
        start = min(round(x / speed * (_WIDTH - 1)), _WIDTH - len(name))
        rows[row_of(y, latency, _HEIGHT)][start : start + len(name)] = name
    top, axis = f"{latency:,.1f} ms", f"{speed:,.0f} tok/s"
    names = [top, *[""] * (_HEIGHT - 2), "0"]
    lines = [Text(f"{name:>{len(top)}} │{''.join(row)}") for name, row in zip(names, rows, strict=True)]
    return [*lines, Text(" " * (len(top) + 1) + "└" + "─" * _WIDTH), Text(" " * (len(top) + 2) + axis.rjust(_WIDTH))]


def chart_parts(result: ServeBenchmark) -> list[Part]:
    """Throughput over the time of a measurement, by the moments at which text came."""
    began = min((one.started for one in result.good), default=0.0)
    times = [moment - began for one in result.good for moment in one.chunks]
    if not times:
        return []
    plot = throughput_plot(times, max(times), _WIDTH + 16, ACCENT)
    return [None, title("Throughput over time", style=""), *plot]


def save_logs(folder: Path, results: Sequence[ServeBenchmark]) -> None:
    """Each level's figures and every request's times in a file of their own. Raises `ForgeError` for a bad folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in results:
            found: dict[str, Any] = serve_object(one)
            path = folder / f"{found['date']}-concurrency-{one.plan.concurrency}.json"
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as error:
        raise ForgeError(f"{folder}: cannot write the logs: {error.strerror or error}") from None


def save_svg(path: Path, parts: Sequence[Part]) -> None:
    """The screen as a picture. Raises `ForgeError` if it cannot be written."""
    from forge.views.picture import picture_console, save_picture

    console = picture_console()
    draw(console, parts)
    save_picture(console, path, "forge bench serve")
