"""Every kernel compiles for the GPUs that forge means to run on, without one, and keeps to its registers."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.backends.cpu.models import ROOT, run_python
from tests.backends.cuda.compiled import read_before_wait

CAPABILITIES = (90, 87)
"""H200 and its like; Jetson Orin, which has no dependent launches."""
MOST_REGISTERS = {
    "decode_attention": 184,
    "gather_rows": 32,
    "gumbel_argmax": 128,
    "argmax_rows": 64,
    "matmul": 232,
    "matvec": 170,
    "matvec_packed": 170,
    "norm_rope_store": 64,
    "paged_attention": 216,
    "rms_norm": 64,
    "swiglu": 40,
}
"""Per thread, by Triton 3.6 and 3.9. A product of one row has four warps a program and is to fit three times on a
multiprocessor. A tile of 64 rows of attention takes all 255 that there are, and 24 bytes more, where tensor cores read
their operands from registers (sm_87)."""
MOST_SPILLED = {90: 0, 87: 24}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    # A cache of its own: what is compiled here was not compiled before.
    cache = str(tmp_path_factory.mktemp("triton"))

    def compile_for(capability: int):
        return run_python(
            ["tests/backends/cuda/compile_kernels.py", str(capability)],
            TRITON_INTERPRET="0",
            TRITON_CACHE_DIR=cache,
            PYTHONPATH=str(ROOT),
        )

    with ThreadPoolExecutor(len(CAPABILITIES)) as side_by_side:
        found = list(side_by_side.map(compile_for, CAPABILITIES))
    assert all(each.returncode == 0 for each in found), found[0].stderr + found[1].stderr
    return [json.loads(line) for each in found for line in each.stdout.splitlines()]


@pytest.mark.slow
def test_every_kernel_compiles_for_every_capability(compiled):
    for capability in CAPABILITIES:
        kernels = {each["launch"].split("(")[0] for each in compiled if each["capability"] == capability}
        assert kernels == set(MOST_REGISTERS)


@pytest.mark.slow
def test_nothing_is_spilled_and_registers_keep_to_their_limits(compiled):
    for each in compiled:
        print(f"sm_{each['capability']} {each['registers']:3d} registers, {each['shared']:6d} bytes  {each['launch']}")
    assert [each for each in compiled if each["spilled"] > MOST_SPILLED[each["capability"]]] == []
    without_spills = [each for each in compiled if not each["spilled"]]
    over = [each for each in without_spills if each["registers"] > MOST_REGISTERS[each["launch"].split("(")[0]]]
    assert over == []


EARLY = {
    "matvec": {"weights"},
    "matvec_packed": {"values"},
    "matmul": {"values", "scales", "factors"},  # with `Tuning.prefetch`
    "rms_norm": {"weight"},
}
"""What each kernel may read before it waits for the one before it: weights."""


@pytest.mark.slow
def test_only_weights_are_read_before_the_wait_for_the_kernel_before(compiled):
    on_hopper = [each for each in compiled if each["capability"] == 90]
    early = {each["launch"]: set(each["early"]) for each in on_hopper}

    wrong = {name: found for name, found in early.items() if not found <= EARLY.get(name.split("(")[0], set())}
    assert wrong == {}
    assert all(early[name] for name in early if name.startswith(("matvec", "rms_norm"))), "their first weights"
    assert all(bool(found) == ("PREFETCH=True" in name) for name, found in early.items() if name.startswith("matmul"))


def test_a_load_before_the_wait_is_found_whatever_its_address_was_computed_from():
    ptx = """.entry kernel(.param .u64 kernel_param_0, .param .u64 kernel_param_1, .param .u32 kernel_param_2) {
        .reg .b64 %rd<9>;
        ld.param.b64 %rd1, [kernel_param_0];
        ld.param.b64 %rd2, [kernel_param_1];
        mul.wide.s32 %rd3, %r1, 4;
        add.s64 %rd4, %rd1, %rd3;
        @%p1 ld.global.v2.b32 { %r5, %r6 }, [ %rd4 + 0 ];
        EXTRA
        // begin inline asm
        griddepcontrol.wait; // dummy
        ld.global.b32 { %r7 }, [ %rd2 + 0 ];
    }"""
    late = "add.s64 %rd7, %rd2, %rd3; cp.async.cg.shared.global [ %r9 + 0 ], [ %rd7 + 0 ], 0x10;"

    assert read_before_wait(ptx.replace("EXTRA", ""), ["weights", "x"]) == ("weights",)
    assert read_before_wait(ptx.replace("EXTRA", late), ["weights", "x"]) == ("weights", "x")
    with pytest.raises(AssertionError, match="would wait beside this one"):
        read_before_wait(ptx.replace("EXTRA", "griddepcontrol.launch_dependents;"), ["weights", "x"])


@pytest.mark.slow
def test_a_program_fits_into_a_multiprocessors_shared_memory(compiled):
    room = {90: 227 * 1024, 87: 163 * 1024}
    assert [each for each in compiled if each["shared"] > room[each["capability"]]] == []
