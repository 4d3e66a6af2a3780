"""Every benchmark is a file, and every such file a command."""

import json

import pytest

from forge.bench.kit import Figure, benchmark
from forge.cli.bench import names
from forge.cli.main import command_named, main
from forge.errors import INTERRUPTED
from forge.views.screen import Table, title
from forge.views.terminal import open_console


def test_a_benchmark_is_found_by_its_file():
    assert names() == [
        "cpu", "cache", "cuda", "engine", "host", "oneshot", "prefix-planning", "quality", "serve", "speculation",
        "tokenizer",
    ]  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_every_benchmark_is_a_command_with_help(name):
    found = command_named("bench").get_command(None, name)
    assert found.name == name and len(found.help) > 40
    assert "json" in {param.name for param in found.params}


def screen(facts):
    yield title("How fast?")
    yield Table.of([facts], ": both", "ratio: {ratio:ratio x}")


def run(measure, **given):
    """The report of a command that is made of `measure`, as typer would call it."""
    return benchmark(screen)(measure)(ctx=None, **given)


def test_a_benchmark_is_facts_and_a_screen(capsys):
    def measure(say, reps: int = 2):
        say("measuring")
        return {"ratio": Figure.of([1.0, 3.0, 2.0]), "rows": [{"seconds": Figure.of([1.0])}], "reps": reps}

    run(measure, reps=3, json=True).draw(open_console())
    facts = json.loads(capsys.readouterr().out)
    assert facts["ratio"] == {"median": 2.0, "low": 1.0, "high": 3.0, "count": 3}
    assert facts["reps"] == 3 and facts["machine"]
    report = run(measure, reps=3, json=False)
    for _ in range(2):  # at another width it is drawn again
        report.draw(open_console())
    assert capsys.readouterr().out.count("both   2.00 (1.00–3.00) x") == 2


def test_a_benchmark_whose_tokens_differ_fails():
    for identical, status in ((True, 0), (False, 1)):
        facts = {"identical": identical}
        assert run(lambda say, facts=facts: facts, json=True, facts=facts).status == status


def test_ctrl_c_keeps_what_there_is_and_ends_the_run():
    closed = []

    def measure(say):
        try:
            yield {"figures": [1]}
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    report = run(measure, json=True)
    assert report.facts["figures"] == [1] and report.facts["interrupted"] and closed
    assert report.status == INTERRUPTED


def test_nothing_is_said_to_be_identical_where_nothing_was_compared(capfd):
    assert main(("bench", "oneshot", "-m", "hash", "--only", "packing", "--reps", "1", "--prompt-tokens", "8")) == 0
    assert "same tokens" not in capfd.readouterr().out
    assert main(("bench", "prefix-planning", "-m", "hash", "--rubric-tokens", "1000000")) == 2
    assert "--rubric-tokens is at most" in capfd.readouterr().err
