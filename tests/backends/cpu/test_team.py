"""The team of threads: everything runs exactly once, in order, awake or asleep, and ends when told."""

import threading
import time

import numba
import numpy as np
import pytest

from forge.backends.cpu.compilation import KERNEL_SIGNATURE
from forge.backends.cpu.team import Team
from forge.backends.cpu.team_code import atomic_add, take
from forge.backends.cpu.vectors import get_i64, put_i64
from forge.backends.cpu.words import CLAIM_WORD, NEXT_WORD, OP_WORDS, TEAM_NUM_THREADS, WAIT_WORD
from tests.backends.cpu.models import run_python

COUNT, TARGET, SOURCE = 2, 3, 4  # words of the operations below


def count_threads(op, ctx, thread, threads):
    """Each thread leaves a mark of its own."""
    atomic_add(get_i64(op + 8 * TARGET) + 8 * thread, 1)


def count_items(op, ctx, thread, threads):
    """Each item is taken by one thread."""
    while True:
        item = take(op, 3)
        if item >= get_i64(op + 8 * COUNT):
            break
        for index in range(item, min(item + 3, get_i64(op + 8 * COUNT))):
            atomic_add(get_i64(op + 8 * TARGET) + 8 * index, 1)


def reverse_and_add_one(op, ctx, thread, threads):
    """target[i] = source[count - 1 - i] + 1: wrong unless all of source is there."""
    count = get_i64(op + 8 * COUNT)
    while True:
        item = take(op, 1)
        if item >= count:
            break
        value = get_i64(get_i64(op + 8 * SOURCE) + 8 * (count - 1 - item))
        put_i64(get_i64(op + 8 * TARGET) + 8 * item, value + 1)


class Code:
    """The three kernels, compiled here and kept nowhere."""

    def __init__(self):
        self.kept = [numba.cfunc(KERNEL_SIGNATURE)(f) for f in (count_threads, count_items, reverse_and_add_one)]
        self.threads, self.items, self.reverse = (function.address for function in self.kept)


@pytest.fixture(scope="module")
def code() -> Code:
    return Code()


@pytest.fixture
def make_team():
    teams = []

    def make(threads: int) -> Team:
        teams.append(Team(threads))
        return teams[-1]

    yield make
    for team in teams:
        team.close()


def operation(kernel: int, *, wait: bool = True, **words: int) -> np.ndarray:
    entry = np.zeros(OP_WORDS, np.int64)
    entry[0], entry[WAIT_WORD] = kernel, wait
    entry[NEXT_WORD], entry[CLAIM_WORD] = 10**6, -1  # left over from a run before
    for name, value in words.items():
        entry[{"count": COUNT, "target": TARGET, "source": SOURCE}[name]] = value
    return entry


class Work:
    """A program that shows who ran what: threads counted, items counted, then 20 arrays each made from the last."""

    ITEMS = 50

    def __init__(self, code: Code, threads: int):
        self.by_thread = np.zeros(threads, np.int64)
        self.by_item = np.zeros(self.ITEMS, np.int64)
        self.arrays = np.zeros((21, self.ITEMS), np.int64)
        self.arrays[0] = np.arange(self.ITEMS)
        operations = [
            operation(code.threads, target=self.by_thread.ctypes.data, wait=False),
            operation(code.items, target=self.by_item.ctypes.data, count=self.ITEMS, wait=False),
        ]
        for source, target in zip(self.arrays, self.arrays[1:], strict=False):
            words = {"source": source.ctypes.data, "target": target.ctypes.data}
            operations.append(operation(code.reverse, count=self.ITEMS, **words))
        self.program = np.stack(operations)
        self.context = np.zeros(24, np.int64)
        self.runs = 0

    def run(self, team: Team, alone: bool = False) -> None:
        self.arrays[1:] = -1
        team.run(self.program.ctypes.data, len(self.program), self.context.ctypes.data, alone=alone)
        self.runs += 1
        assert (self.arrays[-1] == np.arange(self.ITEMS) + 20).all()

    def check(self) -> None:
        """No thread did its share twice (one that was late may have had none), and every item was done once."""
        assert (self.by_thread <= self.runs).all() and self.by_thread.sum() >= self.runs
        assert (self.by_item == self.runs).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_no_thread_does_a_share_twice_and_every_item_is_taken_once(threads, code, make_team):
    team, work = make_team(threads), Work(code, threads)
    for _ in range(40):
        work.run(team)
    work.check()


def test_nobody_waits_for_a_thread_that_does_not_come(code, make_team):
    """The system may have given its core to another program."""
    team, work = make_team(2), Work(code, 3)
    team._memory[TEAM_NUM_THREADS] = 3  # one more than there are
    for _ in range(200):
        work.run(team)
    work.check()
    assert work.by_thread[2] == 0


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_that_fell_asleep_wake_up(threads, code, make_team):
    team, work = make_team(threads), Work(code, threads)
    for pause in (0, 0.02, 0, 0.1, 0.001, 0.002, 0.005, 0):
        time.sleep(pause)
        work.run(team)
    work.check()


def test_alone_runs_on_the_calling_thread_and_the_others_are_not_disturbed(code, make_team):
    team, work, single = make_team(3), Work(code, 3), Work(code, 3)
    for _ in range(20):
        work.run(team)
        single.run(team, alone=True)
    work.check()
    assert single.by_thread.tolist() == [20, 0, 0]
    assert (single.by_item == 20).all()


def test_thousands_of_tiny_programs_and_naps_between_them(code, make_team):
    """20,000 where the machine allows it in five seconds; naps are longer and shorter than the threads' patience."""
    team, work = make_team(2), Work(code, 2)
    rng = np.random.default_rng(1)
    deadline = time.monotonic() + 5
    while work.runs < 20_000 and time.monotonic() < deadline:
        work.run(team)
        if work.runs % 250 == 0:
            time.sleep(rng.choice([0, 1e-4, 5e-4, 1e-3, 2e-3, 8e-3]))
    print(f"{work.runs} programs of {len(work.program)} operations")
    work.check()


def test_busy_python_threads_delay_a_program_and_nothing_more(code, make_team):
    team, work = make_team(2), Work(code, 2)
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(100))

    busy = [threading.Thread(target=spin) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        for index in range(8):
            if index % 3 == 0:
                time.sleep(0.01)
            work.run(team)
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    work.check()


@pytest.mark.parametrize("pause", [0, 0.05])
def test_close_ends_the_threads_awake_or_asleep(pause, code):
    before = threading.active_count()
    team = Team(4)
    assert threading.active_count() == before + 3
    work = Work(code, 4)
    work.run(team)
    time.sleep(pause)

    team.close()

    assert threading.active_count() == before
    team.close()  # again is no mistake
    with pytest.raises(RuntimeError, match=r"close\(\)"):
        work.run(team)


def test_closing_a_team_that_never_ran():
    before = threading.active_count()
    Team(3).close()
    assert threading.active_count() == before


def test_two_teams_one_after_the_other_do_not_meet(code, make_team):
    teams = [make_team(2), make_team(3)]
    works = [Work(code, 2), Work(code, 3)]
    for _ in range(30):
        for team, work in zip(teams, works, strict=True):
            work.run(team)
    for work in works:
        work.check()


FORKED = """
import os, numpy as np
from forge.backends.cpu.team import Team
team = Team(2)
program = np.zeros((0, 32), np.int64)
team.run(program.ctypes.data, 0, program.ctypes.data)
child = os.fork()
if child == 0:
    try:
        team.run(program.ctypes.data, 0, program.ctypes.data)
    except RuntimeError as error:
        print(error, flush=True)
        team.close()
        os._exit(0)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
team.close()
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system cannot fork")
def test_a_forked_process_is_told_instead_of_hanging():
    result = run_python(["-W", "ignore", "-c", FORKED])
    assert result.stdout.splitlines() == [
        "forge's kernels cannot run in a forked process: start it with spawn",
        "0",
    ], result.stderr


def test_a_process_ends_with_its_threads_spinning_or_asleep():
    code = "from forge.backends.cpu.team import Team\n"
    code += "import time\na = Team(3)\ntime.sleep(0.1)\nb = Team(3)\nprint('end')"
    result = run_python(["-c", code])
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")
