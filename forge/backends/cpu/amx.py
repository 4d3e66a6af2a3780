"""AMX's instructions on tile registers, as pieces of LLVM code.

A register holds up to 16 rows of up to 64 bytes. TDPBSSD and its like multiply two registers of bytes, a and b, and add
the products to int32 `[16, 16]` in a third. A row of b holds four bytes for each of 16 columns, as a line of weights
does:

    sums[row, column] += a[row, 4k + i] * b[k, 4 column + i]        k = 0 … 15, i = 0 … 3

That is 16,384 products; VPDPBUSD has 64. A register is loaded from what was just stored, or memory from a register that
was just stored, only once the stored bytes have reached the cache.

Sources: Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3; Linux's
Documentation/arch/x86/xstate.rst.
"""

from collections.abc import Sequence

from llvmlite import ir

from forge.backends.cpu.llvm_code import I8, I64, call_intrinsic, store

ROW_BYTES = 64
ROWS = 16
_PALETTE = 1
"""Eight registers of 16 rows."""
_CONFIGURATION = ir.VectorType(I8, 64)


def configure(b: ir.IRBuilder, shapes: Sequence[tuple[int, int]]) -> None:
    """Say how many rows, and how many bytes in each, the first registers have. They begin with any content."""
    table = bytearray(64)
    table[0] = _PALETTE
    for register, (rows, row_bytes) in enumerate(shapes):
        table[16 + 2 * register] = row_bytes
        table[48 + register] = rows
    room = on_stack(b, I64(1), 64)
    store(b, room, ir.Constant(_CONFIGURATION, list(table)))
    _call(b, "ldtilecfg", _pointer(b, room))


def release(b: ir.IRBuilder) -> None:
    """Give the registers back, which then are no part of what the system saves for the thread."""
    _call(b, "tilerelease")


def clear(b: ir.IRBuilder, register: int) -> None:
    _call(b, "tilezero", I8(register))


def load_register(b: ir.IRBuilder, register: int, address: ir.Value, stride: ir.Value) -> None:
    _call(b, "tileloadd64", I8(register), _pointer(b, address), stride)


def store_register(b: ir.IRBuilder, register: int, address: ir.Value, stride: ir.Value) -> None:
    _call(b, "tilestored64", I8(register), _pointer(b, address), stride)


def multiply(b: ir.IRBuilder, sums: int, left: int, right: int, signs: str = "ss") -> None:
    """Add the products of two registers to a third. signs: of the left's bytes and the right's, `s` or `u`."""
    _call(b, f"tdpb{signs}d", I8(sums), I8(left), I8(right))


def on_stack(b: ir.IRBuilder, count: ir.Value, size: int) -> ir.Value:
    """Return the address of `count` times `size` bytes on the stack, a multiple of 64."""
    with b.goto_entry_block():
        allocated = b.alloca(ir.ArrayType(I8, size), count)
    allocated.align = 64
    return b.ptrtoint(allocated, I64)


def _call(b: ir.IRBuilder, name: str, *arguments: ir.Value) -> None:
    call_intrinsic(b, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _pointer(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, I8.as_pointer())
