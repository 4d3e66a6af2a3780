"""The bench of a step's host time: what it measures, not how long it takes."""

import io
import json

import pytest
from forge.bench.host_time import HostTime, measure
from forge.views.host_time import print_host_time

from forge.cli.main import main
from forge.views.terminal import open_console


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
def test_every_batch_is_measured_over_steps_of_nothing_but_decodes(kv):
    times = measure(kv, batches=(1, 3), steps=5)

    assert [(one.sequences, one.steps) for one in times] == [(1, 5), (3, 5)]
    for one in times:
        assert 0 < one.least <= one.median <= one.ninth_decile
        assert min(one.schedule, one.sample, one.record) > 0


def test_the_bar_is_60_and_6_per_sequence():
    assert HostTime(16, 5, 1, 2, 3, 1, 1, 1).bar == 156


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(width):
    file = io.StringIO()
    print_host_time(open_console(file, width), [HostTime(64, 5, 251.2, 435.9, 1962.1, 171.4, 190.2, 60)], "a machine")

    assert max(map(len, file.getvalue().splitlines())) <= width
    assert "436" in file.getvalue()
    assert "…" not in file.getvalue()


def test_the_command_prints_an_object(capsys):
    assert main(["bench", "host", "--steps", "2", "--json"]) == 0
    assert [one["sequences"] for one in json.loads(capsys.readouterr().out)["steps"]] == [1, 4, 16, 64]
