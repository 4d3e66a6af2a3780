"""`make mutants`: change forge's code in one place at a time, and ask the tests whether they notice.

Each mutant (`tests.mutation`) of a module runs against the tests that `TESTS` names for it, in a process forked from
one that has already imported the libraries; the first failure ends it. The report has the share of mutants that were
caught, and those that survived. A survivor that does all that is promised stands in `equivalent_mutants.toml` with the
reason, and counts neither way.
"""

import argparse
import os
import random
import signal
import sys
import time
import tomllib
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from tests.mutation import Change, changes

ROOT = Path(__file__).resolve().parents[1]
MUTANT = "FORGE_MUTANT"
"""The environment variable with a mutant's module and number."""
BAR = 0.95
"""At least this share of mutants is caught."""
LIBRARIES = ("numpy", "numba", "hypothesis", "pytest", "gguf", "tokenizers", "llguidance", "pydantic")
"""Imported once, before the processes are forked."""

TESTS: dict[str, tuple[str, ...]] = {
    "forge.cache": ("cache",),
    "forge.grammar.compiler": ("grammar", "server/test_tool_parts.py", "server/test_tools.py"),
    "forge.cluster.routers": ("cluster/test_routers.py", "cluster/test_simulation.py"),
    "forge.engine": (
        *("engine/test_engine.py", "engine/test_scheduler.py", "engine/test_scheduler_scenarios.py"),
        *("engine/test_preemption.py", "engine/test_oneshot.py", "engine/test_oneshot_planning.py"),
        *("engine/test_tasks.py", "engine/test_chat.py", "engine/test_resume.py", "engine/test_llm.py"),
        *("engine/test_lookahead.py", "engine/test_path.py", "engine/test_block_pairs.py", "cluster/test_handoff.py"),
        *("engine/test_structured_output.py", "engine/test_random_scheduling.py", "trace/test_recorder.py"),
    ),
    "forge.engine.output_text": ("engine/test_output_text.py", "engine/test_engine.py"),
    "forge.engine.policies": (
        "engine/test_policies.py",
        "testing/test_seams.py",
        "engine/test_scheduler.py",
        "engine/test_preemption.py",
    ),
    "forge.engine.rng": ("engine/test_rng.py", "engine/test_sampling.py"),
    "forge.engine.sampler": ("engine/test_sampling.py", "engine/test_token_filter.py", "engine/test_engine.py"),
    "forge.engine.sampling": ("engine/test_sampling.py", "engine/test_token_filter.py"),
    "forge.engine.sampling_params": ("engine/test_sampling_params.py", "engine/test_sampling.py"),
    "forge.engine.token_filter": ("engine/test_token_filter.py",),
    "forge.grammar": ("grammar",),
    "forge.speculation": ("speculation",),
    "forge.speculation.controller": (
        "speculation/test_controller.py",
        "speculation/test_cycle.py",
        "speculation/test_costs.py",
    ),
    "forge.speculation.leases": ("speculation/test_leases.py",),
    "forge.speculation.lookup": ("speculation/test_ngram.py", "speculation/test_replay.py"),
    "forge.speculation.verification": ("speculation/test_verification.py", "speculation/test_distribution.py"),
}
"""Which tests a module's mutants are shown to, the quick ones first: those of the longest name that fits."""


class Mutant(NamedTuple):
    module: str
    number: int
    """Its place among the module's."""
    line: str
    """The line that is changed, so that an equivalent one is known again when lines move."""
    change: Change

    @property
    def title(self) -> str:
        return f"{self.line} | {self.change.what}"


class _Loader(SourceFileLoader):
    """Loads a mutant in the place of its module."""

    def __init__(self, mutant: Mutant, path: str):
        super().__init__(mutant.module, path)
        self._change = mutant.change

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._change.made_in(Path(self.path).read_text()), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant):
        self._mutant = mutant

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        place = str(path_of(fullname))
        return spec_from_file_location(fullname, place, loader=_Loader(self._mutant, place))


def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def modules() -> list[str]:
    """All modules that have tests in `TESTS`."""
    found = set()
    for name in TESTS:
        path = path_of(name)
        files = [path] if path.is_file() else [file for file in path.with_suffix("").glob("*.py") if file.read_text()]
        found |= {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return sorted(found)


def tests_of(module: str) -> list[Path]:
    """The files with a module's tests."""
    name = max((name for name in TESTS if f"{module}.".startswith(f"{name}.")), key=len)
    places = [ROOT / "tests" / test for test in TESTS[name]]
    return [file for place in places for file in (sorted(place.glob("test_*.py")) if place.is_dir() else [place])]


def mutants_of(module: str) -> list[Mutant]:
    text = path_of(module).read_text()
    lines = ["", *text.splitlines()]
    return [Mutant(module, number, lines[change.line].strip(), change) for number, change in enumerate(changes(text))]


def put_in_place(mutant: Mutant) -> None:
    """Let this process import a mutant in the place of its module, and those that it starts (`sitecustomize`)."""
    sys.meta_path.insert(0, _Finder(mutant))
    sys.path.append(str(ROOT / "tests/mutated"))
    os.environ |= {MUTANT: f"{mutant.module} {mutant.number}", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def run_tests(files: list[Path], mutant: Mutant | None, seconds: float) -> bool:
    """Whether these tests pass in a forked process, with a mutant in the place of its code."""
    child = os.fork()
    if not child:
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(silence, number)
        import pytest

        if mutant is not None:
            put_in_place(mutant)
        for file in files:  # none is imported before those in front of it have passed
            if pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", str(file)]):
                os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@cache
def seconds_of(file: Path) -> float:
    """Measure how long the tests in a file take. Raises `SystemExit` if they fail without a mutant."""
    began = time.monotonic()
    if not run_tests([file], None, 3600.0):
        raise SystemExit(f"{file} fails without a mutant")
    return time.monotonic() - began


def chosen(module: str, sample: int | None, seed: int) -> list[Mutant]:
    """The mutants of a module that are tried: all, or a sample, but for those that no test can notice."""
    found = mutants_of(module)
    if sample is not None:
        found = random.Random(seed).sample(found, min(sample, len(found)))
    listed = tomllib.loads((ROOT / "tests/equivalent_mutants.toml").read_text()).get(module, {})
    return [mutant for mutant in found if not {mutant.line, mutant.title} & listed.keys()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="modules and packages (default: all)")
    parser.add_argument("--sample", type=int, help="try so many of each module, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing them takes longer than most tests
    for name in LIBRARIES:
        __import__(name)
    survivors, number = [], 0
    prefixes = tuple(f"{name}." for name in arguments.modules) or ("",)
    for module in [name for name in modules() if f"{name}.".startswith(prefixes)]:
        those = chosen(module, arguments.sample, arguments.seed)
        files = sorted(tests_of(module), key=seconds_of)
        patience = 60 + 5 * sum(map(seconds_of, files))
        alive = [mutant for mutant in those if run_tests(files, mutant, patience)]
        print(f"{module}: {len(those) - len(alive)} of {len(those)} caught", flush=True)
        for mutant in alive:
            print(f"    survived: {mutant.title}", flush=True)
        survivors += alive
        number += len(those)
    share = 1 - len(survivors) / max(number, 1)
    print(f"{number - len(survivors)} of {number} mutants caught: {share:.1%} (the bar is {BAR:.0%})")
    return 0 if share >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
