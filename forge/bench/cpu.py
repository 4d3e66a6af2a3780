"""`forge bench cpu`: forge beside its peers on one file, in one run, taking turns.

The order of things: the machine's limits; then everybody loads the file, in turn, several times over, and stays loaded
the last time; then, figure by figure, everybody fills its cache, and all take turns, A B C A B C …, while the others
wait for their input; then the machine's limits again. Each contender is a process of its own, so none shares threads,
memory or a library's settings with another.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from forge.backends.cpu.features import usable_cpus
from forge.bench.cases import CASES, Case, ModelSize, measure_model, needs_of
from forge.bench.contender import Contender, ContenderError, ContenderMissing, Launch
from forge.bench.results import FORGE, CpuBenchmark, Figure, Limits, Measured, Skipped, Standing
from forge.errors import UsageError
from forge.model.catalog import model_name, resolve_model

PEERS = {"llama.cpp": "llama_cpp_worker", "transformers": "transformers_worker"}
"""Name → worker module."""

SEED = 1
REST_SECONDS = 0.03
"""Between two turns: threads of the one before, which spin for a moment when they have nothing to do, go to sleep."""
PATIENCE_SECONDS = 60.0
"""A contender that has spent this much time on the turns of one figure takes no more of them."""

Progress = Callable[[str], None]
"""Called with what is about to be done."""


@dataclass(frozen=True)
class Effort:
    """How long a run measures."""

    repetitions: int = 9
    loads: int = 3
    decode_steps: int = 5
    """Steps of one decode turn at least; its figure is their median."""
    turn_seconds: float = 0.1
    """A turn at least."""
    limit_seconds: float = 2.0
    """For each of the machine's limits."""
    array_bytes: int = 1 << 30
    """Of the array that memory bandwidth is measured with."""

    @classmethod
    def quick(cls) -> "Effort":
        """Enough to see that everything runs; too little to believe."""
        return cls(repetitions=3, loads=1, decode_steps=3, turn_seconds=0.02, limit_seconds=0.3, array_bytes=1 << 28)


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    model: str = "tales"
    cases: tuple[Case, ...] = CASES
    peers: tuple[str, ...] = tuple(PEERS)
    threads: int | None = None
    """None for all usable CPUs."""
    peer_python: str | None = None
    """An interpreter in which peers are looked for first; None for this one alone."""
    effort: Effort = Effort()

    def __post_init__(self):
        for name, value in (("--threads", self.threads), ("--reps", self.effort.repetitions)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, and {value} is less")
        if self.peer_python is not None and shutil.which(self.peer_python) is None:
            raise UsageError(f"{self.peer_python}: no such program; --peer-python is a Python interpreter")
        if not self.cases:
            raise UsageError("no figure is left to measure")


def select_peers(names: Sequence[str] | str) -> tuple[str, ...]:
    """`all`, `none`, or names of peers. Raises `UsageError` for one that is none."""
    names = [names] if isinstance(names, str) else list(names)
    if names == ["none"]:
        return ()
    if names == ["all"]:
        return tuple(PEERS)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UsageError(f"unknown peer {unknown[0]!r}; there are {', '.join(PEERS)}, all and none")
    return tuple(name for name in PEERS if name in names)


def run(
    plan: Plan, on_progress: Progress = lambda text: None, machine: str = ""
) -> Generator[CpuBenchmark, None, None]:
    """Measure, yielding what is known so far after each figure; the last value is the whole.

    Raises `UsageError` for a model that does not exist, `ContenderError` if forge itself fails. A peer that fails is
    left out from there on, and its reason is in the result. Closing the iterator ends every process.
    """
    path = resolve_model(plan.model)
    size = measure_model(path)
    threads = plan.threads or usable_cpus()
    result = CpuBenchmark(
        model=model_name(path),
        size=size,
        threads=threads,
        repetitions=plan.effort.repetitions,
        machine=machine,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        before=None,
        after=None,
        standings=(),
        figures=(),
        skipped=(),
    )
    cases = [case for case in plan.cases if case.length <= size.max_context]
    too_long = [
        Skipped(case.title, f"needs a context of {case.length:,}, and the model's is {size.max_context:,}")
        for case in plan.cases
        if case not in cases
    ]
    on_progress("what this machine can do")
    result = replace(result, before=measure_limits(plan.effort))
    with ExitStack() as stack:
        field = _Field(stack, plan, path, threads, max((case.length for case in cases), default=1), on_progress)
        field.load()
        result = replace(result, skipped=(*too_long, *field.skipped), standings=field.standings())
        for case in cases:
            figure = field.measure(case, size)
            result = replace(
                result,
                figures=(*result.figures, figure),
                standings=field.standings(),
                skipped=(*too_long, *field.skipped),
            )
            yield result
    on_progress("what this machine can do, once more")
    yield replace(result, after=measure_limits(plan.effort))


def measure_limits(effort: Effort) -> Limits:
    """The machine's limits, measured in a process of its own."""
    with Contender(Launch("the limits", "limits_worker")) as worker:
        found = worker.ask("measure", array_bytes=effort.array_bytes, seconds=effort.limit_seconds)
    return Limits(found["bytes_per_second"], found["products_per_second"])


class _Field:
    """The contenders of one run: those that are loaded, and those that dropped out."""

    def __init__(self, stack: ExitStack, plan: Plan, path: Path, threads: int, max_context: int, on_progress: Progress):
        self._stack, self._plan, self._say = stack, plan, on_progress
        self._loading = {"model": str(path.absolute()), "threads": threads, "max_context": max_context}
        self._launches = {FORGE: [Launch(FORGE, "forge_worker")]} | {
            peer: [Launch(peer, PEERS[peer], python) for python in self._pythons()] for peer in plan.peers
        }
        self._contenders: dict[str, Contender] = {}
        self._standings: dict[str, Standing] = {}
        self.skipped: list[Skipped] = []

    def load(self) -> None:
        """Everybody loads the file `loads` times, in turn, each time in a new process; the last ones stay.

        What has to be done once per machine (compiling kernels) does not count.
        """
        _read_through(Path(self._loading["model"]))
        seconds: dict[str, list[float]] = {name: [] for name in self._launches}
        for repetition in range(self._plan.effort.loads):
            for name in list(self._launches):
                self._say(f"load {repetition + 1} of {self._plan.effort.loads}: {name}")
                answer = self._try(name, lambda name=name: self._load_one(name))
                if answer is not None:
                    seconds[name].append(answer["seconds"])
        for name, contender in self._contenders.items():
            self._standings[name] = replace(self._standings[name], load_seconds=tuple(seconds[name]))
            self._remember_peak(name, contender)

    def measure(self, case: Case, size: ModelSize) -> Figure:
        """Everybody's repetitions of one case, taking turns."""
        token_ids = case.token_ids(size.vocab_size, SEED)
        settings, seconds, tops = {}, {}, {}
        for name in list(self._contenders):
            self._say(f"{case.title}: {name} fills its cache")
            answer = self._try(
                name,
                lambda name=name: self._contenders[name].ask(
                    "prepare", kind=case.kind, context=case.context, token_ids=token_ids
                ),
            )
            if answer is not None:
                settings[name], seconds[name] = answer["setting"], []
        effort = self._plan.effort
        turn = {"min_steps": effort.decode_steps if case.kind == "decode" else 1, "min_seconds": effort.turn_seconds}
        spent = dict.fromkeys(settings, 0.0)
        for repetition in range(effort.repetitions):
            for name in [name for name in settings if name in self._contenders]:
                if seconds[name] and spent[name] > PATIENCE_SECONDS:
                    continue
                self._say(f"{case.title}: {repetition + 1} of {effort.repetitions}, {name}")
                time.sleep(REST_SECONDS)
                started = time.perf_counter()
                answer = self._try(name, lambda name=name: self._contenders[name].ask("turn", **turn))
                spent[name] += time.perf_counter() - started
                if answer is not None:
                    seconds[name].append(median(answer["seconds"]))
                    tops[name] = tuple(answer["top_tokens"])
        for name, contender in list(self._contenders.items()):
            self._remember_peak(name, contender)
        measured = tuple(
            Measured(name, tuple(seconds[name]), settings[name], tops[name]) for name in settings if seconds[name]
        )
        return Figure(case, needs_of(case, size), measured)

    def standings(self) -> tuple[Standing, ...]:
        return tuple(self._standings.values())

    def _load_one(self, name: str) -> dict[str, Any]:
        """Load in a new process, in the first interpreter that can."""
        if name in self._contenders:
            self._contenders.pop(name).close()
        reasons = []
        for launch in self._launches[name]:
            contender = self._stack.enter_context(Contender(launch))
            try:
                answer = contender.ask("load", **self._loading)
                if answer["first_time"]:
                    contender.close()
                    contender = self._stack.enter_context(Contender(launch))
                    answer = contender.ask("load", **self._loading)
            except ContenderMissing as reason:
                contender.close()
                reasons.append(str(reason))
                continue
            self._launches[name] = [launch]
            self._contenders[name] = contender
            peak = contender.ask("memory")["peak_bytes"]
            self._standings[name] = Standing(
                name, answer["description"], (answer["seconds"],), peak, peak, answer.get("weight_bytes")
            )
            return answer
        raise ContenderMissing("; ".join(reasons))

    def _try(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """What `work` gives; None if that contender, a peer, has to be left out from now on."""
        try:
            return work()
        except ContenderError as error:
            if name == FORGE:
                raise
            self.skipped.append(Skipped(name, str(error)))
            self._launches.pop(name, None)
            if name in self._contenders:
                self._contenders.pop(name).close()
            return None

    def _remember_peak(self, name: str, contender: Contender) -> None:
        answer = self._try(name, lambda: contender.ask("memory"))
        if answer is not None:
            self._standings[name] = replace(self._standings[name], peak_bytes=answer["peak_bytes"])

    def _pythons(self) -> list[str]:
        """Interpreters to look for a peer in: the one that was named, then this one."""
        named = self._plan.peer_python
        return [sys.executable] if named in (None, sys.executable) else [named, sys.executable]


def _read_through(path: Path) -> None:
    """Read the model once, so that everybody loads it from the system's cache and nobody from the disk."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for name in files:
        with name.open("rb") as file:
            while file.read(1 << 24):
                pass
