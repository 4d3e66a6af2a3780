"""The threads that run kernels: one pool per backend, woken once per forward pass.

A forward pass is a *program*: a table of operations, laid out once when the model is loaded. Every thread of the pool
goes through the whole table and does its share of each operation; between operations that depend on each other all wait
at a barrier. So a forward costs one call from Python however many layers the model has, and a barrier costs a
microsecond or two where opening a parallel region would cost several.

A barrier waits for work that a thread has begun, never for a thread that has not arrived
(`thread_pool_code.run_program`). The system may have given that one's core to another program for milliseconds, longer
than a forward takes; the others then do its share, and it continues where they are.

Waiting is done in two ways. Inside a forward, and for a moment after one, a thread spins, because the next work is
microseconds away. When nothing comes it sleeps on a lock, and costs nothing.
"""

import ctypes
import os
import threading

from forge.backends.cpu.compilation import Kernel
from forge.backends.cpu.op_layout import POOL, structure

POOL_KERNELS = (
    Kernel("thread_pool_code", "start", (POOL, "int64", "int64", "int64"), "int64"),
    Kernel("thread_pool_code", "execute", (POOL, "int64")),
    Kernel("thread_pool_code", "serve", (POOL, "int64", "int64"), "int64"),
)
"""The kernels that a pool needs compiled."""


class ThreadPool:
    """A pool of `num_threads` threads, including the caller's. Only one thread may use it at a time."""

    def __init__(self, num_threads: int):
        self._native_start, self._native_execute, self._native_serve = (kernel.function() for kernel in POOL_KERNELS)
        self.num_threads = num_threads
        self._process = os.getpid()
        self._memory, self._single = structure(POOL)(), structure(POOL)()
        self._memory.num_threads, self._single.num_threads = num_threads, 1  # the second is that of a pool of one
        self._address, self._single_address = ctypes.addressof(self._memory), ctypes.addressof(self._single)
        self._wake = [threading.Semaphore(0) for _ in range(num_threads)]
        self._workers = [
            threading.Thread(target=self._work, args=(number,), name=f"forge-kernel-{number}", daemon=True)
            for number in range(1, num_threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, program: int, num_operations: int, context: int, single_threaded: bool = False) -> None:
        """Run a program of `num_operations` operations. `program` is the address of the first, and `context` that of
        the batch context that their kernels read (`op_layout.py`).

        `single_threaded`: on the calling thread only, which is faster for a program shorter than its barriers.
        """
        if os.getpid() != self._process:
            raise RuntimeError("forge's kernels cannot run in a forked process: start it with spawn")
        if len(self._workers) != self.num_threads - 1:
            raise RuntimeError("these threads were ended by close()")
        self.finish()
        if single_threaded:
            self._native_start(self._single_address, program, num_operations, context)
        else:
            self._native_start(self._address, program, num_operations, context)
            self.finish()

    def finish(self) -> None:
        """Finish a program that is published and not yet run, because threads are asleep.

        Also after an exception (Ctrl-C, say) came in between: call it before freeing what that program reads.
        """
        sleepers = self._memory.sleepers
        if sleepers:
            for number in range(1, self.num_threads):
                if sleepers >> number & 1:
                    self._wake[number].release()
            self._native_execute(self._address, 0)

    def close(self) -> None:
        """End the workers."""
        if self._workers and os.getpid() == self._process:
            self.finish()
            self._native_start(self._address, 0, -1, 0)
            self.finish()
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
