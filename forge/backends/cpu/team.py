"""The threads that run kernels: one team per process, woken once per forward pass.

A forward pass is a *program*: a table of operations, laid out once when the model is loaded. Every thread of the team
walks the whole table and takes its share of each operation; between operations that depend on each other all wait at a
barrier. So a forward costs one call from Python however many layers the model has, and a barrier costs a fraction of a
microsecond where opening a parallel region would cost several.

Waiting is done in two ways. Inside a forward, and for a moment after one, a thread spins, because the next work is
microseconds away. When nothing comes it goes to sleep on a lock, and costs nothing.

An operation is `OP_WORDS` int64 words:

    word 0   address of the kernel                word 1   1 if all threads must wait after it
    word 2   what the kernel wants, up to the last line of words, see `program.py`
    word 24  the next item of work not yet taken: threads take items one after another, so a slow one holds nobody up
"""

import os
import threading

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.backends.cpu.compilation import cache_folder, instruction_set
from forge.backends.cpu.vectors import I64, call_intrinsic, get_i64, put_i64

OP_WORDS = 32
OP_BYTES = 8 * OP_WORDS
WAIT_WORD = 1
NEXT_WORD = 24

# Words of the team's shared memory, a cache line (8 words) apart where threads write them.
_GENERATION, _PROGRAM, _NUM_OPS, _CONTEXT, _NUM_THREADS = 0, 8, 9, 10, 11
_ARRIVED, _PHASE, _ASLEEP = 16, 24, 32
_SPINS_BEFORE_YIELD = 4000
_SPINS_BEFORE_SLEEP = 20_000


@intrinsic
def atomic_add(typingctx, address, amount):
    """Add to the int64 at an address, for all threads to see; the value before."""

    def codegen(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_swap(typingctx, address, value):
    """Replace the int64 at an address; the value before."""

    def codegen(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("xchg", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at an address as other threads last left it."""

    def codegen(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the processor that this is a waiting loop."""

    def codegen(context, builder, sig, args):
        triple = builder.module.triple
        if triple.startswith("x86_64"):
            call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif triple.startswith(("aarch64", "arm64")):
            call_intrinsic(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(ir.IntType(32), 1))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_kernel(typingctx, function, operation, context_address, thread, threads):
    """Call the machine code at an address with a kernel's four arguments."""

    def codegen(context, builder, sig, args):
        function_type = ir.FunctionType(ir.VoidType(), [I64] * 4)
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@numba.njit(nogil=True)
def take(operation, count):
    """Take the next `count` items of an operation's work; the first one's number."""
    return atomic_add(operation + 8 * NEXT_WORD, count)


def _wait_for_all(team, threads):
    """The barrier: the last thread to arrive lets the others go."""
    phase = atomic_load(team + 8 * _PHASE)
    if atomic_add(team + 8 * _ARRIVED, 1) == threads - 1:
        put_i64(team + 8 * _ARRIVED, 0)
        atomic_add(team + 8 * _PHASE, 1)
        return
    spins = 0
    while atomic_load(team + 8 * _PHASE) == phase:
        pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _sched_yield()


def _execute(team, thread):
    """Walk the program."""
    program, num_ops = get_i64(team + 8 * _PROGRAM), get_i64(team + 8 * _NUM_OPS)
    context, threads = get_i64(team + 8 * _CONTEXT), get_i64(team + 8 * _NUM_THREADS)
    for number in range(num_ops):
        operation = program + number * OP_BYTES
        call_kernel(get_i64(operation), operation, context, thread, threads)
        if threads > 1 and get_i64(operation + 8 * WAIT_WORD) != 0:
            wait_for_all(team, threads)


def _start(team, program, num_ops, context):
    """Publish a program and run thread 0's share. If threads are asleep, return their mask first and run nothing."""
    for number in range(num_ops):
        put_i64(program + number * OP_BYTES + 8 * NEXT_WORD, 0)
    put_i64(team + 8 * _PROGRAM, program)
    put_i64(team + 8 * _NUM_OPS, num_ops)
    put_i64(team + 8 * _CONTEXT, context)
    atomic_add(team + 8 * _GENERATION, 1)
    threads = get_i64(team + 8 * _NUM_THREADS)
    asleep = 0
    for thread in range(1, threads):
        asleep |= atomic_swap(team + 8 * (_ASLEEP + thread), 0) << thread
    if asleep == 0:
        execute(team, 0)
    return asleep


def _serve(team, thread, generation):
    """A worker: run each program as it is published; return when nothing has come for a while.

    Returns the last generation run. The thread is then marked asleep, and must wait for its lock, unless a program came
    at the last moment and whoever published it had not yet seen the mark.
    """
    spins = 0
    while True:
        current = atomic_load(team + 8 * _GENERATION)
        if current != generation:
            generation = current
            if get_i64(team + 8 * _NUM_OPS) < 0:
                return -1
            execute(team, thread)
            spins = 0
            continue
        pause()
        spins += 1
        if spins % 1000 == 0:
            _sched_yield()
        if spins > _SPINS_BEFORE_SLEEP:
            mark = team + 8 * (_ASLEEP + thread)
            atomic_swap(mark, 1)
            if atomic_load(team + 8 * _GENERATION) == generation or atomic_swap(mark, 0) == 0:
                return generation
            spins = 0


_OPTIONS = {"nogil": True, "cache": True}
_INT = types.int64


def _compile():
    """Compile the team's own functions, inner ones first; they find each other as globals."""
    global wait_for_all, execute, start, serve
    instruction_set()
    options = {"nogil": True, "cache": cache_folder() is not None}
    wait_for_all = numba.njit(types.void(_INT, _INT), **options)(_wait_for_all)
    execute = numba.njit(types.void(_INT, _INT), **options)(_execute)
    start = numba.njit(_INT(_INT, _INT, _INT, _INT), **options)(_start)
    serve = numba.njit(_INT(_INT, _INT, _INT), **options)(_serve)


wait_for_all = execute = start = serve = None


class Team:
    """`num_threads` threads, the calling one included. Used from one thread at a time."""

    def __init__(self, num_threads: int):
        if start is None:
            _compile()
        self.num_threads = num_threads
        self._process = os.getpid()
        self._memory = np.zeros(64 + num_threads + 8, np.int64)
        self._memory[_NUM_THREADS] = num_threads
        self._address = self._memory.ctypes.data
        self._alone = self._memory.copy()  # the memory of a team of one
        self._alone[_NUM_THREADS] = 1
        self._alone_address = self._alone.ctypes.data
        self._wake = [threading.Semaphore(0) for _ in range(num_threads)]
        self._workers = [
            threading.Thread(target=self._work, args=(number,), name=f"forge-kernel-{number}", daemon=True)
            for number in range(1, num_threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, program: int, num_ops: int, context: int, alone: bool = False) -> None:
        """Run a program of `num_ops` operations. `program` and `context` are the addresses of int64 arrays: the
        operations, `[num_ops, OP_WORDS]`, and the words that their kernels read.

        `alone` runs it on the calling thread only, which is faster for a program shorter than its barriers.
        """
        if os.getpid() != self._process:
            raise RuntimeError("forge's kernels cannot run in a forked process: start it with spawn")
        if len(self._workers) != self.num_threads - 1:
            raise RuntimeError("these threads were ended by close()")
        if alone:
            start(self._alone_address, program, num_ops, context)
        else:
            self._start(program, num_ops, context)

    def close(self) -> None:
        """End the workers."""
        if self._workers and os.getpid() == self._process:
            self._start(0, -1, 0)
            for worker in self._workers:
                worker.join()
            self._workers = []

    def _start(self, program: int, num_ops: int, context: int) -> None:
        asleep = start(self._address, program, num_ops, context)
        if asleep:
            for number in range(1, self.num_threads):
                if asleep >> number & 1:
                    self._wake[number].release()
            execute(self._address, 0)

    def _work(self, number: int) -> None:
        generation = 0
        while True:
            generation = serve(self._address, number, generation)
            if generation == -1:
                return
            self._wake[number].acquire()
