"""`forge bench serve`: what clients of an OpenAI-compatible server see, forge's or another.

Each request is a prompt of random tokens, or of random common words for servers that take no token ids, streamed. What
counts as a token is the server's own count (its `usage`), for a server may send several in one event. Times are the
field's: TTFT from sending to the first text, TPOT the mean between tokens after the first, ITL between one event and
the next, E2EL to the end. The client shares the machine with the server, so its own share of a CPU is part of the
result.

Two servers are compared in turns: the requests come in parts, and each part goes to the one and then to the other, so
that a machine that is slow for a while is slow for both. So are a server and the engine beneath it.
"""

import asyncio
import json
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich.text import Text

from forge.bench import kit
from forge.bench.cases import unique_prompts
from forge.bench.http_client import HttpClient, ServerProblem, Timed
from forge.bench.kit import MEASURE, Facts, Progress, option
from forge.bench.process import BenchProcess, Launch
from forge.cli.arguments import Takes, command
from forge.cli.options import parse_numbers
from forge.engine_args import EngineArgs
from forge.errors import UsageError, file_error
from forge.option import option as field_option
from forge.views.charts import row_of, throughput_plot
from forge.views.formatting import count, percent
from forge.views.palette import ACCENT
from forge.views.progress import progress_line
from forge.views.screen import Part, Report, Table, fill, report, title, trouble
from forge.views.text import one_line
from forge.workload.requests import RecordedRequest, recorded_requests

PERCENTILES = (50, 90, 95, 99)
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end to end"}
"""Each metric's name in the JSON → its name on the screen."""
DATASETS = ("random", "unique", "words")
WORDS = "time year people way day man thing woman life child world school state family student group country problem"
"""Each a token of most vocabularies, with the space before it."""
COMMON_TEXTS = 4
"""How many different texts prompts begin with, with `--prefix-reuse`."""
_WIDTH, _HEIGHT = 60, 8

Prompt = str | list[int]
_Piece = TypeVar("_Piece")


@dataclass(frozen=True)
class ServePlan:
    """The requests of the benchmark, and how they are sent."""

    url: str = field_option("http://127.0.0.1:8080", "Any OpenAI-compatible server.")
    model: str | None = field_option(None, "As the server calls it.", shown="its first", flags="--model -m")
    dataset: str = field_option("random", "random token ids, unique: no two begin alike, or words.", MEASURE)
    input_tokens: int = field_option(128, "", MEASURE)
    output_tokens: int = field_option(32, "", MEASURE)
    num_prompts: int = field_option(400, "", MEASURE)
    prefix_reuse: str = field_option(
        "0", "Share of a prompt that others begin with: 0.5, or with weights 0:4,0.5:4,0.9:2.", MEASURE
    )
    concurrency: int = field_option(4, "Requests under way at most.", MEASURE)
    request_rate: float | None = field_option(None, "Requests per second.", MEASURE, shown="as answered")
    """Arrivals are a Poisson process; None sends as `concurrency` allows."""
    goodput: Sequence[str] = field_option((), "A goal, such as ttft:100; may be repeated.", MEASURE)
    seed: int = field_option(0, "", MEASURE)
    probe_health: bool = field_option(False, "Time /health meanwhile, twenty times a second.", MEASURE)
    turns: int = field_option(7, "Of --engine or --peer: the parts that the requests are divided into.", MEASURE)
    api_key: str | None = field_option(None, "", envvar="FORGE_API_KEY")
    workload: Path | None = field_option(
        None, "Replay the arrivals and lengths of a run that --trace recorded.", MEASURE, metavar="FILE"
    )
    recorded: tuple[RecordedRequest, ...] = ()
    """The requests of `workload`, in the order of their arrival."""
    token_range: tuple[int, int] = (256, 4000)
    """Random prompts are made of these token ids."""

    def __post_init__(self):
        counts = ("input_tokens", "output_tokens", "num_prompts", "concurrency", "turns")
        kit.at_least_one(**{name: getattr(self, name) for name in counts})
        if self.request_rate is not None and not self.request_rate > 0:
            raise UsageError(f"--request-rate must be above 0, got {self.request_rate:g}")
        if self.dataset not in DATASETS:
            raise UsageError(f"unknown dataset {self.dataset!r}; supported: {', '.join(DATASETS)}")
        parse_goodput(self.goodput)
        parse_reuse(self.prefix_reuse)

    def prompts(self) -> list[Prompt]:
        """Return the prompts; the same for the same seed."""
        rng, (low, high), length = random.Random(self.seed), self.token_range, range(self.input_tokens)
        if self.recorded:
            return [[rng.randrange(low, high) for _ in range(request.prompt_tokens)] for request in self.recorded]
        if self.dataset == "words":
            words = WORDS.split()
            texts = self._with_reuse([[rng.choice(words) for _ in length] for _ in range(self.num_prompts)])
            return [" ".join(text) for text in texts]
        if self.dataset == "unique":
            return [*unique_prompts(self.num_prompts, self.input_tokens, high, self.seed)]
        return list(self._with_reuse([[rng.randrange(low, high) for _ in length] for _ in range(self.num_prompts)]))

    def _with_reuse(self, prompts: list[list[_Piece]]) -> list[list[_Piece]]:
        """Return the same number and lengths; each begins with as much of one of a few common texts as its draw
        says."""
        shares, weights = zip(*parse_reuse(self.prefix_reuse), strict=True)
        if not any(shares):
            return prompts
        rng = random.Random(f"{self.seed}: reuse")
        common = prompts[:COMMON_TEXTS]
        prompts_reused = []
        for prompt in prompts:
            (share,), text = rng.choices(shares, weights), rng.choice(common)
            reused = round(share * len(prompt))
            prompts_reused.append([*text[:reused], *prompt[reused:]])
        return prompts_reused


@command
def bench_serve(
    plan: Annotated[ServePlan, Takes(without="concurrency")],
    concurrency: Annotated[
        str | None,
        option("Requests under way at most; several to compare: 1,4,16,64.", default="4, or all of a --workload"),
    ] = None,
    engine: Annotated[str | None, option("Run the same on this model without a server, in turns.")] = None,
    num_blocks: Annotated[int | None, option("For --engine.")] = None,
    peer: Annotated[str | None, option("Send the same to another server, in turns.")] = None,
    peer_model: Annotated[str | None, typer.Option(help="As the peer calls it.", show_default="its first")] = None,
    *,
    own: Annotated[EngineArgs, Takes("threads")],
    chart: Annotated[bool, option("Draw the throughput over time.")] = False,
    svg: Annotated[Path | None, option("Save what is shown as a picture.")] = None,
    log_dir: Annotated[Path | None, option("Keep every request's times in this folder.")] = None,
) -> Report:
    """What clients of a server see: TTFT, TPOT, ITL, end-to-end latency, throughput.

    [dim]forge bench serve --concurrency 64 --num-prompts 400[/dim]
    [dim]forge bench serve --concurrency 1,4,16,64 --prefix-reuse 0:4,0.5:4,0.9:2 --svg sweep.svg --log-dir logs[/dim]
    [dim]forge bench serve --workload run.jsonl[/dim]
    [dim]forge bench serve --concurrency 16 --num-prompts 112 --peer http://127.0.0.1:8081[/dim]
    """
    if peer is not None and engine is not None:
        raise UsageError("--peer and --engine are two comparisons: give one of them")
    plan = plan if plan.workload is None else replaying(plan, plan.workload)
    concurrency = str(len(plan.recorded) or 4) if concurrency is None else concurrency
    results, levels = [], parse_numbers(concurrency, "--concurrency", "1,4,16,64")
    with progress_line(lines=True) as progress:
        for level_plan in (replace(plan, concurrency=level) for level in levels):
            loading = {"num_blocks": num_blocks, "threads": own.threads}
            peer_plan = peer and replace(level_plan, url=peer, model=peer_model, api_key=None, probe_health=False)
            with engine_turns(engine, loading, level_plan) if engine else nullcontext() as turn:
                results.append(run(level_plan, progress, engine_turn=turn, peer=peer_plan or None))
    every = [serve_object(benchmark) for benchmark in results]
    if log_dir is not None:
        save_logs(log_dir, every)
    parts = list(sweep_screen(every) if len(every) > 1 else screen(every[0]))
    parts += [part for benchmark in results if chart for part in chart_parts(benchmark)]
    facts = {"levels": every} if len(every) > 1 else every[0]
    found = report(facts, lambda: parts, 0 if all(benchmark.good for benchmark in results) else 1)
    if svg is not None:
        from forge.views.picture import save_picture

        save_picture(svg, found.draw, "forge bench serve")
    return found


def replaying(plan: ServePlan, workload: Path) -> ServePlan:
    """Return the plan with the requests of a recorded run. Raises what `recorded_requests` does."""
    recorded = recorded_requests(workload)
    return replace(
        plan,
        recorded=recorded,
        input_tokens=round(fmean(request.prompt_tokens for request in recorded)),
        output_tokens=round(fmean(request.output_tokens for request in recorded)),
        num_prompts=len(recorded),
    )


@dataclass
class ServeBenchmark:
    """The results of the benchmark."""

    plan: ServePlan
    model: str
    requests: Sequence[Timed] = ()
    duration: float = 0.0
    """Seconds from the first request to the end of the last."""
    cpu_seconds: float = 0.0
    """CPU time of the client itself."""
    ready_after: float = 0.0
    """Seconds until the server answered for the first time."""
    health_ms: Sequence[float] = ()
    turns: Sequence[tuple[float, float]] = ()
    """Output tokens per second of the server, and of its peer or of the engine alone on the same requests right after,
    turn by turn; where that was asked for."""
    peer: "ServeBenchmark | None" = None
    """The results of the same requests to another server."""

    @property
    def good(self) -> list[Timed]:
        return [request for request in self.requests if request.error is None and request.chunks]

    @property
    def client_cpu_share(self) -> float:
        """The client's CPU time, as a share of one CPU."""
        return self.cpu_seconds / self.duration

    def values(self, metric: str) -> list[float]:
        """Return `ttft`, `tpot`, `itl` or `e2el` in milliseconds, of all requests that succeeded."""
        if metric == "itl":
            return [gap for request in self.good for gap in request.itls_ms]
        every = (getattr(request, f"{metric}_ms") for request in self.good)
        return [value for value in every if value is not None]


def percentiles(name: str, values: Sequence[float]) -> Facts:
    return {f"p{share}_{name}_ms": float(np.percentile(values, share)) for share in PERCENTILES} if values else {}


def run(
    plan: ServePlan,
    progress: Progress = lambda text: None,
    patience: float = 60,
    engine_turn: Callable[[list[Prompt]], float] | None = None,
    peer: ServePlan | None = None,
) -> ServeBenchmark:
    """Measure. Raises `ServerProblem` if a server does not answer within `patience` seconds.

    `engine_turn` runs prompts without the server and gives the output tokens per second; `peer` is how another server
    is asked. With either the requests come in `plan.turns` parts, and after each of them it is the other's turn on the
    same.
    """

    async def measure() -> ServeBenchmark:
        targets = [_Target(target_plan, progress) for target_plan in (plan, peer) if target_plan is not None]
        benchmark, prompts, turns = targets[0].found, plan.prompts(), []
        try:
            for target in targets:
                await target.begin(patience, prompts[0][::-1])
            number = plan.turns if peer is not None or engine_turn is not None else 1
            for first in range(min(number, len(prompts))):
                part, recorded = prompts[first::number], plan.recorded[first::number]
                speeds = [await target.turn(part, recorded) for target in targets]
                turns.append([*speeds, engine_turn(part)] if engine_turn is not None else speeds)
        finally:
            for target in targets:
                target.client.close()
        benchmark.peer = targets[1].found if peer is not None else None
        benchmark.turns = [(speeds[0], speeds[1]) for speeds in turns if len(speeds) > 1]
        return benchmark

    return asyncio.run(measure())


@contextmanager
def engine_turns(model: str, options: dict[str, Any], plan: ServePlan) -> Iterator[Callable[[Sequence[Prompt]], float]]:
    """Load the engine in a process of its own, to compare its speed without a server. Yield a function that runs
    prompts, `plan.concurrency` at a time, and returns output tokens per second."""
    asked = {"output_tokens": plan.output_tokens, "concurrency": plan.concurrency}
    with BenchProcess(Launch("the engine", "forge_worker")) as process:

        def turn(prompts: Sequence[Prompt]) -> float:
            return process.ask("answer", prompts=prompts, **asked)["tokens_per_second"]

        process.ask("load", model=model, **{"kv": "prefix", "max_num_seqs": 64} | options)
        turn([plan.prompts()[0][::-1]])
        yield turn


class _Target:
    """A server, and its results so far."""

    def __init__(self, plan: ServePlan, progress: Progress):
        self.client, self._say, self._plan = HttpClient(plan.url, plan.api_key), progress, plan
        self.found = ServeBenchmark(plan, plan.model or "", requests=[], health_ms=[])

    async def begin(self, patience: float, first: Prompt) -> None:
        """Wait for the server, and ask it once without looking at the time."""
        began = time.perf_counter()
        self.found.model = self.found.model or await _only_model(self.client, patience, self._say)
        self.found.ready_after = time.perf_counter() - began
        await self._ask(first)

    async def turn(self, prompts: list[Prompt], recorded: Sequence[RecordedRequest]) -> float:
        """Ask all of `prompts`, as long as they are `recorded` and when, if they are; output tokens per second."""
        places, rng = asyncio.Semaphore(self._plan.concurrency), random.Random(self._plan.seed)
        probing = asyncio.create_task(self._probe()) if self._plan.probe_health else None
        began, cpu_before = time.perf_counter(), time.process_time()

        async def ask(number: int, prompt: Prompt) -> Timed:
            async with places:
                if number % 20 == 0:
                    self._say(f"{number} of {len(prompts)} requests")
                return await self._ask(prompt, recorded[number].output_tokens if recorded else None)

        tasks = []
        for number, prompt in enumerate(prompts):
            if recorded:
                await asyncio.sleep(max(0.0, recorded[number].arrival - (time.perf_counter() - began)))
            tasks.append(asyncio.create_task(ask(number, prompt)))
            if self._plan.request_rate is not None:
                await asyncio.sleep(rng.expovariate(self._plan.request_rate))
        answers = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
        self.found.cpu_seconds += time.process_time() - cpu_before
        self.found.duration += seconds
        self.found.requests = [*self.found.requests, *answers]
        if probing is not None:
            probing.cancel()
        return sum(answer.num_tokens for answer in answers if answer.error is None) / seconds

    async def _ask(self, prompt: Prompt, output_tokens: int | None = None) -> Timed:
        output_tokens = output_tokens or self._plan.output_tokens
        body: dict[str, Any] = {"model": self.found.model, "prompt": prompt, "max_tokens": output_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return await self.client.stream("/v1/completions", body)

    async def _probe(self) -> None:
        while True:
            began = time.perf_counter()
            await self.client.get("/health")
            self.found.health_ms = [*self.found.health_ms, 1e3 * (time.perf_counter() - began)]
            await asyncio.sleep(0.05)


async def _only_model(client: HttpClient, patience: float, progress: Progress) -> str:
    """Return the first model that the server lists, once it lists any."""
    deadline = time.perf_counter() + patience
    while True:
        try:
            status, body = await client.get("/v1/models")
            if status == 200:
                return json.loads(body)["data"][0]["id"]
            problem = f"{status}: {body[:200].decode(errors='replace')}"
            if status in (401, 403, 404):
                raise ServerProblem(problem)
        except (OSError, EOFError) as error:
            problem = str(error)
        if time.perf_counter() > deadline:
            raise ServerProblem(f"the server does not answer: {problem}")
        progress("waiting for the server")
        await asyncio.sleep(0.1)


def serve_object(result: ServeBenchmark) -> Facts:
    """Return the result in the keys that the field's serving benchmarks write."""
    plan, good, seconds = result.plan, result.good, result.duration
    total_in = sum(request.prompt_tokens or plan.input_tokens for request in good)
    total_out = sum(request.num_tokens for request in good)
    facts = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "command": shlex.join(["forge", *sys.argv[1:]]),
        "backend": "openai",
        "model_id": result.model,
        "dataset_name": plan.dataset,
        "num_prompts": plan.num_prompts,
        "input_tokens": plan.input_tokens,
        "output_tokens": plan.output_tokens,
        "prefix_reuse": plan.prefix_reuse,
        "request_rate": plan.request_rate if plan.request_rate is not None else "inf",
        "max_concurrency": plan.concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(result.requests) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / seconds,
        "requests_per_minute": 60 * len(good) / seconds,
        "request_goodput": goodput(result),
        "input_throughput": total_in / seconds,
        "output_throughput": total_out / seconds,
        "total_token_throughput": (total_in + total_out) / seconds,
        "client_cpu_share": result.client_cpu_share,
        "ready_after_s": result.ready_after,
    }
    if any(rival for _, rival in result.turns):  # a peer that answers nothing makes no tokens
        name = "engine" if result.peer is None else "peer"
        shares = sorted(speed / rival for speed, rival in result.turns if rival)
        facts[f"{name}_output_throughput"] = median(rival for _, rival in result.turns)
        facts |= {f"{name}_share": median(shares), f"{name}_shares": shares}
    for metric in METRICS:
        if values := result.values(metric):
            means = {"mean": fmean(values), "median": median(values), "std": pstdev(values)}
            facts |= {f"{name}_{metric}_ms": value for name, value in means.items()} | percentiles(metric, values)
    if result.peer is not None:
        facts["peer"] = serve_object(result.peer)
    return (
        facts
        | percentiles("health", result.health_ms)
        | {
            "input_lens": [request.prompt_tokens or plan.input_tokens for request in result.requests],
            "output_lens": [request.num_tokens for request in result.requests],
            "ttfts": [(request.ttft_ms or 0.0) / 1e3 for request in result.requests],
            "itls": [[gap / 1e3 for gap in request.itls_ms] for request in result.requests],
            "errors": [request.error or "" for request in result.requests],
        }
    )


def goodput(result: ServeBenchmark) -> float | None:
    """Return the requests per second that met every goal; None without goals."""
    goals = parse_goodput(result.plan.goodput)
    met = [all((getattr(request, f"{metric}_ms") or 0.0) <= most for metric, most in goals) for request in result.good]
    return sum(met) / result.duration if goals else None


def parse_reuse(text: str) -> list[tuple[float, float]]:
    """Parse `0:4,0.9:2` as shares and weights; a share alone is that of every prompt. Raises `UsageError` otherwise."""
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        parts = [(float(share), float(weight) if colon else 1.0) for share, colon, weight in pairs]
    except ValueError:
        parts = []
    if not parts or not all(0 <= share <= 1 and 0 < weight < float("inf") for share, weight in parts):
        raise UsageError(f"--prefix-reuse is a share from 0 to 1, or several with weights, 0:4,0.9:2, and not {text!r}")
    return parts


def parse_goodput(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse `ttft:100` as ("ttft", 100.0). Raises `UsageError` for anything else."""
    goals = [re.fullmatch(r"(ttft|tpot|e2el):(\d+\.?\d*)", text) for text in texts]
    for text, goal in zip(texts, goals, strict=True):
        if goal is None or not float(goal[2]):
            raise UsageError(f"--goodput {text}: give ttft, tpot or e2el and milliseconds, such as ttft:100")
    return tuple((goal[1], float(goal[2])) for goal in goals if goal)


def screen(facts: Facts) -> Iterator[Part]:
    """Draw the throughput, then a table of latencies."""
    yield title(fill("{num_prompts} requests to {model_id:line}, {max_concurrency} at once", facts))
    rate = facts["request_rate"]
    speed = "as fast as they are answered" if rate == "inf" else f"{rate:g} requests/s"
    yield fill(f"{{input_tokens}} tokens in, {{output_tokens}} out, {speed}", facts)
    if failed := facts["failed"]:
        pairs = zip(facts["errors"], facts["ttfts"], strict=True)
        first = next(error or "no text" for error, first_token in pairs if error or not first_token)
        yield trouble(f"{count(failed)} failed, the first with {one_line(first)}")
    if not facts["completed"]:
        return
    lines = {
        "requests per minute": "{requests_per_minute:rate}",
        "input tokens/s": "{input_throughput:rate}",
        "output tokens/s": "{output_throughput:rate}",
    }
    if shares := facts.get("engine_shares"):
        lines["the engine's own"] = "{engine_output_throughput:rate}"
        lines["share of it"] = f"{{engine_share:percent}} ({percent(shares[0])} to {percent(shares[-1])})"
    if shares := facts.get("peer_shares"):
        others_failed = facts["peer"]["failed"]
        failures = f", {count(others_failed)} failed" if others_failed else ""
        lines["the peer's"] = f"{{peer_output_throughput:rate}}{failures}"
        lines["times the peer"] = f"{{peer_share:.2f}} ({shares[0]:.2f} to {shares[-1]:.2f})"
    if facts["request_goodput"] is not None:
        lines["goodput, requests/s"] = "{request_goodput:rate}"
    yield None
    yield from (title(f"{name:<24}{fill(figure, facts)}", style="") for name, figure in lines.items())
    yield from (None, _latencies(facts, "ms"))
    if "peer" in facts and facts["peer"]["completed"]:
        yield _latencies(facts["peer"], "ms, the peer")
    if "p50_health_ms" in facts:
        yield fill("/health meanwhile: p50 {p50_health_ms:.1f}, p99 {p99_health_ms:.1f} ms", facts)
    waited = "the server's first answer came after {ready_after_s:.2f} s"
    yield fill(f"{waited}, the client took {{client_cpu_share:percent}} of one CPU", facts)


def _latencies(facts: Facts, heading: str) -> Table:
    rows = [
        (name, *(f"{facts[f'p{share}_{metric}_ms']:.2f}" for share in PERCENTILES))
        for metric, name in METRICS.items()
        if f"p50_{metric}_ms" in facts
    ]
    return Table((heading, *(f"p{share}" for share in PERCENTILES)), rows)


def sweep_screen(levels: Sequence[Facts]) -> Iterator[Part]:
    """Yield the same requests with more and more of them under way: a row per level, and latency drawn over throughput:
    from the level on that only goes up, further clients only wait."""
    yield title(fill("{num_prompts} requests to {model_id:line}, by how many are under way", levels[0]))
    yield fill("{input_tokens} tokens in, {output_tokens} out, prefix reuse {prefix_reuse}", levels[0])
    for level in levels:
        if level["failed"]:
            yield trouble(fill("{failed:count} failed with {max_concurrency} at once", level))
    good = [level for level in levels if level["completed"]]
    for metric in ("ttft", "tpot", "e2el"):
        columns = [f"{METRICS[metric]}, ms: {{max_concurrency:count}} at once"]
        columns += ["requests/min: {requests_per_minute:rate}", "tok/s: {output_throughput:rate}"]
        columns += [f"p{share}: {{p{share}_{metric}_ms:.1f}}" for share in (50, 95, 99)]
        if rows := [level for level in good if f"p50_{metric}_ms" in level]:
            yield from (None, Table.of(rows, *columns))
    if good:
        yield from (None, fill("the server's first answer came after {ready_after_s:.2f} s", levels[0]))
    if len(good) > 1:
        yield from (None, title("End-to-end latency, median, over output tokens/s", style=""))
        yield lambda width: latency_over_throughput(good, width)


def latency_over_throughput(levels: Sequence[Facts], width: int) -> list[Text]:
    """Return each level's number at its place: to the right more tokens per second, upwards more milliseconds."""
    speed, latency = (max(level[name] for level in levels) for name in ("output_throughput", "p50_e2el_ms"))
    top, axis = f"{latency:,.1f} ms", f"{speed:,.0f} tok/s"
    room = min(_WIDTH, width - len(top) - 2)
    rows = [[" "] * room for _ in range(_HEIGHT)]
    for level in levels:
        name = str(level["max_concurrency"])
        start = min(round(level["output_throughput"] / speed * (room - 1)), room - len(name))
        rows[row_of(level["p50_e2el_ms"], latency, _HEIGHT)][start : start + len(name)] = name
    names = [top, *[""] * (_HEIGHT - 2), "0"]
    lines = [Text(f"{name:>{len(top)}} │{''.join(row)}") for name, row in zip(names, rows, strict=True)]
    return [*lines, Text(" " * (len(top) + 1) + "└" + "─" * room), Text(" " * (len(top) + 2) + axis.rjust(room))]


def chart_parts(result: ServeBenchmark) -> list[Part]:
    """Draw the throughput over the time of a measurement, from the moments at which text came."""
    began = min((request.started for request in result.good), default=0.0)
    if not (times := [moment - began for request in result.good for moment in request.chunks]):
        return []
    heading = f"Throughput over time, concurrency {result.plan.concurrency}"
    plot: Part = lambda width: throughput_plot(times, max(times), min(_WIDTH + 16, width), ACCENT)  # noqa: E731
    return [None, title(heading, style=""), plot]


def save_logs(folder: Path, levels: Sequence[Facts]) -> None:
    """Save each level's figures and every request's times, a file per level. Raises `ForgeError` for a bad folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for level in levels:
            path = folder / f"{level['date']}-concurrency-{level['max_concurrency']}.json"
            path.write_text(json.dumps(level, indent=1), encoding="utf-8")
    except OSError as error:
        raise file_error(f"{folder}: cannot write the logs", error) from None
