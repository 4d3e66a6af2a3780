"""`make mutants`: change forge's code in one place at a time, and ask the tests whether they notice.

Each mutant (`tests.mutation`) of a module runs against the tests that `TESTS` names for it, in a process forked from
one that has already imported the libraries; the first failure ends it. The report has the share of mutants that were
caught, and those that survived. A survivor that computes the same as the code stands in `equivalent_mutants.toml` with
the reason, and counts neither way.
"""

import argparse
import os
import random
import signal
import sys
import time
import tomllib
from collections import defaultdict
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from tests.mutation import Change, changes

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.95
"""At least this share of mutants is caught."""
LIBRARIES = ("numpy", "numba", "hypothesis", "pytest", "gguf", "tokenizers", "llguidance", "pydantic")
"""Imported once, before the processes are forked."""

TESTS: dict[str, tuple[str, ...]] = {
    "forge.cache": ("cache",),
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
"""Which tests a module's mutants are shown to, cheap ones first: those of the longest name that fits."""


class Mutant(NamedTuple):
    module: str
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


def tests_of(module: str) -> list[str]:
    name = max((name for name in TESTS if f"{module}.".startswith(f"{name}.")), key=len)
    return [str(ROOT / "tests" / test) for test in TESTS[name]]


def mutants_of(module: str) -> list[Mutant]:
    text = path_of(module).read_text()
    lines = ["", *text.splitlines()]
    return [Mutant(module, lines[change.line].strip(), change) for change in changes(text)]


def run_tests(module: str, mutant: Mutant | None, seconds: float) -> bool:
    """Whether the tests of a module pass, with one of its mutants in its place, in a forked process."""
    child = os.fork()
    if not child:
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(silence, number)
        import pytest

        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant))
        os._exit(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", *tests_of(module)]))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def chosen(prefixes: list[str], sample: int | None, seed: int) -> list[Mutant]:
    names = [name for name in modules() if not prefixes or name.startswith(tuple(prefixes))]
    found = [mutant for name in names for mutant in mutants_of(name)]
    return found if sample is None else random.Random(seed).sample(found, min(sample, len(found)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="prefixes of module names (default: all)")
    parser.add_argument("--sample", type=int, help="try so many, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True
    for name in LIBRARIES:
        __import__(name)
    equivalent = tomllib.loads((ROOT / "tests/equivalent_mutants.toml").read_text())
    tried: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in chosen(arguments.modules, arguments.sample, arguments.seed):
        if mutant.title not in equivalent.get(mutant.module, {}):
            tried[mutant.module].append(mutant)
    survivors, number = [], 0
    for module, those in sorted(tried.items()):
        began = time.monotonic()
        if not run_tests(module, None, 3600.0):
            print(f"{module}: its tests fail without a mutant: {' '.join(tests_of(module))}")
            return 2
        patience = 20 + 5 * (time.monotonic() - began)
        alive = [mutant for mutant in those if run_tests(module, mutant, patience)]
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
