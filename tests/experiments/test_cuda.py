"""The GPU experiment's screen, from runs made by hand."""

import json
from dataclasses import replace

import pytest

from forge.cli.main import main
from forge.experiments import cuda as command
from forge.experiments.cuda import (
    DeviceRun,
    Measured,
    _points,
    cuda_object,
    measured_from,
    measured_sentences,
    picture,
    screen,
)
from forge.experiments.cuda.plan import H200, SHAPE, Limits, num_weights, planned_steps
from forge.model.synth import SHAPES
from forge.trace.records import Execution
from forge.views.screen import draw
from tests.views.records import LABEL, piped, run_of, written

LIMITS = Limits("a GPU", bytes_per_second=4e12, operations_per_second=8e14)


def run(name: str, mark: str, decode_ms: float, mode: str = "") -> DeviceRun:
    forwards = [(64, 3 * decode_ms), *[(1, decode_ms)] * 15]
    result = run_of(forwards, label=replace(LABEL, device=name))
    if mode:
        execution = Execution(mode, "why", 1)
        result = replace(result, records=tuple(replace(record, execution=execution) for record in result.records))
    return DeviceRun.of(name, mark, result)


RUNS = (run("cpu", "c", 13.0), run("cuda, kernel by kernel", "k", 3.0, "eager"), run("cuda, graphs", "g", 0.6, "graph"))
MEASURED = Measured("tales-q8_0", RUNS, 1_200_000_000, 600_000_000, LIMITS, "2026-11-20")


@pytest.fixture(scope="module")
def steps():
    return planned_steps(SHAPES[SHAPE])


@pytest.mark.parametrize("width", [80, 96, 140])
def test_the_screen_holds_every_run_within_its_width(width):
    console = piped(width)

    draw(console, screen(MEASURED, ()))

    shown = written(console)
    assert max(map(len, shown.splitlines())) <= width
    for text in (
        "what does a forward wait for",
        "13.0",
        "3.0 eager",
        "0.60 graph",
        "prefill 64 tokens",
        "decode 1 token",
    ):
        assert text in shown


def test_the_sentences_compare_with_the_floor_and_between_launches():
    said = " ".join(measured_sentences(MEASURED))
    assert "Reading every weight once takes 0.30 ms" in said
    assert "5.0 x as fast" in said
    assert "same 16 tokens" in said


def test_texts_that_part_are_said_to():
    others = (*RUNS[:2], replace(RUNS[2], token_ids=(101, 5)))
    assert "first 1 token," in " ".join(measured_sentences(replace(MEASURED, runs=others)))


def test_a_point_on_the_roof_replaces_it_and_one_below_lies_below():
    at_the_roof = run("cuda, graphs", "g", MEASURED.weight_bytes / LIMITS.bytes_per_second * 1e3)
    points = _points(replace(MEASURED, runs=(*RUNS[:2], at_the_roof)))
    lines = [line.plain for line in picture(points, LIMITS, 96)][1:-2]
    rows = {mark: max(i for i, line in enumerate(lines) if mark in line[8:]) for mark in "ckg"}
    assert rows["g"] < rows["k"] < rows["c"]
    assert lines[0].lstrip().startswith("800 T ┤")
    column = lines[rows["g"]].index("g", 8)
    assert all(line[column : column + 1] in ("", " ") for line in lines[: rows["g"]]), "the point covers the roof"


def test_a_recorded_run_is_shown_as_it_was_and_said_to_be_recorded(steps):
    again = measured_from(cuda_object(MEASURED, steps))
    console = piped(96)

    draw(console, screen(again, steps))

    assert again == replace(MEASURED, source="recorded")
    assert "A recorded run, of 2026-11-20" in written(console)


def test_what_is_computed_follows_from_the_sizes(steps):
    config = SHAPES[SHAPE]
    by_name = {step.name: step for step in steps}
    one, many = by_name["decode1@160"], by_name["decode64@160"]
    keys = 160 * 2 * config.key_value_size * config.num_layers * 2
    assert one.bytes == 2 * num_weights(config) + keys and many.bytes - one.bytes == 63 * keys
    assert one.floor_ms(H200) == pytest.approx(0.252, abs=1e-3) and one.is_bound_by_memory(H200)
    assert not by_name["prefill512"].is_bound_by_memory(H200)


def test_the_kernels_of_a_step_are_those_that_a_real_model_would_launch(steps):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    by_name = {step.name: step for step in steps}
    layers = SHAPES[SHAPE].num_layers
    assert by_name["decode1@160"].num_launches == 5 * layers + 3  # and the embedding, the head, the greatest logit
    assert by_name["decode64@160"].launches["cuBLAS product"] == 4 * layers


def test_without_a_gpu_or_a_recorded_run_the_command_says_that_nothing_was_measured(capsys, monkeypatch, tmp_path):
    from forge.backends import devices

    monkeypatch.setattr(devices, "why_not_cuda", lambda: "--device cuda needs an NVIDIA GPU: use --device cpu")
    monkeypatch.setattr(command, "RECORDED", tmp_path / "none.json")

    assert main(["cuda", "--only", "run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "nothing below was measured" in shown and "0.25" in shown

    assert main(["cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "computed" and found["runs"] == []
    assert found["steps"]["decode1_160"]["bound"] == "memory"

    assert main(["cuda", "--record", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("forge: forge cuda --record needs") and error.count("\n") == 1


@pytest.mark.parametrize("content", ["not json", "{}", '{"model": "m"}'])
def test_a_recorded_run_that_is_none_is_refused_in_one_line(content, capsys, monkeypatch, tmp_path):
    from forge.backends import devices

    path = tmp_path / "run.json"
    path.write_text(content)
    monkeypatch.setattr(devices, "why_not_cuda", lambda: "no")
    monkeypatch.setattr(command, "RECORDED", path)

    assert main(["cuda", "--only", "run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
