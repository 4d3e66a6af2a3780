"""A small random model on disk, and forge run in this process or in one of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge import LLM
from forge.cli.main import main
from tests.small_models import write_small_qwen3

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """The path of a model that loads at once. It has no end-of-text habit: what it says is noise.

    It is loaded here once, so that its kernels are compiled and no test sees forge announce that.
    """
    path = write_small_qwen3(tmp_path_factory.mktemp("models") / "small.gguf")
    LLM(path)
    return str(path)


@pytest.fixture(scope="session")
def small(model) -> tuple[str, ...]:
    """The options that run that model on the reference device, which has nothing to compile."""
    return ("-m", model, "--device", "reference")


@pytest.fixture
def forge(capfd) -> Callable[..., Outcome]:
    """Run a command line in this process. Standard output is a file, so views print as they do in a pipe."""

    def run(*args: str) -> Outcome:
        status = main(args)
        captured = capfd.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child process: this one's, forge importable from anywhere, one BLAS thread."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"} | extra


def start(*args: str, script: Path | None = None, **options) -> subprocess.Popen:
    """Start forge, or `script` in its place, in a process of its own, in the repository's root."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), "cwd": ROOT} | options
    return subprocess.Popen(
        [sys.executable, *(("-m", "forge") if script is None else (str(script),)), *args], **options
    )
