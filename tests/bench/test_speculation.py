"""The table of `forge bench speculation`."""

import pytest

from forge.bench import speculation
from forge.bench.speculation import screen
from forge.cli.main import main
from forge.views.screen import draw
from tests.views.records import piped, written


@pytest.mark.parametrize("width", [80, 96])
def test_every_figure_is_whole(width):
    figures = [
        {"proposer": proposer, "k": k, "batch": 16, "alpha": 0.87, "tokens_per_cycle": 3.45, "speed_up": 10.78}
        | {"least": 1.03, "most": 12.31, "predicted": 1.62, "predicted_with_verification": 1.41, "identical": True}
        | {"tokens_per_second": 12_345.6, "plain_tokens_per_second": 4_321.2}
        for proposer in ("draft", "ngram")
        for k in (1, 16)
    ]
    console = piped(width)
    draw(console, screen({"figures": figures, "label": "kv paged"}))
    for one in figures:
        row = [one["proposer"], str(one["k"]), "0.87", "3.45", "10.78", "x", "1.03–12.31", "1.62", "1.41"]
        assert " ".join([*row, "12,346"]) in [" ".join(line.split()) for line in written(console).splitlines()]
    assert max(map(len, written(console).splitlines())) <= width


LINE = ("bench", "speculation", "-m", "hash", "--speculate", "ngram", "--batch", "1", "--k", "2", "--tokens", "8")


@pytest.mark.parametrize("differs", [False, True])
def test_tokens_that_differ_from_plain_decoding_fail_the_command(monkeypatch, capfd, differs):
    turn, number = speculation._turn, iter(range(99))

    def another(*arguments):
        records, tokens = turn(*arguments)
        return records, [(*tokens[0], next(number))] if differs else tokens

    monkeypatch.setattr(speculation, "_turn", another)
    assert main((*LINE, "--reps", "1")) == int(differs)
    assert ("the tokens differ in 1 case" in capfd.readouterr().out) == differs


@pytest.mark.parametrize("option", ["--reps", "--tokens"])
def test_nothing_can_be_measured_in_no_rounds_or_tokens(capfd, option):
    assert main((*LINE, option, "0")) == 2
    assert f"{option} is at least 1" in capfd.readouterr().err
