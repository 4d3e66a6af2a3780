"""The poster of one request: its stations exist, the engine passes through them, and the screen says what happened."""

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from forge.book.source_code import PACKAGE
from forge.book.tour import ENGINE, HTTP, Visit, tour_of, tour_screen
from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM
from forge.views.screen import draw
from tests.small_models import write_small_qwen3
from tests.views.records import piped, written

PROMPT = "Once upon a time"
EVENTS = (b'data: {"a": 1}', b'data: {"b": 2}', b"data: [DONE]")


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """A tour of a real run in this process, and the (file, function) pairs of forge that were called meanwhile."""
    path = write_small_qwen3(tmp_path_factory.mktemp("models") / "small.gguf")
    llm = LLM(path, kv="prefix", device="reference")
    called = set()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            called.add((frame.f_code.co_filename.removeprefix(f"{PACKAGE.parent}/"), frame.f_code.co_name))

    sent = time.perf_counter()
    sys.setprofile(profile)
    try:
        run = llm.start([PROMPT], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        records = tuple(run)
    finally:
        sys.setprofile(None)
    now = time.perf_counter()
    events = tuple((now + index, line) for index, line in enumerate(EVENTS))
    visit = Visit({"prompt": PROMPT, "max_tokens": 4}, sent, events, ("Once", " upon"), records, "small")
    return tour_of(visit), called


def test_every_station_is_a_function_that_exists(toured):
    tour, _ = toured
    assert len(tour.stations) == 14 and [one.process for one in tour.stations][::13] == [HTTP, HTTP]
    for station in tour.stations:
        path, _, name = station.where.partition(" ")
        assert path.startswith("forge/") and station.dotted.endswith(name)
        assert (PACKAGE.parent / path.partition(":")[0]).is_file()


def test_a_real_request_passes_through_the_engines_stations(toured):
    tour, called = toured
    inside = [one for one in tour.stations if one.process == ENGINE and "/server/" not in one.where]
    assert len(inside) == 8
    for station in inside:
        path, _, name = station.where.partition(" ")
        assert (path.partition(":")[0], name.rpartition(".")[2]) in called, station.title
    assert ("forge/tokenizer/tokenizer.py", "encode") in called


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_poster_fits_and_its_times_never_go_back(toured, width):
    tour, _ = toured
    console = piped(width)
    draw(console, tour_screen(tour))
    lines = written(console).splitlines()
    assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)
    assert lines[0] == "Where does one request go?  small"
    times = [station.at_ms for station in tour.stations if station.at_ms is not None]
    assert times == sorted(times) and len(times) == 6
    assert json.dumps(tour.as_json())


def test_the_picture_grows_by_a_line_and_a_token_with_each_step(toured):
    tour, _ = toured
    assert [step.rows for step in tour.steps] == [tour.steps[0].held, 1, 1, 1]
    assert [step.held - tour.steps[0].held for step in tour.steps] == [0, 1, 2, 3]
    assert tour.steps[0].queued_ms is not None and [step.queued_ms for step in tour.steps[1:]] == [None] * 3
    for before, after in pairwise(tour.steps):
        assert after.text == before.text + after.token
        assert after.slots.count("█") == before.slots.count("█") + 1
    full = replace(tour.steps[0], held=32, block_size=16)
    assert full.slots == "1 + " + "█" * 16 and replace(full, held=33).slots == "2 + █" + "░" * 15


def test_the_command_follows_a_request_through_a_real_server(forge, tmp_path):
    picture = tmp_path / "tour.svg"
    found = forge("tour", "Once", "3", "-m", "hash", "--svg", str(picture))
    assert found.status == 0, found.err
    assert "forge/server/app.py" in found.out and "2 steps of one row each" in found.out
    assert picture.read_text().startswith("<svg")
    assert forge("tour", "").status == 2
