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
import json as json_text
import random
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

from forge.bench.http_client import HttpClient, ServerProblem, Timed
from forge.bench.process import BenchProcess, Launch
from forge.cli import options
from forge.cli.arguments import Takes, command
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.experiments.bench.options import MEASURE, at_least_one, option
from forge.experiments.bench.results import Progress, shown, silent
from forge.experiments.bench.tables import Part, Table, title, trouble
from forge.option import option as field_option
from forge.views.formatting import count, percent, rate
from forge.views.progress import progress_line
from forge.views.report import Report
from forge.views.text import one_line

PERCENTILES = (50, 90, 95, 99)
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end to end"}
"""As the JSON and as the screen calls them."""
DATASETS = ("random", "words")
WORDS = "time year people way day man thing woman life child world school state family student group country problem"
"""Each a token of most vocabularies, with the space before it."""

Prompt = str | list[int]
_Piece = TypeVar("_Piece")
COMMON_TEXTS = 4
"""Of `--prefix-reuse`: how many texts prompts begin with."""


@dataclass(frozen=True)
class ServePlan:
    """What is asked of the server."""

    url: str = field_option("http://127.0.0.1:8080", "Any OpenAI-compatible server.")
    model: str | None = field_option(None, "As the server calls it.", shown="its first", flags="--model -m")
    dataset: str = field_option("random", "random token ids, or words.", MEASURE)
    input_tokens: int = field_option(128, "", MEASURE)
    output_tokens: int = field_option(32, "", MEASURE)
    num_prompts: int = field_option(400, "", MEASURE)
    prefix_reuse: str = field_option(
        "0", "Share of a prompt that others begin with: 0.5, or with weights 0:4,0.5:4,0.9:2.", MEASURE
    )
    concurrency: int = field_option(4, "Requests under way at most.", MEASURE)
    request_rate: float | None = field_option(None, "Requests per second.", MEASURE, shown="as answered")
    """As a Poisson process; None sends as `concurrency` allows."""
    goodput: Sequence[str] = field_option((), "A goal, such as ttft:100; may be repeated.", MEASURE)
    seed: int = field_option(0, "", MEASURE)
    probe_health: bool = field_option(False, "Time /health meanwhile, twenty times a second.", MEASURE)
    turns: int = field_option(7, "Of --engine or --peer: the parts that the requests are divided into.", MEASURE)
    api_key: str | None = field_option(None, "", envvar="FORGE_API_KEY")
    token_range: tuple[int, int] = (256, 4000)
    """Random prompts are made of these token ids."""

    def __post_init__(self):
        counts = ("input_tokens", "output_tokens", "num_prompts", "concurrency", "turns")
        at_least_one(**{name: getattr(self, name) for name in counts})
        if self.request_rate is not None and not self.request_rate > 0:
            raise UsageError(f"--request-rate must be above 0, got {self.request_rate:g}")
        if self.dataset not in DATASETS:
            raise UsageError(f"unknown dataset {self.dataset!r}; supported: {', '.join(DATASETS)}")
        parse_goodput(self.goodput)
        parse_reuse(self.prefix_reuse)

    def prompts(self) -> list[Prompt]:
        """The prompts; the same for the same seed."""
        rng, (low, high), length = random.Random(self.seed), self.token_range, range(self.input_tokens)
        if self.dataset == "words":
            words = WORDS.split()
            texts = self._with_reuse([[rng.choice(words) for _ in length] for _ in range(self.num_prompts)])
            return [" ".join(text) for text in texts]
        return list(self._with_reuse([[rng.randrange(low, high) for _ in length] for _ in range(self.num_prompts)]))

    def _with_reuse(self, prompts: list[list[_Piece]]) -> list[list[_Piece]]:
        """The same number and lengths; each begins with as much of one of a few common texts as its draw says."""
        shares, weights = zip(*parse_reuse(self.prefix_reuse), strict=True)
        if not any(shares):
            return prompts
        rng = random.Random(f"{self.seed}: reuse")
        common = prompts[:COMMON_TEXTS]
        found = []
        for prompt in prompts:
            (share,), text = rng.choices(shares, weights), rng.choice(common)
            reused = round(share * len(prompt))
            found.append([*text[:reused], *prompt[reused:]])
        return found


@command
def bench_serve(
    plan: Annotated[ServePlan, Takes(without="concurrency")],
    concurrency: Annotated[str, option("Requests under way at most; several to compare: 1,4,16,64.")] = "4",
    engine: Annotated[str | None, option("Run the same on this model without a server, in turns.")] = None,
    num_blocks: Annotated[int | None, option("For --engine.")] = None,
    peer: Annotated[str | None, option("Send the same to another server, in turns.")] = None,
    peer_model: Annotated[str | None, typer.Option(help="As the peer calls it.", show_default="its first")] = None,
    *,
    own: Annotated[EngineArgs, Takes("threads")],
    chart: Annotated[bool, option("Draw the throughput over time.")] = False,
    svg: Annotated[Path | None, option("Save what is shown as a picture.")] = None,
    log_dir: Annotated[Path | None, option("Keep every request's times in this folder.")] = None,
    json: options.JsonOption = False,
) -> Report:
    """What clients of a server see: TTFT, TPOT, ITL, end-to-end latency, throughput.

    [dim]forge bench serve --concurrency 64 --num-prompts 400[/dim]
    [dim]forge bench serve --concurrency 1,4,16,64 --prefix-reuse 0:4,0.5:4,0.9:2 --svg sweep.svg --log-dir logs[/dim]
    [dim]forge bench serve --concurrency 16 --num-prompts 112 --peer http://127.0.0.1:8081[/dim]
    """
    from forge.experiments.bench.serve_sweep import chart_parts, save_logs, save_svg, sweep_object, sweep_screen

    if peer is not None and engine is not None:
        raise UsageError("--peer and --engine are two comparisons: give one of them")
    plans = [replace(plan, concurrency=level) for level in parse_levels(concurrency)]
    loading = {"num_blocks": num_blocks, "threads": own.threads}
    results = []
    with progress_line() as progress:
        for one in plans:
            other = None
            if peer is not None:
                other = replace(one, url=peer, model=peer_model, api_key=None, probe_health=False)
            with engine_turns(engine, loading, one) if engine else nullcontext() as turn:
                result = run(one, progress, engine_turn=turn, peer=other)
            results.append(replace(result, command=shlex.join(["forge", *sys.argv[1:]])))
    if log_dir is not None:
        save_logs(log_dir, results)
    parts = list(sweep_screen(results) if len(results) > 1 else screen(results[0]))
    if chart:
        parts += [part for one in results for part in chart_parts(one)]
    if svg is not None:
        save_svg(svg, parts)
    facts = sweep_object(results) if len(results) > 1 else serve_object(results[0])
    return shown(facts, parts, json, 0 if all(one.good for one in results) else 1)


@dataclass
class ServeBenchmark:
    """What came of it."""

    plan: ServePlan
    model: str
    requests: Sequence[Timed] = ()
    duration: float = 0.0
    """Seconds from the first request to the end of the last."""
    cpu_seconds: float = 0.0
    """What the client itself took."""
    ready_after: float = 0.0
    """Seconds until the server answered for the first time."""
    health_ms: Sequence[float] = ()
    command: str = ""
    turns: Sequence[tuple[float, float]] = ()
    """Output tokens per second of the server, and of its peer or of the engine alone on the same requests right after,
    turn by turn; where that was asked for."""
    peer: "ServeBenchmark | None" = None
    """What came of the same requests to another server."""

    @property
    def good(self) -> list[Timed]:
        return [one for one in self.requests if one.error is None and one.chunks]

    @property
    def client_cpu_share(self) -> float:
        """Of one CPU."""
        return self.cpu_seconds / self.duration

    @property
    def ratios(self) -> list[float]:
        """The server's speed over the peer's, or over the engine's own: of each turn, the least first."""
        return sorted(server / other for server, other in self.turns)

    @property
    def other_tokens_per_second(self) -> float | None:
        """Of the engine alone or of the peer: the median over the turns."""
        return median(other for _, other in self.turns) if self.turns else None

    def values(self, metric: str) -> list[float]:
        """`ttft`, `tpot`, `itl` or `e2el` in milliseconds, of all requests that succeeded."""
        if metric == "itl":
            return [1e3 * (b - a) for one in self.good for a, b in zip(one.chunks, one.chunks[1:], strict=False)]
        return [value for one in self.good if (value := milliseconds(one, metric)) is not None]


def output_tokens(one: Timed) -> int:
    """The server's own count, or else the events with text."""
    return one.completion_tokens if one.completion_tokens is not None else len(one.chunks)


def milliseconds(one: Timed, metric: str) -> float | None:
    """One request's `ttft`, `tpot` or `e2el`; None where it has none."""
    if metric == "ttft":
        return 1e3 * (one.chunks[0] - one.started)
    assert one.ended is not None, "it succeeded"
    if metric == "e2el":
        return 1e3 * (one.ended - one.started)
    tokens = output_tokens(one)
    return 1e3 * (one.ended - one.chunks[0]) / (tokens - 1) if tokens > 1 else None


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share))


def run(
    plan: ServePlan,
    progress: Progress = silent,
    patience: float = 60,
    engine_turn: Callable[[list[Prompt]], float] | None = None,
    peer: ServePlan | None = None,
) -> ServeBenchmark:
    """Measure. Raises `ServerProblem` if a server does not answer within `patience` seconds.

    `engine_turn` runs prompts without the server and gives the output tokens per second; `peer` is how another server
    is asked. With either the requests come in `plan.turns` parts, and after each of them it is the other's turn on the
    same.
    """
    return asyncio.run(_run(plan, progress, patience, engine_turn, peer))


@contextmanager
def engine_turns(model: str, options: dict[str, Any], plan: ServePlan) -> Iterator[Callable[[Sequence[Prompt]], float]]:
    """The engine's own speed on the same requests: loaded in a process of its own, which waits for its turns. Yields
    what runs prompts, `plan.concurrency` of them under way at any time: output tokens per second."""
    asked = {"output_tokens": plan.output_tokens, "concurrency": plan.concurrency}
    with BenchProcess(Launch("the engine", "forge_worker")) as process:

        def turn(prompts: Sequence[Prompt]) -> float:
            return process.ask("answer", prompts=prompts, **asked)["tokens_per_second"]

        process.ask("load", model=model, **{"kv": "prefix", "max_num_seqs": 64} | options)
        turn([plan.prompts()[0][::-1]])
        yield turn


async def _run(
    plan: ServePlan, progress: Progress, patience: float, engine_turn, peer: ServePlan | None
) -> ServeBenchmark:
    targets = [_Target(one, progress) for one in (plan, peer) if one is not None]
    own, prompts, turns = targets[0], plan.prompts(), []
    try:
        for target in targets:
            await target.begin(patience, prompts[0][::-1])
        number = plan.turns if peer is not None or engine_turn is not None else 1
        for part in filter(None, (prompts[first::number] for first in range(number))):
            speed = await own.turn(part)
            if peer is not None:
                turns.append((speed, await targets[1].turn(part)))
            elif engine_turn is not None:
                turns.append((speed, engine_turn(part)))
    finally:
        for target in targets:
            target.client.close()
    if peer is not None:
        own.found.peer = targets[1].found
    own.found.turns = turns
    return own.found


class _Target:
    """A server, and what has come of it so far."""

    def __init__(self, plan: ServePlan, progress: Progress):
        self.client, self._say, self._plan = HttpClient(plan.url, plan.api_key), progress, plan
        self.found = ServeBenchmark(plan, plan.model or "", requests=[], health_ms=[])

    async def begin(self, patience: float, first: Prompt) -> None:
        """Wait for the server, and ask it once without looking at the time."""
        began = time.perf_counter()
        self.found.model = self.found.model or await _only_model(self.client, patience, self._say)
        self.found.ready_after = time.perf_counter() - began
        await self._ask(first)

    async def turn(self, prompts: list[Prompt]) -> float:
        """Ask all of `prompts`; output tokens per second."""
        places, rng = asyncio.Semaphore(self._plan.concurrency), random.Random(self._plan.seed)
        probing = asyncio.create_task(self._probe()) if self._plan.probe_health else None
        began, cpu_before = time.perf_counter(), time.process_time()

        async def ask(number: int, prompt: Prompt) -> Timed:
            async with places:
                if number % 20 == 0:
                    self._say(f"{number} of {len(prompts)} requests")
                return await self._ask(prompt)

        tasks = []
        for number, prompt in enumerate(prompts):
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
        return sum(output_tokens(one) for one in answers if one.error is None) / seconds

    async def _ask(self, prompt: Prompt) -> Timed:
        sampling = {"max_tokens": self._plan.output_tokens, "temperature": 0, "ignore_eos": True}
        body = {"model": self.found.model, "prompt": prompt, **sampling}
        return await self.client.stream(
            "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
        )

    async def _probe(self) -> None:
        while True:
            began = time.perf_counter()
            await self.client.get("/health")
            self.found.health_ms = [*self.found.health_ms, 1e3 * (time.perf_counter() - began)]
            await asyncio.sleep(0.05)


async def _only_model(client: HttpClient, patience: float, progress: Progress) -> str:
    """The first model that the server lists, once it lists any."""
    deadline = time.perf_counter() + patience
    while True:
        try:
            status, body = await client.get("/v1/models")
            if status == 200:
                return json_text.loads(body)["data"][0]["id"]
            problem = f"{status}: {body[:200].decode(errors='replace')}"
            if status in (401, 403, 404):
                raise ServerProblem(problem)
        except (OSError, EOFError) as error:
            problem = str(error)
        if time.perf_counter() > deadline:
            raise ServerProblem(f"the server does not answer: {problem}")
        progress("waiting for the server")
        await asyncio.sleep(0.1)


def serve_object(result: ServeBenchmark) -> dict[str, Any]:
    """The result in the keys that the field's serving benchmarks write."""
    plan, good = result.plan, result.good
    total_in = sum(one.prompt_tokens or plan.input_tokens for one in good)
    total_out = sum(map(output_tokens, good))
    found = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "command": result.command,
        "backend": "openai",
        "model_id": result.model,
        "dataset_name": plan.dataset,
        "num_prompts": plan.num_prompts,
        "prefix_reuse": plan.prefix_reuse,
        "request_rate": plan.request_rate if plan.request_rate is not None else "inf",
        "max_concurrency": plan.concurrency,
        "duration": result.duration,
        "completed": len(good),
        "failed": len(result.requests) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / result.duration,
        "requests_per_minute": 60 * len(good) / result.duration,
        "request_goodput": goodput(result),
        "input_throughput": total_in / result.duration,
        "output_throughput": total_out / result.duration,
        "total_token_throughput": (total_in + total_out) / result.duration,
        "client_cpu_share": result.client_cpu_share,
        "ready_after_s": result.ready_after,
    }
    if result.turns:
        name = "engine" if result.peer is None else "peer"
        found[f"{name}_output_throughput"] = result.other_tokens_per_second
        found[f"{name}_share"] = median(result.ratios)
        found[f"{name}_shares"] = result.ratios
    for metric in METRICS:
        values = result.values(metric)
        if values:
            found |= {
                f"mean_{metric}_ms": fmean(values),
                f"median_{metric}_ms": median(values),
                f"std_{metric}_ms": pstdev(values),
            } | {f"p{share}_{metric}_ms": percentile(values, share) for share in PERCENTILES}
    if result.health_ms:
        found |= {f"p{share}_health_ms": percentile(result.health_ms, share) for share in PERCENTILES}
    if result.peer is not None:
        found["peer"] = serve_object(result.peer)
    return found | {
        "input_lens": [one.prompt_tokens or plan.input_tokens for one in result.requests],
        "output_lens": [output_tokens(one) for one in result.requests],
        "ttfts": [one.chunks[0] - one.started if one.chunks else 0.0 for one in result.requests],
        "itls": [[b - a for a, b in zip(one.chunks, one.chunks[1:], strict=False)] for one in result.requests],
        "errors": [one.error or "" for one in result.requests],
    }


def goodput(result: ServeBenchmark) -> float | None:
    """Requests per second that met every goal; None without goals."""
    goals = parse_goodput(result.plan.goodput)
    if not goals:
        return None
    met = [
        one
        for one in result.good
        if all((value := milliseconds(one, metric)) is None or value <= most for metric, most in goals)
    ]
    return len(met) / result.duration


def parse_levels(text: str) -> list[int]:
    """`1,4,16` as numbers. Raises `UsageError` for anything else."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError(f"--concurrency takes numbers from 1 with commas, such as 1,4,16,64, and not {text!r}")
    return [int(part) for part in parts]


def parse_reuse(text: str) -> list[tuple[float, float]]:
    """`0:4,0.9:2` as shares and weights; a share alone is that of every prompt. Raises `UsageError` otherwise."""
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        found = [(float(share), float(weight) if colon else 1.0) for share, colon, weight in pairs]
    except ValueError:
        found = []
    if not found or not all(0 <= share <= 1 and 0 < weight < float("inf") for share, weight in found):
        raise UsageError(f"--prefix-reuse is a share from 0 to 1, or several with weights, 0:4,0.9:2, and not {text!r}")
    return found


def parse_goodput(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """`ttft:100` as ("ttft", 100.0). Raises `UsageError` for anything else."""
    goals = []
    for text in texts:
        metric, _, number = text.partition(":")
        try:
            most = float(number)
        except ValueError:
            most = -1.0
        if metric not in ("ttft", "tpot", "e2el") or not most > 0:
            raise UsageError(f"--goodput {text}: give ttft, tpot or e2el and milliseconds, such as ttft:100")
        goals.append((metric, most))
    return tuple(goals)


def screen(result: ServeBenchmark) -> Iterator[Part]:
    """Throughput, then a table of latencies."""
    plan, good = result.plan, result.good
    speed = f"{plan.request_rate:g} requests/s" if plan.request_rate else "as fast as they are answered"
    yield title(f"{plan.num_prompts} requests to {one_line(result.model)}, {plan.concurrency} at once")
    yield f"{plan.input_tokens} tokens in, {plan.output_tokens} out, {speed}"
    if failed := len(result.requests) - len(good):
        first = next(one.error or "no text" for one in result.requests if one not in good)
        yield trouble(f"{count(failed)} failed, the first with {one_line(first)}")
    if not good:
        return
    yield None
    for name, value in _throughput(result):
        yield title(f"{name:<24}{value}", style="")
    yield from (None, _latencies(result, "ms"))
    if result.peer is not None and result.peer.good:
        yield _latencies(result.peer, "ms, the peer")
    if result.health_ms:
        p50, p99 = (percentile(result.health_ms, share) for share in (50, 99))
        yield f"/health meanwhile: p50 {p50:.1f}, p99 {p99:.1f} ms"
    waited = f"the server's first answer came after {result.ready_after:.2f} s"
    yield f"{waited}, the client took {percent(result.client_cpu_share)} of one CPU"


def _throughput(result: ServeBenchmark) -> Iterator[tuple[str, str]]:
    facts = serve_object(result)
    yield "requests per minute", rate(facts["requests_per_minute"])
    yield "input tokens/s", rate(facts["input_throughput"])
    yield "output tokens/s", rate(facts["output_throughput"])
    if result.turns:
        ratios, other = result.ratios, rate(result.other_tokens_per_second)
        middle, least, most = median(ratios), ratios[0], ratios[-1]
        if result.peer is None:
            yield "the engine's own", other
            yield "share of it", f"{percent(middle)} ({percent(least)} to {percent(most)})"
        else:
            failed = len(result.peer.requests) - len(result.peer.good)
            yield "the peer's", other + (f", {count(failed)} failed" if failed else "")
            yield "times the peer", f"{middle:.2f} ({least:.2f} to {most:.2f})"
    if (met := goodput(result)) is not None:
        yield "goodput, requests/s", rate(met)


def _latencies(result: ServeBenchmark, heading: str) -> Table:
    rows = [
        (name, *(f"{percentile(values, share):.2f}" for share in PERCENTILES))
        for metric, name in METRICS.items()
        if (values := result.values(metric))
    ]
    return Table((heading, *(f"p{share}" for share in PERCENTILES)), rows)
