"""The screens of `forge bench` at every width."""

import io

import pytest

from forge.bench import cpu, quality
from forge.bench.cases import Limits
from forge.views.progress import BenchProgress
from forge.views.screen import draw
from forge.views.terminal import open_console
from tests.bench.test_results import benchmark


def shown(screen, facts, width=96) -> str:
    file = io.StringIO()
    console = open_console(file, width)
    draw(console, screen(facts))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 96, 140])
@pytest.mark.parametrize("peers", [(), ("llama.cpp",), ("llama.cpp", "transformers")], ids=len)
def test_nothing_is_cut_off(width, peers):
    text = shown(cpu.screen, benchmark(peers=peers), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for peer in peers:
        assert f"{peer} " in text
    assert ("2.00 x" in text) == bool(peers)


def test_every_figure_says_how_near_its_limit_it_is():
    text = shown(cpu.screen, benchmark())
    assert "of the limit" in text and "memory" in text and "The machine's limits" in text


def test_what_was_left_out_is_said_with_its_reason():
    text = shown(cpu.screen, benchmark(skipped=[{"name": "transformers", "reason": "No module named 'torch'"}]))
    assert "· transformers: No module named 'torch'" in text


def test_a_busy_or_changing_machine_is_said():
    calm = shown(cpu.screen, benchmark())
    busy = shown(cpu.screen, benchmark(load_average=3.0, after=Limits(0.5e6, 1e9)))
    assert "busy" not in calm and "did not stay the same" not in calm
    assert "load average 3.0" in busy and "did not stay the same" in busy


def test_peers_that_compute_something_else_are_said():
    text = shown(cpu.screen, benchmark(tops={"llama.cpp": 2}), 140)
    assert "another likeliest token in 16 of 16 sequences" in text


def test_turns_that_were_not_taken_are_said():
    text = shown(cpu.screen, benchmark(repetitions=9), 140)
    assert "decode 16: llama.cpp took 3 of 9 turns" in text


def test_an_interrupted_run_shows_what_there_is():
    text = shown(cpu.screen, benchmark(interrupted=True, after=None))
    assert "interrupted" in text and "decode 16" in text


def test_a_run_without_figures_still_shows_loading():
    text = shown(cpu.screen, benchmark(figures=[]))
    assert "load, s" in text and "tokens/s" not in text
    assert "error" in text and "2.26%" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_quality_tables_fit(width):
    def against(model, kl, kl_max, agreement):
        return {"reference": model, "kl": kl, "kl_max": kl_max, "top1_agreement": agreement}

    itself = [against("tales-q8_0", 0, 0, 1)]
    both = [against("tales-q4_0", 0.0001, 0.02, 0.995), against("tales-q8_0", 0.012, 0.5, 0.957)]
    names = ("model", "device", "kv_dtype", "perplexity", "against")
    variants = [
        dict(zip(names, one, strict=True))
        for one in (
            ("tales-q8_0", "reference", "float32", 3.1234, itself),
            ("tales-q4_0", "reference", "float32", 3.2, both),
            ("tales-q4_0", "cpu", "bfloat16", 3.21, both),
        )
    ]
    facts = {"text": "held-out stories", "tokens": 2044, "windows": 4, "window": 512, "variants": variants}
    text = shown(quality.screen, facts, width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert "KL*" in text and "* held against tales-q8_0" in text and "99.50 %" in text


def test_progress_in_a_pipe_is_silent():
    file = io.StringIO()
    with BenchProgress(open_console(file)) as progress:
        progress("decode 1: forge")
    assert file.getvalue() == ""
