"""The GPU experiment's screen, from runs made by hand."""

from dataclasses import replace

import pytest

from forge.cli.main import main
from forge.views.cuda import DeviceRun, Roof, Work, print_cuda, roofline_lines, sentences
from tests.views.records import LABEL, piped, run_of, written

ROOF = Roof("a GPU", bytes_per_second=4e12, operations_per_second=8e14)
WORK = Work(weight_bytes=1_200_000_000, weights=600_000_000)


def run(name: str, mark: str, decode_ms: float, mode: str = "") -> DeviceRun:
    forwards = [(64, 3 * decode_ms), *[(1, decode_ms)] * 15]
    result = run_of(forwards, label=replace(LABEL, device=name))
    return DeviceRun(name, mark, result, (mode,) * 16 if mode else ())


RUNS = [run("cpu", "c", 13.0), run("cuda, kernel by kernel", "k", 3.0, "eager"), run("cuda, graphs", "g", 0.6, "graph")]


@pytest.mark.parametrize("width", [80, 96, 140])
def test_the_screen_holds_every_run_within_its_width(width):
    console = piped(width)

    print_cuda(console, RUNS, WORK, ROOF)

    shown = written(console)
    assert max(map(len, shown.splitlines())) <= width
    for text in (
        "what does a forward wait for",
        "13.0",
        "3.0 eager",
        "0.6 graph",
        "prefill 64 tokens",
        "decode 1 token",
    ):
        assert text in shown


def test_the_sentences_compare_with_the_floor_and_between_launches():
    said = " ".join(sentences(RUNS, WORK, ROOF))
    assert "Reading every weight once takes 0.3 ms" in said
    assert "5.0 x as fast" in said
    assert "same 16 tokens" in said


def test_texts_that_part_are_said_to():
    others = [*RUNS[:2], replace(RUNS[2], result=run_of([(4, 1.0), (1, 0.5)], token_ids=(101, 5)))]
    assert "first 1 token," in " ".join(sentences(others, WORK, ROOF))


def test_a_point_on_the_roof_replaces_it_and_one_below_lies_below():
    at_the_roof = run("cuda, graphs", "g", WORK.weight_bytes / ROOF.bytes_per_second * 1e3)
    lines = [line.plain for line in roofline_lines([RUNS[0], RUNS[1], at_the_roof], WORK, ROOF, 96)]
    rows = {mark: max(i for i, line in enumerate(lines[:12]) if mark in line[11:]) for mark in "ckg"}
    assert rows["g"] < rows["k"] < rows["c"]
    column = lines[rows["g"]].index("g", 11)
    assert not any("╱" in line[column : column + 1] for line in lines[:12]), "the point covers the roof"
    assert "─" in lines[0]


def test_without_a_gpu_the_command_says_what_is_missing_in_one_line(capsys):
    from forge.backends.devices import why_not_cuda

    if why_not_cuda() is None:
        pytest.skip("this machine has a GPU")
    assert main(["cuda"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("forge: forge cuda needs") and error.count("\n") == 1
