"""`forge bench cpu`: forge beside its peers on one file, in one run, taking turns.

The order of things: the machine's limits; then each program loads the file, in turn, several times over, and stays
loaded the last time; then, figure by figure, all take turns (`process.Runner`); then their logits are held against
float32, and the machine's limits are measured again.
"""

import os
import shutil
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from operator import ne
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np

from forge.backends.cpu.processor import usable_cpus
from forge.bench import kit
from forge.bench.cases import (
    BLOCK_SIZE,
    CASES,
    FORGE,
    LONG_CASES,
    Case,
    Limits,
    ModelSize,
    Needs,
    Roofline,
    measure_model,
    needs_of,
)
from forge.bench.kit import Facts, Figure, Progress, QuickOption, option, ratios
from forge.bench.process import Effort, Launch, PeerMissing, Runner, measure_limits
from forge.cache.kv_storage import DEFAULT_KV_DTYPES
from forge.cli.arguments import Takes
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.model.catalog import model_name, resolve_model
from forge.views.formatting import NOTHING, plural, rate, ratio, size
from forge.views.palette import ACCENT
from forge.views.screen import Fitting, Part, Table, fill, title, trouble
from forge.views.text import one_line

PEERS = {
    "llama.cpp": "llama_cpp_worker",
    "ik_llama.cpp": "llama_binary_worker",
    "openvino": "openvino_worker",
    "transformers": "transformers_worker",
}
"""Name → worker module."""
NAMES = ", ".join(case.name for case in CASES + LONG_CASES)
EXACT = "float32"
"""The process that computes logits in float32, against which the others' are held."""
EXACT_BYTES = 2 << 30
"""The largest file for which `EXACT` runs: in float32 it takes up to seven times as much memory."""
PROMPTS = Case("logits", "logits", "prefill", 2, 0, 24)
SCHEMA = 2
"""Counts up when a name in the JSON changes its meaning."""
BUSY = 0.3
"""Other programs' load, as a share of a CPU, from which on a warning is shown."""
DRIFT = 0.1
"""Difference between the machine's limits before and after from which on a warning is shown."""


EFFORT = Effort()
QUICK = Effort(repetitions=3, loads=1, decode_steps=3, turn_seconds=0.02, limit_seconds=0.3, array_bytes=1 << 28)
"""Enough to see that everything runs; too little to believe."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    model: str = "tales"
    cases: tuple[Case, ...] = CASES
    peers: tuple[str, ...] = tuple(PEERS)
    threads: int | None = None
    """None means all usable CPUs."""
    kv_dtype: str | None = None
    """forge's; None is its default."""
    peer_python: str | None = None
    """An interpreter in which peers are looked for first; None for this one alone."""
    peer_bin: str | None = None
    """ik_llama.cpp's `llama-batched-bench`, or its folder."""
    effort: Effort = EFFORT

    def __post_init__(self):
        kit.at_least_one(threads=self.threads, reps=self.effort.repetitions)
        if self.peer_python is not None and shutil.which(self.peer_python) is None:
            raise UsageError(f"{self.peer_python}: no such program; --peer-python is a Python interpreter")
        if self.peer_bin is not None and not os.path.exists(self.peer_bin):
            raise UsageError(f"{self.peer_bin}: no such folder; --peer-bin is where ik_llama.cpp's programs are")
        if not self.cases:
            raise UsageError("no figure is left to measure")


def run(plan: Plan, on_progress: Progress = lambda text: None) -> Generator[Facts, None, None]:
    """Measure, yielding what is known so far after each figure; the last value is the whole.

    Raises `UsageError` for a model that does not exist, `ProcessFailed` if forge itself fails. A peer that fails is
    left out from there on, and its reason is in the result. Closing the iterator ends every process.
    """
    path = resolve_model(plan.model)
    size, threads = measure_model(path, plan.kv_dtype or DEFAULT_KV_DTYPES["cpu"]), plan.threads or usable_cpus()
    facts = {
        "schema": SCHEMA,
        "benchmark": "cpu",
        "model": model_name(path),
        "model_size": size,
        "threads": threads,
        "repetitions": plan.effort.repetitions,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "interrupted": False,
    }
    cases = [case for case in plan.cases if case.length <= size.max_context]
    too_long = [
        {"name": case.title, "reason": f"needs a context of {case.length:,}, and the model's is {size.max_context:,}"}
        for case in plan.cases
        if case not in cases
    ]
    on_progress("what this machine can do")
    before = _limits(plan)
    with TemporaryDirectory(prefix="forge-bench-") as scratch, Runner(on_progress) as runner:
        longest = max((case.length for case in cases), default=1)
        contenders = _load(runner, plan, path, {"threads": threads, "max_model_len": longest}, scratch)
        measured: list[tuple[Case, Needs, Facts]] = []

        def so_far(after: Limits | None) -> Facts:
            used = before.or_better(after)
            limits = {"before": before, "after": after, "used": used}
            figures = [figure(*entry, used) for entry in measured]
            rest = {"contenders": list(contenders.values()), "skipped": [*too_long, *runner.skipped]}
            return facts | {"limits": limits} | rest | {"figures": figures}

        for case in cases:
            turns = runner.take_turns(case, size.vocab_size, plan.effort)
            measured.append((case, needs_of(case, size), turns))
            for name in list(runner.processes):
                if answer := runner.ask(name, "memory"):
                    contenders[name]["peak_bytes"] = answer["peak_bytes"]
            yield so_far(None)
        _compare_logits(runner, contenders, path, size)
    on_progress("what this machine can do, once more")
    yield so_far(_limits(plan))


def _limits(plan: Plan) -> Limits:
    answer = measure_limits("cpu", plan.effort)
    return Limits(answer["bytes_per_second"], answer["products_per_second"])


def _compare_logits(runner: Runner, contenders: dict[str, Facts], path: Path, size: ModelSize) -> None:
    """Compare each program's logits after some prompts with float32 arithmetic on the same file: the relative error
    (L2)."""

    def ask(name: str) -> Facts:
        runner.say(f"logits: {name}")
        if name == EXACT:
            runner.open(Launch(EXACT, "forge_worker"), model=str(path.absolute()), device="reference")
        answers = [runner.processes[name].ask("logits", token_ids=ids) for ids in PROMPTS.token_ids(size.vocab_size)]
        return {"logits": np.array([answer["logits"] for answer in answers])}

    exact = runner.attempt(EXACT, partial(ask, EXACT)) if size.file_bytes < EXACT_BYTES else None
    runner.close(EXACT)
    for name, contender in contenders.items():
        answer = exact and name in runner.processes and runner.attempt(name, partial(ask, name), f"{name}, logits")
        if answer and exact:
            distance = np.linalg.norm(answer["logits"] - exact["logits"])
            contender["logits_error"] = float(distance / np.linalg.norm(exact["logits"]))


def _load(runner: Runner, plan: Plan, path: Path, options: dict[str, int], scratch: str) -> dict[str, Facts]:
    """Have each program load the file `loads` times, in turn, each time in a new process; the last ones stay.

    What has to be done once per machine (compiling kernels) does not count. A peer is looked for in `peer_python`
    first, then in this interpreter. Returns name → what is known of it.
    """
    _read_through(path)
    pythons = list(dict.fromkeys(filter(None, (plan.peer_python, sys.executable))))
    launches = {FORGE: [Launch(FORGE, "forge_worker")]}
    launches |= {peer: [Launch(peer, PEERS[peer], python) for python in pythons] for peer in plan.peers}
    loading = {"model": str(path.absolute()), "device": "cpu", **options}
    ours = {"max_num_seqs": 1, "block_size": BLOCK_SIZE, "kv_dtype": plan.kv_dtype}
    theirs = {"scratch": scratch, "binary": plan.peer_bin}

    def load(name: str) -> Facts:
        reasons, fields = [], loading | (ours if name == FORGE else theirs)
        for launch in launches[name]:
            try:
                answer = runner.open(launch, **fields)
                answer = runner.open(launch, **fields) if answer["first_time"] else answer
            except PeerMissing as reason:
                reasons.append(str(reason))
                continue
            launches[name] = [launch]
            peak = runner.processes[name].ask("memory")["peak_bytes"]
            description = {"description": answer["description"], "weight_bytes": answer.get("weight_bytes")}
            return description | {"seconds": answer["seconds"], "loaded_bytes": peak, "peak_bytes": peak}
        raise PeerMissing("; ".join(reasons))

    contenders: dict[str, Facts] = {}
    for repetition in range(plan.effort.loads):
        for name in list(launches):
            runner.say(f"load {repetition + 1} of {plan.effort.loads}: {name}")
            answer = runner.attempt(name, partial(load, name))
            if answer is None:
                launches.pop(name)
                continue
            contender = contenders.setdefault(name, {"name": name, "load_seconds": [], "logits_error": None})
            contender["load_seconds"].append(answer.pop("seconds"))
            contender |= answer | {"load": Figure.of(contender["load_seconds"])}
    return contenders


def _read_through(path: Path) -> None:
    """Read the model once, so that every program loads it from the system's cache and none from the disk."""
    for name in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with name.open("rb") as file:
            while file.read(1 << 24):
                pass


def figure(case: Case, needs: Needs, turns: Facts, limits: Limits) -> Facts:
    """Return one case, measured for every process, forge first: every repetition, and what is made of them."""
    ours = turns[FORGE]

    def measured(name: str, turn: Facts) -> Facts:
        is_peer, tokens = name != FORGE, turn["top_tokens"]
        shows_tokens = is_peer and len(tokens) == len(ours["top_tokens"])  # a program that shows none says nothing
        return {
            "contender": name,
            **turn,
            "tokens_per_second": Figure.of([case.tokens_per_step / seconds for seconds in turn["seconds"]]),
            "forge_is_times_as_fast": Figure.of(ratios(turn["seconds"], ours["seconds"])) if is_peer else None,
            "top_token_disagreements": sum(map(ne, ours["top_tokens"], tokens)) if shows_tokens else None,
            "roofline": Roofline.of(needs, median(turn["seconds"]), limits),
        }

    return {"case": case, "needs": needs, "measured": [measured(*turn) for turn in turns.items()]}


def screen(facts: Facts) -> Iterator[Part]:
    """Yield what ran on what; speed; how near the machine's limits each figure is; loading and memory; what was left
    out."""
    figures, contenders, model = facts["figures"], facts["contenders"], facts["model_size"]
    peers = [contender["name"] for contender in contenders if contender["name"] != FORGE]
    beside = f" beside {' and '.join(peers)}" if peers else ""
    yield title(f"How fast is this model here{beside}?")
    turns = f"{plural(facts['repetitions'], 'repetition')}, taking turns"
    on = f" on {one_line(facts['machine'])}"
    threads = plural(facts["threads"], "thread")
    yield f"{one_line(facts['model'])} ({size(model.file_bytes)}), {threads}{on}; {turns}"
    yield from (one_line(contender["description"]) for contender in contenders)
    if figures:
        yield _speed_tables(figures, peers)
        if peers:
            how = "A ratio is forge over the peer, taken repetition by repetition; above 1 forge is faster."
            yield f"Medians (least–most). {how}"
        yield from _settings(figures)
        if contexts := sorted({entry["case"].context for entry in figures if entry["case"].kind == "decode"}):
            lengths = " or ".join(f"{context:,}" for context in contexts)
            yield f"decode N: N sequences with {lengths} tokens each in the cache take one step together."
        yield from _roofline(figures, facts["limits"]["used"])
    if contenders:
        yield None
        load = {"s": lambda value: f"{value:.{2 if value >= 0.1 else 3}f}"}
        columns = ["memory: {name}", "load, s: {load:s}", "loaded: {loaded_bytes:size}"]
        columns += ["peak: {peak_bytes:size}", "/ file: {share:,.2f} x", "error: {logits_error:.2%}"]
        shares = [contender | {"share": contender["peak_bytes"] / model.file_bytes} for contender in contenders]
        yield Table.of(shares, *columns, formats=load)
        yield (
            "load: from opening the file, which is in the system's cache, to ready. loaded, peak: the most memory "
            "that the process had had by then, and in all; interpreter, libraries and mapped pages included. "
            "error: relative (L2), of the last logits of two prompts of 24 random tokens, to float32 arithmetic."
        )
        for contender in contenders:
            if held := contender["weight_bytes"]:
                share = held / model.weight_bytes
                yield f"{contender['name']} keeps the weights in {size(held)}, {share:,.2f} x the file."
    if notes := list(_notes(facts)):
        yield from (None, *notes)


def _settings(figures: list[Facts]) -> Iterator[str]:
    """Yield which setting each program was fastest with, and in which cases."""
    cases: dict[tuple[str, str], list[str]] = {}
    for entry in figures:
        for turn in entry["measured"]:
            cases.setdefault((turn["contender"], turn["setting"]), []).append(entry["case"].title)
    for (name, setting), titles in sorted(cases.items(), key=lambda item: item[0][0] != FORGE):
        yield one_line(f"{name}, {setting}: {', '.join(titles)}")


def _speed_tables(figures: list[Facts], peers: list[str]) -> Fitting:
    """Return one table for all peers where it fits, otherwise one for each, with fewer spreads if it must be."""
    apart = [[peer] for peer in peers] or [[]]
    tried = (([peers], 2), (apart, 2), (apart, 1), (apart, 0))
    return Fitting([[_speed_table(figures, group, spreads) for group in groups] for groups, spreads in tried])


def _speed_table(figures: list[Facts], peers: list[str], spreads: int) -> Table:
    """Build a table of speeds. spreads: how many columns show the least and the most: 2, forge and the ratios; 1,
    forge; 0, none."""

    def cells(entry: Facts) -> Iterator[str]:
        measured = {turn["contender"]: turn for turn in entry["measured"]}
        ours = measured[FORGE]
        yield entry["case"].title
        speed = ours["tokens_per_second"]
        yield speed.text(rate) if spreads else rate(speed.median)
        for peer in peers:
            theirs = measured.get(peer)
            yield rate(theirs["tokens_per_second"].median) if theirs else NOTHING
            times = theirs and theirs["forge_is_times_as_fast"]
            spread = f" ({ratio(times.low)}–{ratio(times.high)})" if times and spreads > 1 else ""
            yield f"{ratio(times.median)} x{spread}" if times else NOTHING
        yield fill("{share:percent} {bound}", ours["roofline"])

    headings = ["tokens/s", FORGE, *(heading for peer in peers for heading in (peer, "ratio")), "of the limit"]
    return Table(headings, [[*cells(entry)] for entry in figures], styles={1: ACCENT})


def _roofline(figures: list[Facts], limits: Limits) -> Iterator[Part]:
    memory, products = limits.bytes_per_second / 1e9, limits.products_per_second / 1e9
    yield None
    words = f"{memory:,.1f} GB/s from memory; {products:,.0f} G int8 products/s, forge's tile with its weights in cache"
    yield title("The machine's limits: ").append(words, "not bold")
    lines = [entry | entry["measured"][0] for entry in figures]

    def took(seconds: float) -> str:
        return f"{seconds * 1e3:,.1f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"

    shown = {
        "G": lambda value: f"{value / 1e9:,.1f}",
        "g": lambda value: f"{value / 1e9:,.0f}",
        "billions": lambda value: f"{value / 1e9:,.1f} G" if value >= 1e9 else f"{value / 1e6:,.1f} M",
        "ms": took,
        "middle": lambda every: took(median(every)),
    }
    columns = ["roofline: {case.title}", "reads: {needs.bytes_read:size}", "GB/s: {roofline.bytes_per_second:G}"]
    columns += ["products: {needs.products:billions}", "G/s: {roofline.products_per_second:g}"]
    columns += ["at best: {roofline.limit_seconds:ms}", "took: {seconds:middle}", "share: {roofline.share:percent}"]
    yield Table.of(lines, *columns, formats=shown)
    sentence = (
        "reads: the file's weights once, and the keys and values before the step. products: multiplications as int8; a "
        "float32 one counts as four, one in bfloat16, or of 16 bits with 8, as two. "
        "at best: what the nearer limit allows."
    )
    if any(entry["roofline"].bound == "memory" and entry["roofline"].share > 1 for entry in lines):
        sentence += " More than 100 % of memory's limit: these weights stay in the processor's cache between steps."
    yield sentence


def _notes(facts: Facts) -> Iterator[Part]:
    for skipped in facts["skipped"]:
        yield f"· {one_line(skipped['name'])}: {one_line(skipped['reason'])}"
    for entry in facts["figures"]:
        case = entry["case"]
        for turn in entry["measured"]:
            taken = len(turn["seconds"])
            if taken < facts["repetitions"] and not facts["interrupted"]:
                words = f"{turn['contender']} took {taken} of {facts['repetitions']} turns"
                yield f"· {case.title}: {words}; its are too long for more"
            if differing := turn["top_token_disagreements"]:
                whole = plural(case.sequences, "sequence")
                words = f"{turn['contender']} sees another likeliest token in {differing} of {whole}"
                yield f"· {case.title}: {words}"
    before, after = (facts["limits"][name] for name in ("before", "after"))
    if after and abs(after.bytes_per_second / before.bytes_per_second - 1) > DRIFT:
        first, last = (f"{limits.bytes_per_second / 1e9:,.1f}" for limits in (before, after))
        yield trouble(f"· the machine did not stay the same: {first} GB/s from memory before the run, {last} after")
    if (load := facts["load_average"]) is not None and load > BUSY:
        busy = f"· the machine was busy with something else (load average {load:.1f} before the run)"
        yield trouble(f"{busy}: expect other figures when it is idle")
    if facts["interrupted"]:
        yield trouble("· interrupted: this is what there was until then")


@kit.benchmark(screen)
def bench_cpu(
    say: Progress,
    engine: Annotated[EngineArgs, Takes("model threads kv_dtype")],
    only: Annotated[str | None, option(f"Figures to measure, with commas: {NAMES}.", default="all")] = None,
    reps: Annotated[int | None, option("Turns of each process per figure; 9 if not given.")] = None,
    peer: Annotated[
        list[str] | None, option(f"{', '.join(PEERS)}, all or none; may be repeated.", default="all")
    ] = None,
    peer_python: Annotated[str | None, option("A Python interpreter that has the peers, if this one has not.")] = None,
    peer_bin: Annotated[
        str | None, option("The folder of ik_llama.cpp's binaries: its llama-batched-bench takes part.")
    ] = None,
    long: Annotated[
        bool, option("Also contexts up to 32,768, and 64 sequences at 1,024: 9 GB and more for a peer.", "--long")
    ] = False,
    quick: QuickOption = False,
) -> Generator[Facts, None, None]:
    """Decode, prefill, load time and memory of the cpu device, beside its peers on the same file in the same run.

    Each engine takes turns in a process of its own. A peer that is not installed is left out, and said to be.

    [dim]forge bench cpu -m Qwen3-0.6B-Q8_0.gguf --peer-python ~/llama/bin/python[/dim]
    """
    effort = kit.effort_of(QUICK if quick else EFFORT, repetitions=reps)
    cases = kit.select(only, CASES + LONG_CASES) if only else CASES + (LONG_CASES if long else ())
    peers = kit.select_peers(peer, PEERS)
    model, threads, kv_dtype = str(engine.model), engine.threads, engine.kv_dtype
    yield from run(Plan(model, cases, peers, threads, kv_dtype, peer_python, peer_bin, effort), say)
