"""The table of `forge bench speculation`."""

import pytest
from forge.views.bench_speculation import print_speculation_benchmark

from forge.bench.speculation import SpeculationCase, SpeculationFigure
from tests.views.records import piped, written


@pytest.mark.parametrize("width", [80, 96])
def test_every_figure_is_whole(width):
    figures = [
        SpeculationFigure(
            SpeculationCase(proposer, k, 16),
            0.87,
            3.45,
            10.78,
            1.03,
            12.31,
            1.62,
            1.41,
            0.1,
            0.2,
            12_345.6,
            4_321.2,
            True,
        )
        for proposer in ("draft", "ngram")
        for k in (1, 16)
    ]
    console = piped(width)
    print_speculation_benchmark(console, figures, "kv paged")
    for figure in figures:
        row = [figure.case.proposer, str(figure.case.k), "0.87", "3.45", "10.78", "x", "1.03–12.31", "1.62", "1.41"]
        assert " ".join([*row, "12,346"]) in [" ".join(line.split()) for line in written(console).splitlines()]
    assert max(map(len, written(console).splitlines())) <= width
