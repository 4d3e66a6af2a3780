"""The threads that run kernels: one team per backend, woken once per forward pass.

A forward pass is a *program*: a table of operations, laid out once when the model is loaded. Every thread of the team
walks the whole table and takes its share of each operation; between operations that depend on each other all wait at a
barrier. So a forward costs one call from Python however many layers the model has, and a barrier costs a microsecond or
two where opening a parallel region would cost several.

A barrier waits for work that a thread has begun, never for a thread that has not come (`team_code.walk`). The system
may have given that one's core to another program for milliseconds, longer than a forward takes; the others then do its
share, and it goes on where they are.

Waiting is done in two ways. Inside a forward, and for a moment after one, a thread spins, because the next work is
microseconds away. When nothing comes it goes to sleep on a lock, and costs nothing.

An operation is `OP_WORDS` int64 words:

    word 0   address of the kernel                word 1   1 if all threads must wait after it
    word 2   what the kernel wants, up to the last line of words, see `program.py`
    word 24  the next item of work not yet taken: threads take them in turn, so a slow one delays no other
    word 31  a bit for each part of the work that is one thread's first, once it or another has claimed it
"""

import ctypes
import os
import threading
from functools import cache

import numpy as np

from forge.backends.cpu.compilation import Kernel
from forge.backends.cpu.words import TEAM_NUM_THREADS, TEAM_SLEEPERS, TEAM_WORDS

_start_kernel = Kernel("team_code", "start", "int64(int64, int64, int64, int64)")
_execute_kernel = Kernel("team_code", "execute", "void(int64, int64)")
_serve_kernel = Kernel("team_code", "serve", "int64(int64, int64, int64)")

MAX_THREADS = 63
"""Sleeping threads are a mask of bits in one int64."""
TEAM_KERNELS = (_start_kernel, _execute_kernel, _serve_kernel)
"""What a team needs compiled."""

_INT64 = ctypes.c_int64


@cache
def _functions():
    """(start, execute, serve) as Python calls them: without the interpreter's lock while they run."""
    return (
        ctypes.CFUNCTYPE(_INT64, *[_INT64] * 4)(_start_kernel.address),
        ctypes.CFUNCTYPE(None, *[_INT64] * 2)(_execute_kernel.address),
        ctypes.CFUNCTYPE(_INT64, *[_INT64] * 3)(_serve_kernel.address),
    )


class Team:
    """`num_threads` threads, the calling one included. Used from one thread at a time."""

    def __init__(self, num_threads: int):
        self._native_start, self._native_execute, self._native_serve = _functions()
        self.num_threads = num_threads
        self._process = os.getpid()
        self._memory = np.zeros(TEAM_WORDS + num_threads, np.int64)
        self._memory[TEAM_NUM_THREADS] = num_threads
        self._address = self._memory.ctypes.data
        self._alone = self._memory.copy()  # the memory of a team of one
        self._alone[TEAM_NUM_THREADS] = 1
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
        self.settle()
        if alone:
            self._native_start(self._alone_address, program, num_ops, context)
        else:
            self._native_start(self._address, program, num_ops, context)
            self.settle()

    def settle(self) -> None:
        """Finish a program that is published and not yet run, because threads are asleep.

        Also after an exception (Ctrl-C, say) came in between: call it before freeing what that program reads.
        """
        sleepers = int(self._memory[TEAM_SLEEPERS])
        if sleepers:
            for number in range(1, self.num_threads):
                if sleepers >> number & 1:
                    self._wake[number].release()
            self._native_execute(self._address, 0)

    def close(self) -> None:
        """End the workers."""
        if self._workers and os.getpid() == self._process:
            self.settle()
            self._native_start(self._address, 0, -1, 0)
            self.settle()
            for worker in self._workers:
                worker.join()
            self._workers = []

    def _work(self, number: int) -> None:
        generation = 0
        while True:
            generation = self._native_serve(self._address, number, generation)
            if generation == -1:
                return
            self._wake[number].acquire()
