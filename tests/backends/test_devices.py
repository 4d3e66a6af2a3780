"""`--device`: names, and one line for what cannot run."""

import pytest

from forge.backends.choices import DEFAULT_DEVICE, DEVICES
from forge.backends.devices import check_kv_dtype, create_backend
from forge.engine_args import EngineArgs
from forge.errors import UsageError


def test_reference_is_there():
    assert create_backend("reference").name == "reference"


def test_the_default_is_a_device():
    assert DEFAULT_DEVICE in DEVICES


def test_an_unknown_device_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"unknown device 'tpu'; there are cpu, reference, cuda") as raised:
        create_backend("tpu")
    assert raised.value.exit_code == 2


def test_cuda_without_a_gpu_says_what_to_do_in_one_line():
    try:
        import torch
    except ImportError:
        has_gpu = False
    else:
        has_gpu = torch.cuda.is_available()
    if has_gpu:
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match="--device cuda needs") as raised:
        create_backend("cuda")
    assert "\n" not in str(raised.value)


def test_int8_keys_and_values_are_refused_where_there_are_none():
    refused = "--kv-dtype int8 is not for --device cuda: it has float32, float16, bfloat16"
    for options in ({"device": "cuda"}, {"device": "cpu", "draft_device": "cuda"}):
        with pytest.raises(UsageError, match=refused):
            EngineArgs("tales", kv_dtype="int8", **options)
    for device in ("cpu", "reference"):
        check_kv_dtype("int8", device)
