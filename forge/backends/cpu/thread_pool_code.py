"""What the threads of a pool run (see `thread_pool.py`): a program's operations, and waiting for the next program.

Compiled to machine code like a kernel. `pool` is the memory that the threads share (`op_layout.POOL`).
"""

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.backends.cpu.llvm_code import I64, call_address, call_intrinsic
from forge.backends.cpu.op_layout import INSIDE_SLOTS, LINE_BYTES, OPERATION, OPERATION_BYTES
from forge.backends.cpu.vectors import address, emits, field_address, put_i64

_SPINS_BEFORE_YIELD = 4000
_SPINS_BEFORE_SLEEP = 20_000
_PLACE_BITS = 20
"""A place in a program is one integer: its low bits, as many as this, number the operation, those above the program."""


def _atomic(operation: str):
    """Make a function that changes the int64 at an address atomically, and returns the value before."""

    return emits(types.int64, types.int64, types.int64)(
        lambda b, address, operand: b.atomic_rmw(operation, b.inttoptr(address, I64.as_pointer()), operand, "seq_cst")
    )


atomic_add, atomic_swap, atomic_max = map(_atomic, ("add", "xchg", "max"))


@emits(types.int64, types.int64)
def atomic_load(builder, address):
    """Load atomically the int64 at an address."""
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@emits(types.void)
def pause(builder):
    """Tell the processor that this is a waiting loop."""

    triple = builder.module.triple
    if triple.startswith("x86_64"):
        call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif triple.startswith(("aarch64", "arm64")):
        call_intrinsic(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(ir.IntType(32), 1))


call_kernel = emits(types.void, *[types.int64] * 5)(call_address)
"""Call a kernel by its address, with its four arguments: operation, context, thread, threads."""

_operation_type = numba.from_dtype(OPERATION)


@intrinsic
def operation_at(typingctx, program, number):
    """Return an operation of the program at an address."""

    def codegen(context, builder, sig, args):
        start = builder.add(args[0], builder.mul(args[1], I64(OPERATION_BYTES)))
        return builder.inttoptr(start, context.get_value_type(_operation_type))

    return _operation_type(types.int64, types.int64), codegen


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@numba.njit(inline="always")
def next_item(operation, count):
    """Reserve the next `count` items of an operation's work for the caller. Returns the first one's number."""
    return atomic_add(field_address(operation, "next_item"), count)


@numba.njit(inline="always")
def next_of_stretch(operation, thread, count):
    """Reserve the next `count` items of a thread's own stretch for the caller. Returns how many were taken before."""
    return atomic_add(operation.stretches + LINE_BYTES * thread, count)


@numba.njit
def _wait(inside, done, place):
    """Spin until no thread is inside, or until a thread that saw this has reached the place."""
    spins = 0
    while atomic_load(inside) != 0 and atomic_load(done) < place:
        pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _sched_yield()


@numba.njit
def run_program(pool, thread, generation):
    """Do one thread's share of the program of that generation.

    A *stage* is the operations up to one after which all must wait. A kernel returns when all of its items are taken.
    So a thread that comes to the end of a stage closes it, and once no thread is inside any more it is done: one that
    has not come by then need not be waited for. Places in a program only go up: `closed` is the first that may be
    entered, `done` the first that is not done. A late thread continues from there.

    A thread says that it is inside before it looks whether the stage is closed. So either it sees that, and leaves
    again, or the thread that closes the stage sees it, and waits. What belongs to a program is touched from inside
    only: when its last stage is done no thread touches it any more.
    """
    program, num_operations, context, threads = pool.program, pool.num_operations, pool.context, pool.num_threads
    if threads == 1:
        for number in range(num_operations):
            operation = operation_at(program, number)
            call_kernel(operation.kernel, address(operation), context, thread, threads)
        return
    closed, done = field_address(pool, "closed"), field_address(pool, "done")
    begin = generation << _PLACE_BITS
    end = begin + (1 << _PLACE_BITS) - 1
    place = begin
    while True:
        place = max(place, atomic_load(done))
        if place >= end or place - begin >= num_operations:
            return
        number = place - begin
        inside = field_address(pool, "inside") + 8 * (number % INSIDE_SLOTS)
        atomic_add(inside, 1)
        following = atomic_load(closed)
        if following > place:
            atomic_add(inside, -1)
            _wait(inside, done, place + 1)
            if atomic_load(done) <= place:  # then no thread could close a later stage before `following` was read
                atomic_max(done, following)
            continue
        waits = False
        while not waits:
            operation = operation_at(program, number)
            call_kernel(operation.kernel, address(operation), context, thread, threads)
            waits = operation.waits != 0
            number += 1
        place = begin + number if number < num_operations else end
        atomic_max(closed, place)
        atomic_add(inside, -1)
        _wait(inside, done, place)
        if atomic_load(done) < place:
            atomic_max(done, place)


def execute(pool, thread):
    """Run a thread's share of the published program."""
    pool.sleepers = 0
    run_program(pool, thread, pool.generation)


def start(pool, program, num_operations, context):
    """Publish a program and run thread 0's share, unless threads are asleep: then only note which, as a mask.

    They have to be woken before another thread waits for them; Python does that.
    """
    for number in range(num_operations):
        operation = operation_at(program, number)
        operation.next_item = 0
        for thread in range(pool.num_threads):
            put_i64(operation.stretches + LINE_BYTES * thread, 0)
    generation = pool.generation + 1
    atomic_max(field_address(pool, "closed"), generation << _PLACE_BITS)
    atomic_max(field_address(pool, "done"), generation << _PLACE_BITS)
    pool.program = program
    pool.num_operations = num_operations
    pool.context = context
    atomic_add(field_address(pool, "generation"), 1)
    asleep = 0
    for thread in range(1, pool.num_threads):
        asleep |= atomic_swap(field_address(pool, "asleep") + 8 * thread, 0) << thread
    pool.sleepers = asleep
    if asleep == 0:
        run_program(pool, 0, generation)
    return asleep


def serve(pool, thread, generation):
    """Run a worker: each program as it is published, until nothing has come for a while.

    Returns the last generation run. The thread is then marked asleep, and must wait for its lock, unless a program came
    at the last moment and the thread that published it had not yet seen the mark.
    """
    spins = 0
    while True:
        current = atomic_load(field_address(pool, "generation"))
        if current != generation:
            generation = current
            if pool.num_operations < 0:
                return -1
            run_program(pool, thread, generation)
            spins = 0
            continue
        pause()
        spins += 1
        if spins % 1000 == 0:
            _sched_yield()
        if spins > _SPINS_BEFORE_SLEEP:
            mark = field_address(pool, "asleep") + 8 * thread
            atomic_swap(mark, 1)
            if atomic_load(field_address(pool, "generation")) == generation or atomic_swap(mark, 0) == 0:
                return generation
            spins = 0
