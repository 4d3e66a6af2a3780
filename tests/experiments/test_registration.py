"""A chapter is one file in forge/experiments and one Markdown file: the example of chapters/reference/extending.md."""

import json
import subprocess
import sys

import pytest

from forge import experiments
from forge.book.catalog import entries
from tests.cli.conftest import ROOT, environment

EXAMPLE = ROOT / "chapters" / "examples" / "chapter"
WITH_EXAMPLE = f"""
import sys
from pathlib import Path
from forge import experiments
from forge.book import catalog
folder = Path({str(EXAMPLE)!r})
experiments.__path__.append(str(folder))
catalog.chapters_folder = lambda: folder
from forge.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def with_example(*args: str) -> str:
    command = [sys.executable, "-c", WITH_EXAMPLE, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), cwd=ROOT).stdout


def test_every_chapter_has_an_experiment_in_its_place():
    assert list(experiments.summaries()) == [entry.command for entry in entries()]
    for entry in entries():
        assert experiments.summaries()[entry.command].startswith(f"{entry.number}. ")


def test_an_experiments_help_is_its_docstring():
    function, doc = experiments.load("kv-cache")
    assert function.__name__ == "kv_cache"
    assert doc.startswith(experiments.summaries()["kv-cache"]) and "forge kv-cache --only run" in doc


@pytest.mark.parametrize("name", ["temperature.py", "13_temperature.md"])
def test_the_example_is_shown_as_it_is(name):
    shown = (ROOT / "chapters" / "reference" / "extending.md").read_text(encoding="utf-8")
    assert (EXAMPLE / name).read_text(encoding="utf-8") in shown


def test_the_example_is_a_command_after_the_others():
    listed = with_example("--help")
    assert listed.index("12. ") < listed.index("13. Temperature: how far")


def test_the_examples_experiment_runs_alone():
    facts = json.loads(with_example("temperature", "Once", "8", "--json"))
    assert facts["max_tokens"] == 8 and facts["drawn"][0]["in_common"] == 8


def test_the_examples_chapter_runs_to_its_end():
    told = with_example("temperature", "--no-pause")
    assert "✓ Temperature 0 is greedy decoding: all 32 tokens are in common." in told
