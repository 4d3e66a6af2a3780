"""The Makefile's promises that can be read off a dry run."""

import os
import shutil
import subprocess

import pytest

from tests.cli.conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def checkout(tmp_path):
    """A fresh checkout, as far as make can see: no virtual environment."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def dry_run(folder, *targets):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    found = subprocess.run(
        ["make", "-n", *targets], cwd=folder, capture_output=True, text=True, check=True, env=environment
    )
    return found.stdout


def installed(folder, *stamps):
    """Make the folder look as it does after an installation."""
    (folder / ".venv").mkdir()
    for stamp in (".created", *stamps):
        (folder / ".venv" / stamp).touch()
    later = (folder / "pyproject.toml").stat().st_mtime + 100
    for stamp in stamps:
        os.utime(folder / ".venv" / stamp, (later, later))


def test_demo_installs_without_the_development_tools(checkout):
    planned = dry_run(checkout, "demo")
    assert "-m venv" in planned and "--editable ." in planned and "[dev]" not in planned
    assert 'forge generate --kv basic "Once upon a time" 32' in planned


def test_test_installs_the_development_tools_and_runs_everything(checkout):
    planned = dry_run(checkout, "test")
    assert "-m venv" in planned and ".[dev]" in planned and "-m pytest" in planned


def test_a_second_run_installs_nothing(checkout):
    installed(checkout, ".installed", ".installed-dev")
    for target in ("demo", "test"):
        assert "pip" not in dry_run(checkout, target) and "venv .venv" not in dry_run(checkout, target)


def test_a_changed_pyproject_installs_again(checkout):
    installed(checkout, ".installed", ".installed-dev")
    later = (checkout / ".venv" / ".installed").stat().st_mtime + 100
    os.utime(checkout / "pyproject.toml", (later, later))
    assert "--editable ." in dry_run(checkout, "demo") and ".[dev]" in dry_run(checkout, "test")


def test_fuzz_asks_for_more_examples(checkout):
    assert "FORGE_HYPOTHESIS_PROFILE=fuzz" in dry_run(checkout, "fuzz")


def test_the_build_server_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text()


def test_lint_checks_style_and_types(checkout):
    planned = dry_run(checkout, "lint")
    assert "ruff check" in planned and "ruff format --check" in planned and "/mypy" in planned
