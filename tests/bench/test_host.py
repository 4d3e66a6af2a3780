"""The bench of a step's host time: what it measures, not how long it takes."""

import io
import json

import pytest

from forge.bench.host import measure, screen
from forge.cli.main import main
from forge.views.screen import draw
from forge.views.terminal import open_console


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_every_batch_is_measured_over_steps_of_nothing_but_decodes(kv):
    times = [measure(kv, sequences, 5) for sequences in (1, 3)]

    assert [(one["sequences"], one["steps"], one["bar"]) for one in times] == [(1, 5, 66), (3, 5, 78)]
    for one in times:
        assert 0 < one["least"] <= one["median"] <= one["ninth_decile"]
        assert min(one["schedule"], one["sample"], one["record"]) > 0


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(width):
    file = io.StringIO()
    names = ("sequences", "steps", "least", "median", "ninth_decile", "schedule", "sample", "record", "bar")
    one = dict(zip(names, (64, 5, 251.2, 435.9, 1962.1, 171.4, 190.2, 60, 444), strict=True))
    console = open_console(file, width)
    draw(console, screen({"steps": [one], "machine": "a machine"}))

    assert max(map(len, file.getvalue().splitlines())) <= width
    assert "436" in file.getvalue()
    assert "…" not in file.getvalue()


def test_the_command_prints_an_object(capsys):
    assert main(["bench", "host", "--steps", "2", "--json"]) == 0
    assert [one["sequences"] for one in json.loads(capsys.readouterr().out)["steps"]] == [1, 4, 16, 64]
