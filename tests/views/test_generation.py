from dataclasses import replace

from forge.views.generation import LiveGeneration, PlainGeneration, forward_line, generation_view
from tests.views.records import LABEL, climbing, flat, piped, run_of, step, terminal, written


def show(console, result, prompt="Once upon a time", echo=False):
    """Feed a whole run through the view that fits the console; returns everything written."""
    with generation_view(console, result.label, prompt, echo) as view:
        for record in result.records:
            view.step(record)
        view.finish(result)
    return written(console)


def test_a_pipe_gets_plain_lines_and_a_terminal_gets_the_live_view():
    assert isinstance(generation_view(piped(), LABEL, ""), PlainGeneration)
    assert isinstance(generation_view(terminal(), LABEL, ""), LiveGeneration)
    assert isinstance(generation_view(terminal(TERM="dumb"), LABEL, ""), PlainGeneration)


def test_piped_output_has_one_line_per_forward_and_no_escape_codes():
    out = show(piped(), flat(5))
    assert "\x1b" not in out
    lines = [line for line in out.splitlines() if line.startswith("forward ")]
    assert len(lines) == 5
    assert lines[0].split() == [
        "forward",
        "1",
        "prefill",
        "4",
        "tok",
        "1.9",
        "ms",
        '"',
        'there"',
        "id",
        "101",
        "p",
        "0.500",
    ]


def test_piped_lines_are_written_while_the_run_goes_on():
    console = piped()
    with generation_view(console, LABEL, "") as view:
        view.step(step(1, 4, 1.9))
        assert "forward   1" in written(console)


def test_piped_text_is_not_wrapped():
    result = run_of([(1, 1.0)] * 60)
    text = result.output.outputs[0].text
    assert len(text) > 200
    assert text in show(piped(), result)


def test_the_block_names_every_figure():
    out = show(piped(), flat(5))
    for name in (
        "model",
        "kv mode",
        "device",
        "time to first token",
        "decode",
        "forwards",
        "tokens computed",
        "KV held",
    ):
        assert any(line.startswith(name + " ") for line in out.splitlines()), name
    assert "per forward ms" in out and "min 0.60  median 0.60  max 1.9  mean 0.86  (n=5)" in out
    assert "NumPy float32" in out


def test_the_figures_are_those_of_the_records():
    result = flat(5)
    assert result.tokens_computed == 8
    assert result.kv_bytes_held == 8000
    assert round(result.decode_tokens_per_second) == round(1 / 0.6e-3)


def test_the_prompt_is_echoed_in_a_pipe_only_when_asked():
    assert "Once upon a time" not in show(piped(), flat(3))
    assert "Once upon a time there was a" in show(piped(), flat(3), echo=True)


def test_a_seed_is_shown_where_tokens_were_drawn():
    assert "seed" not in show(piped(), flat(3))
    assert "seed" in show(piped(), replace(flat(3), sampled=True))


def test_several_samples_are_labelled():
    result = run_of([(8, 2.0), (2, 1.0)], samples=2)
    out = show(piped(), result)
    assert "sample 0 · length" in out and "sample 1 · length" in out
    assert out.splitlines()[0].count("id 101") == 2


def test_brackets_in_a_text_are_not_markup():
    out = show(piped(), run_of([(1, 1.0)], texts=("[red]a[/red] [/] :fox:",)))
    assert "[red]a[/red] [/] :fox:" in out


def test_escape_codes_of_a_model_never_reach_the_terminal():
    evil = "\x1b[2Jgone\x9b2J\x1b]0;title\x07"
    for console in (piped(), terminal(NO_COLOR="1")):
        out = show(console, run_of([(1, 1.0)] * 3, texts=(evil,)), prompt=evil, echo=True)
        assert "\x1b[2J" not in out and "\x1b]0" not in out and "\x9b" not in out and "\x07" not in out
        assert "␛[2Jgone" in out


def test_an_aborted_run_says_so():
    assert "abort" in show(piped(), run_of([(4, 1.0), (1, 1.0)], finish="abort"))


def test_a_run_without_forwards_has_a_block_all_the_same():
    out = show(piped(), run_of([]))
    assert "no forward ran" in out and "time to first token" in out


def test_nothing_on_a_terminal_is_wider_than_the_terminal():
    for width in (40, 60, 80, 96, 200):
        console = terminal(width=width, NO_COLOR="1")
        result = climbing(32)
        console.file.truncate(0)
        with LiveGeneration(console, LABEL, "Once upon a time") as view:
            view.finish(result)
        lines = _visible(written(console)).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width


def test_a_long_run_does_not_flood_the_terminal():
    console = terminal(NO_COLOR="1")
    result = run_of([(4, 2.0), *[(1, 1.0)] * 511], texts=("a",))
    out = show(console, result)
    assert "505 more" in _visible(out)
    with LiveGeneration(console, LABEL, "") as view:
        for record in result.records:
            view.step(record)
        lines = console.render_lines(view.frame())
    assert len(lines) <= 24


def test_the_live_picture_fits_a_low_terminal():
    for height in (8, 10, 24):
        console = terminal(height=height)
        with LiveGeneration(console, LABEL, "word " * 200) as view:
            for record in climbing(20).records:
                view.step(record)
            assert len(console.render_lines(view.frame())) <= max(height, 9)


def test_the_terminal_is_restored_when_a_run_fails():
    console = terminal()
    try:
        with LiveGeneration(console, LABEL, "") as view:
            view.step(step(1, 4, 1.0))
            raise RuntimeError
    except RuntimeError:
        pass
    out = written(console)
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l")


def test_no_color_means_no_colour_codes():
    import re

    out = show(terminal(NO_COLOR="1"), flat(8))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", out)


def test_wide_characters_are_wrapped_by_their_columns():
    console = terminal(width=40, NO_COLOR="1")
    with LiveGeneration(console, LABEL, "") as view:
        view.finish(run_of([(1, 1.0)] * 30, texts=("狐とランタン",)))
    from rich.cells import cell_len

    assert max(cell_len(line) for line in _visible(written(console)).splitlines()) <= 40


def test_a_forward_line_without_a_token_ends_after_its_time():
    assert forward_line(1, replace(step(1, 4, 1.0), tokens=())).endswith("1.0 ms")


def _visible(out):
    """What stands on the screen: without escape sequences, and of a redrawn line its last state."""
    import re

    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out).replace("\r", "\n")


def test_a_live_view_that_is_left_leaves_nothing_behind():
    console = terminal(NO_COLOR="1")
    with LiveGeneration(console, LABEL, "Once") as view:
        for record in flat(3).records:
            view.step(record)
    assert written(console).rsplit("\x1b[2K", 1)[-1].strip() in ("", "\x1b[?25h")
    silent = piped()
    with LiveGeneration(silent, LABEL, "Once") as view:
        view.step(step(1, 4, 1.0))
    assert written(silent) == ""
