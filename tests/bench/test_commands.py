"""The table of benchmarks: every line of it is a command."""

import json

import pytest

from forge.cli.bench import COMMANDS
from forge.cli.main import command_named
from forge.errors import INTERRUPTED
from forge.experiments.bench.results import Figure, last_of, shown
from forge.experiments.bench.tables import Table, title
from forge.views.terminal import open_console


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_is_a_command_with_help(name):
    found = command_named("bench").get_command(None, name)
    assert found.name == name and len(found.help) > 40
    assert "json" in {param.name for param in found.params}


def test_a_benchmark_is_facts_and_a_screen(capsys):
    facts = {"ratio": Figure.of([1.0, 3.0, 2.0]), "rows": [{"seconds": Figure.of([1.0])}]}
    screen = [title("How fast?"), Table(("", "ratio"), [("both", facts["ratio"].times())])]
    shown(facts, screen, json=True).draw(open_console())
    assert json.loads(capsys.readouterr().out)["ratio"] == {"median": 2.0, "low": 1.0, "high": 3.0, "count": 3}
    report = shown(facts, iter(screen), json=False)
    for _ in range(2):  # at another width it is drawn again
        report.draw(open_console())
    assert capsys.readouterr().out.count("both   2.00 (1.00–3.00) x") == 2


def test_ctrl_c_keeps_what_there_is_and_ends_the_run():
    closed = []

    def run():
        try:
            yield {"figures": [1]}
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    facts = last_of(run())
    assert facts == {"figures": [1], "interrupted": True} and closed
    assert shown(facts, [], json=True).status == INTERRUPTED
