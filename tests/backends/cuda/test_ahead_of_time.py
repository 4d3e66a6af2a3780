"""Every kernel compiles for the GPUs that forge means to run on, without one, and keeps to its registers."""

import json

import pytest

from tests.backends.cpu.models import ROOT, run_python

CAPABILITIES = (90, 87)
"""H200 and its like; Jetson Orin, which has no dependent launches."""
MOST_REGISTERS = {
    "decode_attention": 168,
    "gather_rows": 32,
    "greatest": 64,
    "matmul": 232,
    "matvec": 170,
    "matvec_packed": 170,
    "norm_rope_store": 64,
    "paged_attention": 192,
    "rms_norm": 64,
    "swiglu": 40,
}
"""Per thread, by Triton 3.6 and 3.9. A product of one row has four warps a program and is to fit three times on a
multiprocessor."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    # A cache of its own: what is compiled here was not compiled before.
    found = run_python(
        ["tests/backends/cuda/compile_kernels.py", *map(str, CAPABILITIES)],
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")),
        PYTHONPATH=str(ROOT),
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_every_kernel_compiles_for_every_capability(compiled):
    for capability in CAPABILITIES:
        kernels = {each["launch"].split("(")[0] for each in compiled if each["capability"] == capability}
        assert kernels == set(MOST_REGISTERS)


def test_nothing_is_spilled_and_registers_keep_to_their_limits(compiled):
    for each in compiled:
        print(f"sm_{each['capability']} {each['registers']:3d} registers, {each['shared']:6d} bytes  {each['launch']}")
    assert [each for each in compiled if each["spilled"]] == []
    over = [each for each in compiled if each["registers"] > MOST_REGISTERS[each["launch"].split("(")[0]]]
    assert over == []


def test_a_program_fits_into_a_multiprocessors_shared_memory(compiled):
    room = {90: 227 * 1024, 87: 163 * 1024}
    assert [each for each in compiled if each["shared"] > room[each["capability"]]] == []
