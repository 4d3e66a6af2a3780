"""`forge bench cuda`: forge beside transformers on one GPU, on the same weights, in one run.

The order of things: the GPU's limits; then each program by itself (two of them would share its memory and clocks): it
loads the model, takes its turns of every figure, and serves every load of requests. forge serves them twice, in process
and over HTTP. Figures and loads are those that engines publish for an H200 (`cases.py`).
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from forge.backends.devices import why_not_cuda
from forge.bench import kit
from forge.bench.cases import BLOCK_SIZE, CUDA_LOADS, CUDA_STEPS, FORGE, Case, Load, load_figures
from forge.bench.kit import Facts, Figure, Progress, QuickOption, option
from forge.bench.process import Effort, Launch, Runner, measure_limits
from forge.cli.arguments import Takes
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.model.catalog import resolve_model
from forge.model.loader import open_weights
from forge.model.synth import SHAPES, default_file_name, synth
from forge.views.screen import Part, Table, fill, title, trouble
from forge.views.text import one_line

HTTP = "forge over HTTP"
PEERS = {"transformers": "transformers_worker"}
"""Name → worker module."""
WORKERS = {FORGE: "forge_worker", HTTP: "server_worker", **PEERS}
DEFAULT_MODEL = "qwen3-0.6b"
PUBLISHED_LOADS = {"qwen3-0.6b": ("128in1@1", "128in32@4"), "qwen3-4b": tuple(load.name for load in CUDA_LOADS[2:])}
"""The loads that are published for a shape; another model gets those of the first."""
SCHEMA = 1
"""Counts up when a name in the JSON changes its meaning."""


EFFORT = Effort(5, decode_steps=20, turn_seconds=0.3, limit_seconds=1.0, array_bytes=4 << 30)
QUICK = Effort(2, decode_steps=3, turn_seconds=0.02, limit_seconds=0.1, array_bytes=1 << 28, request_share=0.02)
"""Enough to see that everything runs; too little to believe."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    model: str = DEFAULT_MODEL
    """A published shape, made up with random weights, or whatever `--model` takes."""
    quantization: str = "BF16"
    """Weight type of a made-up model."""
    steps: tuple[Case, ...] = CUDA_STEPS
    loads: tuple[Load, ...] = CUDA_LOADS[:2]
    peers: tuple[str, ...] = tuple(PEERS)
    kv: str = "paged"
    effort: Effort = EFFORT


def plan_for(
    model: str, quantization: str, only: str | None, peers: list[str] | None, kv: str, effort: Effort = EFFORT
) -> Plan:
    """Return the plan that these options mean. Raises `UsageError` for a name that is none."""
    chosen = kit.select(only, (*CUDA_STEPS, *CUDA_LOADS))
    published = PUBLISHED_LOADS.get(model, PUBLISHED_LOADS[DEFAULT_MODEL])
    loads = [case for case in chosen if isinstance(case, Load) and (only is not None or case.name in published)]
    steps = tuple(case for case in chosen if isinstance(case, Case))
    return Plan(model, quantization, steps, tuple(loads), kit.select_peers(peers, PEERS), kv, effort)


def run(plan: Plan, on_progress: Progress = lambda text: None) -> Generator[Facts, None, None]:
    """Measure, yielding what is known so far after each figure; the last value is the whole.

    Raises `UsageError` for a model that does not exist, `ProcessFailed` if forge itself fails, or sees no GPU. A peer
    that fails is left out from there on, and its reason is in the result. Closing the iterator ends every process.
    """
    facts: Facts = {"schema": SCHEMA, "model": plan.model, "limits": None, "contenders": {}, "steps": [], "loads": []}
    on_progress("what this GPU can do")
    facts |= {"limits": measure_limits("gpu", plan.effort), "skipped": [], "interrupted": False}
    yield facts
    with Runner(on_progress) as runner, model_file(plan, on_progress) as (path, vocab_size):
        facts["skipped"] = runner.skipped
        for name in (FORGE, *([HTTP] if plan.loads else []), *plan.peers):
            for _ in _measure(plan, name, path, vocab_size, facts, runner):
                yield facts
            runner.close(name)
    yield facts


@contextmanager
def model_file(plan: Plan, on_progress: Progress) -> Iterator[tuple[Path, int]]:
    """Yield the model's path and vocabulary size; a published shape is written with random weights and deleted
    afterwards."""
    if plan.model in SHAPES:
        with TemporaryDirectory(prefix="forge-bench-") as folder:
            path = Path(folder) / default_file_name(plan.model, plan.quantization)
            on_progress(f"random weights: {path.name}")
            synth(path, SHAPES[plan.model], plan.quantization)
            yield path, SHAPES[plan.model].vocab_size
        return
    path = resolve_model(plan.model)
    with open_weights(path) as weights:
        vocab_size = weights.config.vocab_size
    yield path, vocab_size


def _measure(plan: Plan, name: str, path: Path, vocab_size: int, facts: Facts, runner: Runner) -> Iterator[None]:
    """Measure everything about one program; yield after each figure."""
    runner.say(f"{name} loads")
    lengths = [load.prompt_tokens + load.output_tokens for load in plan.loads]
    longest = max(lengths + [case.length for case in plan.steps])
    most = max((load.concurrency for load in plan.loads), default=1)
    sizes = {"max_model_len": longest, "max_num_seqs": most, "num_blocks": most * -(-longest // BLOCK_SIZE)}
    loading = {"model": str(path.absolute()), "device": "cuda", "kv": plan.kv, "block_size": BLOCK_SIZE, **sizes}
    about = runner.attempt(name, partial(runner.open, Launch(name, WORKERS[name]), **loading))
    if about is None:
        return
    facts["contenders"][name] = about
    for case in plan.steps if name != HTTP else ():
        if name not in runner.processes:
            return
        turns = runner.take_turns(case, vocab_size, plan.effort, in_parts=True)
        replay = runner.ask(name, "replay", seconds=plan.effort.turn_seconds) if name == FORGE else None
        facts["steps"] += [step(case, name, turn | (replay or {}), facts) for turn in turns.values()]
        yield
    for load in plan.loads:
        if name not in runner.processes:
            return
        load = replace(load, requests=max(load.concurrency, round(load.requests * plan.effort.request_share)))
        runner.say(f"{load.title}: {name}")
        if answer := runner.ask(name, "requests", f"{name}, {load.title}", load=asdict(load)):
            facts["loads"].append({"load": load, "contender": name, **load_figures(load, answer)})
        yield


def step(case: Case, name: str, taken: Facts, facts: Facts) -> Facts:
    """Build the facts of one program's steps of one case; for a decode of forge, also the share of the bandwidth that
    it reaches: it has to read the weights once, and the keys and values before it. `device_seconds` are those of its
    graph's replay."""
    seconds, share, about = Figure.of(taken["seconds"]), None, facts["contenders"][name]
    if name == FORGE and case.kind == "decode":
        needed = about["read_bytes"] + case.sequences * case.context * about["kv_bytes"]
        share = needed / seconds.median / facts["limits"]["read_bytes_per_second"]
    return {"name": case.name, "contender": name, **taken, "seconds": seconds, "bandwidth_share": share}


def screen(facts: Facts) -> Iterator[Part]:
    """Yield the GPU and what ran on it; steps; loads of requests; what was left out."""
    limits, steps, loads = facts["limits"], facts["steps"], facts["loads"]
    yield title("How fast is this model on this GPU?")
    yield f"{limits['device']}, {limits['memory_bytes'] / 2**30:.0f} GiB; {limits['versions']}"
    copy, read = (limits[f"{name}_bytes_per_second"] / 1e12 for name in ("copy", "read"))
    flops = 2 * limits["products_per_second"] / 1e12
    yield f"limits measured: copy {copy:.2f} TB/s, read {read:.2f} TB/s, bfloat16 {flops:.0f} TFLOP/s"
    for name, about in facts["contenders"].items():
        yield f"{name}: {one_line(about['description'])}; loaded in {about['seconds']:.1f} s"
    shown = {"ms": milliseconds}
    if steps:
        names = list(dict.fromkeys(entry["contender"] for entry in steps))
        titles = {case.name: case.title for case in CUDA_STEPS}
        by_case = {(entry["name"], entry["contender"]): entry for entry in steps}
        rows = [
            {
                "title": titles[name],
                **{f"t{number}": by_case.get((name, contender)) for number, contender in enumerate(names)},
                "ours": by_case.get((name, FORGE)),
            }
            for name in dict.fromkeys(entry["name"] for entry in steps)
        ]
        columns = ["ms per step: {title}", *(f"{name}: {{t{i}.seconds:ms}}" for i, name in enumerate(names))]
        columns += ["on the device: {ours.device_seconds:ms}", "of the bandwidth: {ours.bandwidth_share:percent}"]
        columns += ["forge ran: {ours.setting:line}"]
        yield from (None, Table.of(rows, *columns, formats=shown, wraps=True))
    if loads:
        columns = ["ms (P50, P95): {load.title}", ": {contender}", "requests: {load.requests:count}"]
        columns += ["requests/s: {requests_per_second:,.1f}"]
        moments = {"first token": "first_token", "per token": "per_token", "end to end": "end"}
        columns += [f"{heading}: {{{name}:pair}}" for heading, name in moments.items()]
        pair = {"pair": lambda values: fill("{p50:ms}, {p95:ms}", values, **shown)}
        yield from (None, Table.of(loads, *columns, formats=pair, names=2, wraps=True))
    for skipped in facts["skipped"]:
        yield trouble(fill("left out: {name:line}: {reason:line}", skipped))
    if facts["interrupted"]:
        yield trouble("interrupted: what was measured until then")


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


@kit.benchmark(screen)
def bench_cuda(
    say: Progress,
    model: Annotated[
        str, option("qwen3-0.6b, qwen3-1.7b or qwen3-4b with random weights; or a model as elsewhere.", "--model", "-m")
    ] = DEFAULT_MODEL,
    type: Annotated[str, option("Of random weights: BF16, Q8_0, Q4_0, Q4_K_M, …", "--type", "-t")] = "BF16",
    only: Annotated[
        str | None,
        option(
            "Figures, with commas: decode1@160 … decode64@2048, prefill128, prefill512, 128in1@1, 128in32@4, "
            "512in1@1 … 512in1@128.",
            default="all steps, and the loads that are published for the shape",
        ),
    ] = None,
    peer: Annotated[list[str] | None, option("transformers, all or none.", default="all")] = None,
    *,
    engine: Annotated[EngineArgs, Takes("kv", kv="paged")],
    reps: Annotated[int | None, option("Turns per figure; 5 if not given.")] = None,
    quick: QuickOption = False,
) -> Generator[Facts, None, None]:
    """Decode, prefill and whole requests on this GPU, with the share of its measured bandwidth.

    Requests run in process, and over HTTP as clients of `forge serve` see them.

    [dim]forge bench cuda -m qwen3-4b --only 512in1@64,512in1@128[/dim]
    """
    kit.at_least_one(reps=reps)
    effort = kit.effort_of(QUICK if quick else EFFORT, repetitions=reps)
    plan = plan_for(model, type, only, peer, str(engine.cache), effort)
    if reason := why_not_cuda():  # before anything is made or started
        raise UsageError(reason.replace("--device cuda", "forge bench cuda").replace(": use --device cpu", ""))
    yield from run(plan, say)
