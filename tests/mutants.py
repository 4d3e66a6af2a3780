"""`make mutants`: change forge's code in one place at a time, and ask the tests whether they notice.

The tests that `TESTS` names for a module are collected once, and run once to see which of its lines each test reaches.
A process is forked for each mutant (`tests.mutation`). It puts the changed code into the functions that are imported,
and runs the tests that reach the changed line, the quickest way to a failure first; the first failure ends it. A change
outside of all functions needs a process that has not imported the module, and shows it to all tests.

The report has the share of mutants that were caught, and those that survived. A survivor that does all that is
promised stands in `equivalent_mutants.toml` with the reason, and counts neither way. `build/mutants.json` keeps the
last results: `--survivors` tries again what survived, and `--table` prints them.
"""

import argparse
import gc
import json
import mmap
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

from tests.mutation import Change, changes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build/mutants.json"
MUTANT = "FORGE_MUTANT"
"""The environment variable with a mutant's module and number."""
BAR = 0.95
"""At least this share of mutants is caught."""
LIBRARIES = ("numpy", "numba", "hypothesis", "gguf", "tokenizers", "llguidance", "pydantic")
"""Imported once, before the processes are forked."""
_SPAWNS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}
"""Audit events of a test that starts a process: which lines that process reaches is unknown."""

TESTS: dict[str, tuple[str, ...]] = {
    "forge.cache": ("cache",),
    "forge.cache.basic": ("cache/test_basic.py", "cache/test_factory.py", "cache/test_random_operations.py"),
    "forge.cache.block_pool": ("cache/test_block_pool.py", "cache/test_paged.py", "cache/test_prefix.py"),
    "forge.cache.eviction": ("cache/test_eviction.py",),
    "forge.cache.factory": ("cache/test_factory.py",),
    "forge.cache.host_pool": ("cache/test_host_pool.py",),
    "forge.cache.kv_storage": ("cache/test_kv_storage.py",),
    "forge.cache.prefix_index": ("cache/test_prefix.py", "cache/test_paged.py"),
    "forge.cache.kv_cache": ("cache/test_paged.py", "cache/test_prefix.py"),
    "forge.cluster.routers": ("cluster/test_routers.py",),
    "forge.engine": (
        *("engine/test_engine.py", "engine/test_scheduler.py", "engine/test_scheduler_scenarios.py"),
        *("engine/test_preemption.py", "engine/test_oneshot.py", "engine/test_oneshot_planning.py"),
        *("engine/test_tasks.py", "engine/test_chat.py", "engine/test_resume.py", "engine/test_llm.py"),
        *("engine/test_lookahead.py", "engine/test_path.py", "engine/test_block_pairs.py", "cluster/test_handoff.py"),
        *("engine/test_structured_output.py", "engine/test_random_scheduling.py", "trace/test_recorder.py"),
    ),
    "forge.engine.admission": (
        *("engine/test_admission.py", "engine/test_scheduler.py", "engine/test_scheduler_scenarios.py"),
        "engine/test_oneshot_planning.py",
    ),
    "forge.engine.async_scheduling": ("engine/test_lookahead.py", "grammar/test_engine.py"),
    "forge.engine.handoff": ("engine/test_resume.py", "cluster/test_handoff.py"),
    "forge.engine.preemption": ("engine/test_scheduler_scenarios.py", "engine/test_scheduler.py"),
    "forge.engine.batch_builder": ("engine/test_batch_builder.py",),
    "forge.engine.containers": ("engine/test_containers.py",),
    "forge.engine.draft_slots": ("engine/test_draft_slots.py",),
    "forge.engine.prefill_only": (
        *("engine/test_admission.py", "engine/test_oneshot_planning.py", "engine/test_oneshot.py"),
        "engine/test_scheduler.py",
    ),
    "forge.engine.prefix_planner": ("engine/test_prefix_planner.py",),
    "forge.engine.step_record": ("engine/test_step_record.py",),
    "forge.engine.registry": (
        *("engine/test_registry.py", "engine/test_structured_output.py", "engine/test_engine.py"),
        *("engine/test_resume.py", "engine/test_oneshot.py", "engine/test_interruption.py"),
    ),
    "forge.engine.requests": ("engine/test_requests.py",),
    "forge.engine.output_text": ("engine/test_output_text.py", "engine/test_engine.py"),
    "forge.engine.policies": (
        "engine/test_policies.py",
        "testing/test_seams.py",
        "engine/test_scheduler.py",
        "engine/test_preemption.py",
    ),
    "forge.engine.readout": ("engine/test_readout.py",),
    "forge.engine.tasks": ("engine/test_questions.py",),
    "forge.engine.step_plan": ("engine/test_step_plan.py",),
    "forge.engine.rng": ("engine/test_rng.py",),
    "forge.engine.sampler": ("engine/test_sampler.py", "engine/test_engine.py"),
    "forge.engine.sampling": ("engine/test_sampling.py",),
    "forge.engine.sampling_params": ("engine/test_sampling_params.py",),
    "forge.engine.token_filter": ("engine/test_token_filter.py",),
    "forge.grammar.compiler": (
        *("grammar/test_compiler.py", "grammar/test_json_schema.py", "grammar/test_thinking.py"),
        *("server/test_tool_parts.py", "server/test_tools.py"),
    ),
    "forge.grammar.matcher": ("grammar/test_matcher.py", "grammar/test_compiler.py", "grammar/test_distribution.py"),
    "forge.grammar.sandbox": ("grammar/test_sandbox.py",),
    "forge.grammar.sandbox_process": ("grammar/test_sandbox_process.py", "grammar/test_sandbox.py"),
    "forge.grammar.thinking": ("grammar/test_thinking.py",),
    "forge.grammar.vocabulary": ("grammar/test_vocabulary.py", "grammar/test_compiler.py", "grammar/test_matcher.py"),
    "forge.grammar.work_estimate": ("grammar/test_work_estimate.py",),
    "forge.speculation": ("speculation",),
    "forge.speculation.controller": (
        "speculation/test_controller.py",
        "speculation/test_cycle.py",
        "speculation/test_costs.py",
    ),
    "forge.speculation.draft": ("speculation/test_draft.py",),
    "forge.speculation.leases": ("speculation/test_leases.py",),
    "forge.speculation.lookup": ("speculation/test_ngram.py", "speculation/test_replay.py"),
    "forge.speculation.setup": ("speculation/test_setup.py",),
    "forge.speculation.speculator": (*("speculation/test_speculator.py", "speculation/test_undrafted.py"),),
    "forge.speculation.verification": ("speculation/test_verification.py",),
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
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        return code_of(self._mutant)


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


@cache
def source_of(module: str) -> str:
    """The text of a module, as it is when it is first read."""
    return path_of(module).read_text()


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
    text = source_of(module)
    lines = ["", *text.splitlines()]
    return [Mutant(module, number, lines[change.line].strip(), change) for number, change in enumerate(changes(text))]


def code_of(mutant: Mutant) -> CodeType:
    return compile(mutant.change.made_in(source_of(mutant.module)), str(path_of(mutant.module)), "exec")


def put_in_place(mutant: Mutant) -> None:
    """Let this process import a mutant in the place of its module, and those that it starts (`sitecustomize`)."""
    sys.meta_path.insert(0, _Finder(mutant))
    sys.path.append(str(ROOT / "tests/mutated"))
    os.environ |= {MUTANT: f"{mutant.module} {mutant.number}", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def functions_of(module: str) -> dict[tuple[str, int], list[FunctionType]]:
    """All functions that exist of a module's code, by their names and lines."""
    path, found = str(path_of(module)), defaultdict(list)
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename == path:
            found[thing.__code__.co_qualname, thing.__code__.co_firstlineno].append(thing)
    return found


def changed_functions(
    old: CodeType, new: CodeType, functions: dict[tuple[str, int], list[FunctionType]]
) -> list[tuple[FunctionType, CodeType]] | None:
    """The functions whose code differs, with the new code. None if what differs is no function's code, or the code of
    two that are told apart by nothing."""
    if old == new:
        return []
    key = old.co_qualname, old.co_firstlineno
    if those := functions.get(key):
        is_possible = len({function.__code__ for function in those}) == 1 and old.co_freevars == new.co_freevars
        return [(function, new) for function in those] if is_possible else None
    inner = [code for code in old.co_consts if isinstance(code, CodeType)]
    others = [code for code in new.co_consts if isinstance(code, CodeType)]
    if len(inner) != len(others) or _own(old) != _own(new):
        return None
    parts = [changed_functions(*pair, functions) for pair in zip(inner, others, strict=True)]
    return None if None in parts else [change for part in parts for change in part or ()]


def _own(code: CodeType) -> tuple:
    """What a code object is but for those inside of it."""
    constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames


class Reach(NamedTuple):
    """What a test needs and reaches."""

    seconds: float
    lines: frozenset[int]
    starts_processes: bool


class _Judge:
    """A plugin of pytest that tries mutants on the tests which it has collected, in place of running them.

    It sends (number, whether it was caught, by which test) of each mutant, or (number, None, "") of one that this
    process cannot try because what it changes is imported.
    """

    def __init__(self, mutants: list[Mutant], answers: Connection):
        self._mutants, self._answers = mutants, answers
        self._path = str(path_of(mutants[0].module))
        self._lines: set[int] = set()
        self._fixtures: dict[str, set[int]] = defaultdict(set)
        self._has_spawned = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        reaches = self._in_child(lambda: self._reaches(session))
        functions = functions_of(self._mutants[0].module)
        original = compile(source_of(self._mutants[0].module), self._path, "exec")
        kills: Counter[str] = Counter()
        for mutant in self._mutants:
            changed = changed_functions(original, code_of(mutant), functions)
            if changed is None:
                self._answers.send((mutant.number, None, ""))
                continue
            spans = [(function.__code__, max(_lines_of(function.__code__), default=0)) for function, _ in changed]
            span = {line for code, last in spans for line in range(code.co_firstlineno, last + 1)}
            items = _fitting(session.items, reaches, mutant.change.line, span)
            items.sort(key=lambda item: (reaches[item.nodeid].seconds + 0.02) / (kills[item.nodeid] + 0.5))
            killer = self._killer(session, items, reaches, mutant, changed)
            kills[killer] += 1
            self._answers.send((mutant.number, bool(killer), killer))
        return True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        """What a fixture reaches, every test does that uses it, and not the first alone."""
        before, self._lines = self._lines, set()
        yield
        self._fixtures[fixturedef.argname] |= self._lines
        self._lines |= before

    def _reaches(self, session: pytest.Session) -> dict[str, Reach]:
        """Run all tests. Those that fail are left out."""
        found = {}
        sys.addaudithook(self._hear)
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            failed, began = session.testsfailed, time.monotonic()
            self._lines, self._has_spawned = set(), False
            with self._traced():
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed == failed:
                fixtures = [self._fixtures[name] for name in item.fixturenames]  # type: ignore[attr-defined]
                lines = self._lines.union(*fixtures)
                found[item.nodeid] = Reach(time.monotonic() - began, frozenset(lines), self._has_spawned)
        return found

    def _hear(self, event: str, _: tuple) -> None:
        self._has_spawned |= event in _SPAWNS

    @contextmanager
    def _traced(self) -> Iterator[None]:
        def trace(frame, event, argument):
            if frame.f_code.co_filename != self._path:
                return None
            self._lines.add(frame.f_lineno)
            return trace

        threading.settrace(trace)
        sys.settrace(trace)
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _in_child(self, function) -> Any:
        """Return what a function returns in a forked process."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if not child:
            os.setsid()
            theirs.send(function())
            os._exit(0)
        theirs.close()
        result = ours.recv()
        _end(child)
        return result

    def _killer(
        self,
        session: pytest.Session,
        items: list[pytest.Item],
        reaches: dict[str, Reach],
        mutant: Mutant,
        changed: list[tuple[FunctionType, CodeType]],
    ) -> str:
        """The test that fails or does not end with a mutant; "" if all pass."""
        place = mmap.mmap(-1, 8)
        folder = tempfile.mkdtemp()
        child = os.fork()
        if not child:
            os.setsid()
            session.config._tmp_path_factory._basetemp = Path(folder)  # type: ignore[attr-defined]
            put_in_place(mutant)
            for function, code in changed:
                function.__code__ = code
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for index, (item, following) in enumerate(zip(items, [*items[1:], None], strict=True)):
                place[:8] = index.to_bytes(8, "little")
                signal.alarm(int(10 + 10 * reaches[item.nodeid].seconds))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    os._exit(1)
            os._exit(0)
        has_failed = _end(child) != 0
        shutil.rmtree(folder, ignore_errors=True)
        return items[int.from_bytes(place[:8], "little")].nodeid if has_failed else ""


def _lines_of(code: CodeType) -> set[int]:
    inner = [_lines_of(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {line for *_, line in code.co_lines() if line}.union(*inner)


def _fitting(items: list[pytest.Item], reaches: dict[str, Reach], line: int, span: set[int]) -> list[pytest.Item]:
    """The tests that reach a line, or, if none does, its function; and those that may reach it in other processes."""
    passing = [item for item in items if item.nodeid in reaches]
    spawning = [item for item in passing if reaches[item.nodeid].starts_processes]
    for lines in ({line}, span):
        if those := [item for item in passing if reaches[item.nodeid].lines & lines]:
            return [*those, *(item for item in spawning if item not in those)]
    return spawning


def _end(child: int) -> int:
    """Wait for a process, and end what it has started. Returns its exit code."""
    _, status = os.waitpid(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return os.waitstatus_to_exitcode(status)


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)


_QUIET = ("-q", "-p", "no:cacheprovider", "--no-header")


def judged(mutants: list[Mutant], left_out: list[str]) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant of a module with the test that caught it, or "". left_out: names of tests not to use."""
    if not mutants:
        return
    by_number = {mutant.number: mutant for mutant in mutants}
    files = [str(file) for file in tests_of(mutants[0].module)]
    without = [f"--deselect={name}" for name in left_out]
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        os.setsid()
        _silence()
        pytest.main([*_QUIET, *without, *files], plugins=[_Judge(mutants, theirs)])
        os._exit(0)
    theirs.close()
    others = []
    for _ in mutants:
        number, is_caught, killer = ours.recv()
        if is_caught is None:
            others.append(by_number[number])
        else:
            yield by_number[number], killer
    _end(child)
    for mutant in others:
        yield mutant, _killer_of_import(files, without, mutant)


def _killer_of_import(files: list[str], without: list[str], mutant: Mutant) -> str:
    """The file whose tests fail or do not end with a mutant that is imported in place of its module."""
    place = mmap.mmap(-1, 8)
    child = os.fork()
    if not child:
        os.setsid()
        _silence()
        put_in_place(mutant)
        for index, file in enumerate(files):  # none is imported before those in front of it have passed
            place[:8] = index.to_bytes(8, "little")
            signal.alarm(300)
            if pytest.main(["-x", *_QUIET, *without, file]):
                os._exit(1)
        os._exit(0)
    return files[int.from_bytes(place[:8], "little")] if _end(child) else ""


def is_listed(mutant: Mutant) -> bool:
    """Whether a mutant stands in `equivalent_mutants.toml`. A line alone lists its numbers, and no other change."""
    listed = tomllib.loads((ROOT / "tests/equivalent_mutants.toml").read_text()).get(mutant.module, {})
    is_number = re.fullmatch(r"-?\d+ is -?\d+", mutant.change.what)
    return mutant.title in listed or (is_number is not None and mutant.line in listed)


def chosen(module: str, sample: int | None, seed: int) -> list[Mutant]:
    """The mutants of a module that are tried: all, or a sample, but for those that no test can notice."""
    found = mutants_of(module)
    if sample is not None:
        found = random.Random(seed).sample(found, min(sample, len(found)))
    return [mutant for mutant in found if not is_listed(mutant)]


def _table(results: dict[str, dict[str, Any]]) -> str:
    rows = [f"{'module':36} judged caught   share survivors equivalent"]
    for module, result in sorted(results.items()):
        judged, survivors = result["judged"], len(result["survived"])
        share = 1 - survivors / max(judged, 1)
        rows.append(f"{module:36} {judged:6} {judged - survivors:6} {share:7.1%} {survivors:9} {result['listed']:10}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="modules and packages (default: all)")
    parser.add_argument("--sample", type=int, help="try so many of each module, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--survivors", action="store_true", help="try only those that survived the last time")
    parser.add_argument("--without", action="append", default=[], metavar="TEST", help="a test that is not asked")
    parser.add_argument("--table", action="store_true", help="print the last results, and try nothing")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.table:
        print(_table(results))
        return 0
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FORGE_HYPOTHESIS_PROFILE": "mutants"}
    for name in LIBRARIES:
        __import__(name)
    prefixes = tuple(f"{name}." for name in arguments.modules) or ("",)
    names = [name for name in modules() if f"{name}.".startswith(prefixes)]
    for module in names:
        began = time.monotonic()
        those = chosen(module, arguments.sample, arguments.seed)
        before = results.get(module, {"judged": len(those), "survived": []})
        if arguments.survivors:
            those = [mutant for mutant in those if mutant.title in before["survived"]]
        killers: Counter[str] = Counter()
        survived = []
        for mutant, killer in judged(those, arguments.without):
            killers[killer] += 1
            if not killer:
                survived.append(mutant.title)
                print(f"    {module}:{mutant.change.line} survived: {mutant.title}", flush=True)
        results[module] = {
            "judged": before["judged"] - len(before["survived"]) + len(those) if arguments.survivors else len(those),
            "survived": survived,
            "listed": sum(map(is_listed, mutants_of(module))),
            "killers": before.get("killers") if arguments.survivors else dict(killers.most_common()),
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1))
        print(f"{module}: {len(those) - len(survived)} of {len(those)} in {time.monotonic() - began:.0f} s", flush=True)
    print(_table({name: results[name] for name in names}))
    number = sum(results[name]["judged"] for name in names)
    share = 1 - sum(len(results[name]["survived"]) for name in names) / max(number, 1)
    print(f"{share:.1%} of {number} mutants caught (the bar is {BAR:.0%})")
    return 0 if share >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
