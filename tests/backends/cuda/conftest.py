"""Where there is no GPU, Triton's kernels run under its interpreter, which must be said before they are defined."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]
    HAS_GPU = False
else:
    import torch

    HAS_GPU = torch.cuda.is_available()
    if find_spec("typer") is None or find_spec("rich") is None:
        collect_ignore = ["test_command.py"]
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        terminalreporter.write_line(f"left out: tests/backends/cuda ({' and '.join(MISSING)} not installed)")


@pytest.fixture(autouse=True, scope="session")
def interpreter():
    if HAS_GPU or MISSING:
        yield
        return
    from tests.backends.cuda.interpreter import repaired_interpreter

    with repaired_interpreter():
        yield


def _skips_without_gguf():
    """On a machine for GPUs, where no package can be installed, kernels are tested all the same."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        pytest.skip("writes or quantizes weights by the gguf package, which is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from _skips_without_gguf())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _skips_without_gguf())


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def gpu(device) -> str:
    """For what no interpreter can show."""
    if device != "cuda":
        pytest.skip("torch sees no GPU here")
    return device


def pytest_collection_modifyitems(items):
    """`make test-gpu` runs what computes on a device: compiled on a GPU, interpreted elsewhere."""
    for item in items:
        if item.path.parent == FOLDER and {"device", "gpu"} & set(item.fixturenames):
            item.add_marker(pytest.mark.gpu)
