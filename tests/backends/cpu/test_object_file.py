"""Object files are loaded without LLVM where they are as simple as kernels are, and only there."""

import ctypes
import platform
import sys
from pathlib import Path
from struct import pack_into, unpack_from

import llvmlite.binding as llvm
import pytest

from forge.backends.cpu import compilation, kernel_table, llvm_compiler, object_file
from forge.backends.cpu.packing import Q8

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="LLVM loads all object files here"
)


def compiled(text: str) -> bytes:
    """The object file of some intermediate code."""
    return llvm_compiler.compile_module(llvm.parse_assembly(text), compilation.instruction_set())


CONSTANTS = """
@table = internal constant [4 x i64] [i64 2, i64 3, i64 5, i64 7], align 32
@other = internal constant [2 x i32] [i32 100, i32 200], align 64
define i64 @prime(i64 %index) {
  %place = getelementptr [4 x i64], [4 x i64]* @table, i64 0, i64 %index
  %prime = load i64, i64* %place
  %more = call i64 @hundreds(i64 %index)
  %sum = add i64 %prime, %more
  ret i64 %sum
}
define i64 @hundreds(i64 %index) noinline {
  %half = and i64 %index, 1
  %place = getelementptr [2 x i32], [2 x i32]* @other, i64 0, i64 %half
  %narrow = load i32, i32* %place
  %wide = sext i32 %narrow to i64
  ret i64 %wide
}
"""


def test_functions_find_their_constants_and_one_another():
    find = object_file.load(compiled(CONSTANTS))
    prime, hundreds = (ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(find(name)) for name in ("prime", "hundreds"))
    assert [prime(index) for index in range(4)] == [102, 203, 105, 207]
    assert [hundreds(index) for index in range(2)] == [100, 200]
    with pytest.raises(KeyError):
        find("another")


def test_the_c_librarys_function_that_kernels_call_is_called():
    find = object_file.load(
        compiled("declare i32 @sched_yield()\ndefine i32 @f() { %r = call i32 @sched_yield() ret i32 %r }")
    )
    assert ctypes.CFUNCTYPE(ctypes.c_int32)(find("f"))() == 0


def test_code_cannot_be_written_once_it_can_be_run():
    address = object_file.load(compiled(CONSTANTS))("prime")
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            assert line.split()[1] == "r-xp"
            return
    raise AssertionError("it is not in memory")


@pytest.mark.parametrize(
    "text",
    [
        "@count = internal global i64 7\ndefine i64 @f() {\n%n = load volatile i64, i64* @count\nret i64 %n\n}",
        "declare i32 @getpid()\ndefine i32 @f() { %r = call i32 @getpid() ret i32 %r }",
        "@p = constant i32 ()* @f\ndefine i32 @f() { ret i32 7 }",
    ],
    ids=["variable", "another function", "address"],
)
def test_a_file_that_needs_more_is_left_to_llvm(text):
    code = compiled(text)
    assert object_file.load(code) is None
    assert llvm_compiler.load(code, compilation.instruction_set())("f")


def test_a_reference_that_is_no_distance_is_left_to_llvm():
    code = bytearray(compiled(CONSTANTS))
    (table,), (num_sections,) = unpack_from("<Q", code, 40), unpack_from("<H", code, 60)
    for number in range(num_sections):
        _, kind, _, _, offset, size, *_ = unpack_from("<IIQQQQ", code, table + 64 * number)
        for entry in range(offset, offset + size, 24) if kind == 4 else ():  # relocations
            pack_into("<I", code, entry + 8, 1)  # R_X86_64_64, an address
    assert object_file.load(bytes(code)) is None


@pytest.mark.parametrize("system", [("darwin", "x86_64"), ("linux", "aarch64")])
def test_another_systems_file_is_left_to_llvm(system, monkeypatch):
    code = compiled(CONSTANTS)
    monkeypatch.setattr(object_file.sys, "platform", system[0])
    monkeypatch.setattr(object_file.platform, "machine", lambda: system[1])
    assert object_file.load(code) is None


def test_where_no_memory_can_be_run_it_is_left_to_llvm(monkeypatch):
    monkeypatch.setattr(object_file, "_executable", lambda image: None)
    tiles = compilation.TileSet(Q8)
    tiles.compile()
    assert tiles.addresses.all() or not compilation.pairs_tiles(compilation.instruction_set(), Q8)


def test_every_compiled_kernel_loads_without_llvm():
    compilation.TileSet(Q8).compile()
    items = [item for item in kernel_table.all_items() if item.is_cached]
    assert items
    for item in items:
        assert object_file.load(item._code) is not None, item.name
