"""The thread pool: everything runs exactly once, in order, awake or asleep, and ends when told."""

import threading
import time

import numba
import numpy as np
import pytest

from forge.backends.cpu.kernels import next_range
from forge.backends.cpu.op_layout import CONTEXT, LINE_BYTES, OPERATION_BYTES, operation, structure
from forge.backends.cpu.thread_pool import ThreadPool
from forge.backends.cpu.thread_pool_code import atomic_add, next_item
from forge.backends.cpu.vectors import get_i64, put_i64
from tests.backends.cpu.models import run_python

LAYOUT = operation("count", "target", "source")
"""Of the operations below."""


def count_threads(op, ctx, thread, threads):
    """Each thread leaves a mark of its own."""
    atomic_add(op.target + 8 * thread, 1)


def count_items(op, ctx, thread, threads):
    """Each item is taken by one thread."""
    while True:
        item = next_item(op, 3)
        if item >= op.count:
            break
        for index in range(item, min(item + 3, op.count)):
            atomic_add(op.target + 8 * index, 1)


def count_ranges(op, ctx, thread, threads):
    """Each item is in one thread's range. A source keeps the ranges of one thread alone, and what each would fetch."""
    first, last, following, turn = next_range(op, thread, threads, 3, op.count, 0)
    while first < op.count:
        for index in range(first, last):
            atomic_add(op.target + 8 * index, 1)
        if op.source != 0:
            for number, value in enumerate((first, last, following)):
                put_i64(op.source + 8 * (3 * (first // 3) + number), value)
        first, last, following, turn = next_range(op, thread, threads, 3, op.count, turn)


def reverse_and_add_one(op, ctx, thread, threads):
    """target[i] = source[count - 1 - i] + 1: wrong unless all of source is there."""
    count = op.count
    while True:
        item = next_item(op, 1)
        if item >= count:
            break
        value = get_i64(op.source + 8 * (count - 1 - item))
        put_i64(op.target + 8 * item, value + 1)


class Code:
    """The kernels, compiled here and kept nowhere."""

    def __init__(self):
        signature = numba.void(*map(numba.from_dtype, (LAYOUT, CONTEXT)), numba.int64, numba.int64)
        kernels = count_threads, count_items, count_ranges, reverse_and_add_one
        self.kept = [numba.cfunc(signature)(each) for each in kernels]
        self.threads, self.items, self.ranges, self.reverse = (function.address for function in self.kept)


@pytest.fixture(scope="module")
def code() -> Code:
    return Code()


@pytest.fixture
def make_pool():
    pools = []

    def make(threads: int) -> ThreadPool:
        pools.append(ThreadPool(threads))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def entry(kernel: int, stretches: np.ndarray, *, waits: bool = True, **arguments: int) -> np.ndarray:
    """An operation, with what a run before left in it."""
    entry = np.zeros(OPERATION_BYTES, np.uint8)
    fields = {"kernel": kernel, "waits": waits, "next_item": 10**6, "stretches": stretches.ctypes.data}
    for name, value in (fields | arguments).items():
        setattr(structure(LAYOUT).from_buffer(entry), name, value)
    return entry


class Work:
    """A program that shows who ran what: threads counted, items counted, then 20 arrays each made from the last."""

    ITEMS = 50

    def __init__(self, code: Code, threads: int):
        self.by_thread = np.zeros(threads, np.int64)
        self.by_item, self.in_ranges = np.zeros((2, self.ITEMS), np.int64)
        self.stretches = np.full((3 + 20, threads, LINE_BYTES // 8), 10**6)
        self.arrays = np.zeros((21, self.ITEMS), np.int64)
        self.arrays[0] = np.arange(self.ITEMS)
        counted = (code.items, self.by_item), (code.ranges, self.in_ranges)
        operations = [entry(code.threads, self.stretches[0], target=self.by_thread.ctypes.data, waits=False)]
        for stretches, (kernel, target) in zip(self.stretches[1:], counted, strict=False):
            operations.append(entry(kernel, stretches, target=target.ctypes.data, count=self.ITEMS, waits=False))
        for stretches, source, target in zip(self.stretches[3:], self.arrays, self.arrays[1:], strict=False):
            arrays = {"source": source.ctypes.data, "target": target.ctypes.data}
            operations.append(entry(code.reverse, stretches, count=self.ITEMS, **arrays))
        self.program = np.stack(operations)
        self.context = np.zeros(1, CONTEXT)
        self.runs = 0

    def run(self, pool: ThreadPool, single_threaded: bool = False) -> None:
        self.arrays[1:] = -1
        pool.run(self.program.ctypes.data, len(self.program), self.context.ctypes.data, single_threaded=single_threaded)
        self.runs += 1
        assert (self.arrays[-1] == np.arange(self.ITEMS) + 20).all()

    def check(self) -> None:
        """No thread did its share twice (one that was late may have had none), and every item was done once."""
        assert (self.by_thread <= self.runs).all() and self.by_thread.sum() >= self.runs
        assert (self.by_item == self.runs).all() and (self.in_ranges == self.runs).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_no_thread_does_a_share_twice_and_every_item_is_taken_once(threads, code, make_pool):
    pool, work = make_pool(threads), Work(code, threads)
    for _ in range(40):
        work.run(pool)
    work.check()


def test_the_pool_does_not_wait_for_a_thread_that_never_arrives(code, make_pool):
    """The system may have given its core to another program."""
    pool, work = make_pool(2), Work(code, 3)
    pool._memory.num_threads = 3  # one more than there are
    for _ in range(200):
        work.run(pool)
    work.check()
    assert work.by_thread[2] == 0


def test_a_range_is_followed_by_the_one_that_its_thread_fetches_meanwhile(code, make_pool):
    """And the last one by itself, which is near."""
    ranges, counts, stretches = np.zeros((3, 3), np.int64), np.zeros(8, np.int64), np.zeros((1, 8), np.int64)
    arrays = {"source": ranges.ctypes.data, "target": counts.ctypes.data}
    program = entry(code.ranges, stretches, count=8, **arrays)
    make_pool(1).run(program.ctypes.data, 1, np.zeros(1, CONTEXT).ctypes.data)
    assert ranges.tolist() == [[0, 3, 3], [3, 6, 6], [6, 8, 6]]


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_that_fell_asleep_wake_up(threads, code, make_pool):
    pool, work = make_pool(threads), Work(code, threads)
    for pause in (0, 0.02, 0, 0.1, 0.001, 0.002, 0.005, 0):
        time.sleep(pause)
        work.run(pool)
    work.check()


def test_a_single_threaded_run_uses_the_calling_thread_and_does_not_disturb_the_others(code, make_pool):
    pool, work, single = make_pool(3), Work(code, 3), Work(code, 3)
    for _ in range(20):
        work.run(pool)
        single.run(pool, single_threaded=True)
    work.check()
    assert single.by_thread.tolist() == [20, 0, 0]
    assert (single.by_item == 20).all()


def test_thousands_of_tiny_programs_and_naps_between_them(code, make_pool):
    """20,000 where the machine allows it in five seconds; naps are longer and shorter than the threads' patience."""
    pool, work = make_pool(2), Work(code, 2)
    rng = np.random.default_rng(1)
    deadline = time.monotonic() + 5
    while work.runs < 20_000 and time.monotonic() < deadline:
        work.run(pool)
        if work.runs % 250 == 0:
            time.sleep(rng.choice([0, 1e-4, 5e-4, 1e-3, 2e-3, 8e-3]))
    print(f"{work.runs} programs of {len(work.program)} operations")
    work.check()


def test_busy_python_threads_delay_a_program_and_nothing_more(code, make_pool):
    pool, work = make_pool(2), Work(code, 2)
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
            work.run(pool)
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    work.check()


@pytest.mark.parametrize("pause", [0, 0.05])
def test_close_ends_the_threads_awake_or_asleep(pause, code):
    before = threading.active_count()
    pool = ThreadPool(4)
    assert threading.active_count() == before + 3
    work = Work(code, 4)
    work.run(pool)
    time.sleep(pause)

    pool.close()

    assert threading.active_count() == before
    pool.close()  # again is no mistake
    with pytest.raises(RuntimeError, match=r"close\(\)"):
        work.run(pool)


def test_closing_a_pool_that_never_ran():
    before = threading.active_count()
    ThreadPool(3).close()
    assert threading.active_count() == before


def test_two_pools_one_after_the_other_do_not_meet(code, make_pool):
    pools = [make_pool(2), make_pool(3)]
    works = [Work(code, 2), Work(code, 3)]
    for _ in range(30):
        for pool, work in zip(pools, works, strict=True):
            work.run(pool)
    for work in works:
        work.check()


FORKED = """
import os, numpy as np
from forge.backends.cpu.thread_pool import ThreadPool
pool = ThreadPool(2)
program = np.zeros((0, 320), np.uint8)
pool.run(program.ctypes.data, 0, program.ctypes.data)
child = os.fork()
if child == 0:
    try:
        pool.run(program.ctypes.data, 0, program.ctypes.data)
    except RuntimeError as error:
        print(error, flush=True)
        pool.close()
        os._exit(0)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
pool.close()
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system cannot fork")
def test_a_forked_process_is_told_instead_of_hanging():
    result = run_python(["-W", "ignore", "-c", FORKED])
    assert result.stdout.splitlines() == [
        "forge's kernels cannot run in a forked process: start it with spawn",
        "0",
    ], result.stderr


def test_a_process_ends_with_its_threads_spinning_or_asleep():
    code = "from forge.backends.cpu.thread_pool import ThreadPool\n"
    code += "import time\na = ThreadPool(3)\ntime.sleep(0.1)\nb = ThreadPool(3)\nprint('end')"
    result = run_python(["-c", code])
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")
