"""Blocks as lines: within the width, with and without colour."""

import re

import pytest
from rich.text import Text

from forge.book.chapter import Check, Claim, Finding, Outcome, Prose, Run, Source, parse_chapter
from forge.book.drawing import draw_block, draw_title, lines_of
from forge.book.other_load import OtherLoad
from forge.book.reading import Guess, Reading
from forge.views.report import Report
from tests.views.records import piped, terminal, written

TEXT = """# 3 · T

```forge predict
Which of these?

- slow, if a.ms > 10
- fast, otherwise
why: Because {{a.ms:ms}} ms.
```

```forge run a
forge naive --only run "Once upon a time"
```
"""
ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\x1b\][^\x1b]*\x1b\\")


@pytest.fixture
def reading() -> Reading:
    report = Report({"ms": 4.0}, lambda console: console.print(Text(f"a report at {console.width}")))
    made = Reading(parse_chapter(TEXT), lambda command: report)
    made.perform(made.chapter.runs()[0])
    return made


def drawn(block, reading, console=None) -> str:
    console = console or piped(80)
    draw_block(console, block, reading)
    return written(console)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_title_fills_the_width(width):
    console = piped(width)
    draw_title(console, 3, "A long title that does not fit everywhere", "2 / 9")
    line = written(console).rstrip("\n")
    assert len(line) == width and line.startswith("── 3 · A long") and line.endswith(" 2 / 9 ──")


@pytest.mark.parametrize("width", [50, 80, 200])
def test_prose_stays_within_its_width_and_has_no_spaces_at_the_end(width, reading):
    text = "## A heading\n\n" + "word " * 60 + "\n\n- item " + "word " * 30 + "\n\n```text\npicture [x]\n```"
    lines = drawn(Prose(text), reading, piped(width)).splitlines()
    assert max(map(len, lines)) <= min(width, 96)
    assert not [line for line in lines if line != line.rstrip()]
    assert lines[0] == "A heading" and lines[1] == "─" * 9 and lines[-1] == "  picture [x]"


def test_prose_is_filled_in(reading):
    assert "took 4.0 ms" in drawn(Prose("It took **{{a.ms:ms}}** ms."), reading)


def test_a_run_shows_its_command_and_what_it_found(reading):
    out = drawn(reading.chapter.runs()[0], reading, piped(66))
    assert out.splitlines()[0] == '$ forge naive --only run "Once upon a time"' and "a report at 66" in out
    assert drawn(Run("b", "forge naive"), reading) == "$ forge naive\n"


@pytest.mark.parametrize("width", [40, 80, 140])
def test_source_is_marked_wrapped_and_kept_within_its_width(width, reading):
    source = Source("forge.model.qwen3.Qwen3.forward_pass", ("return ops.to_numpy",))
    lines = drawn(source, reading, piped(width)).splitlines()
    assert lines[0].startswith("forge/model/qwen3.py:") and max(map(len, lines)) <= width
    marked = "".join(line[2:].replace(" ", "") for line in lines if line.startswith("▌"))
    assert marked == "returnops.to_numpy(ops.linear(self.hidden_rows(ops,batch,storage),self.weights.head))"


def test_an_excerpt_says_that_it_was_cut(reading):
    source = Source("forge.model.qwen3.Qwen3.hidden_rows", (), "ops.begin_layer(-1)", "ops.begin_layer(index)")
    lines = drawn(source, reading).splitlines()
    assert lines[1] == lines[-2] == "  …" and lines[2] == "  ops.begin_layer(-1)"


def test_a_question_and_its_verdict(reading):
    predict, _, verdict = reading.chapter.blocks
    assert drawn(predict, reading) == "Predict\nWhich of these?\n  1  slow\n  2  fast\n"
    assert drawn(verdict, reading) == "Which of these?\nIt is 2, fast.\nBecause 4.0 ms.\n"
    reading.guesses[predict] = Guess("1", 0)
    assert drawn(predict, reading).endswith("\nYou said 1.\n")
    assert drawn(verdict, reading).startswith("Which of these?\nYou said 1, slow. It is 2, fast.\n")


def test_a_check_says_what_holds(reading):
    claims = (Claim("It is {{a.ms:ms}}.", "a.ms == 4"), Claim("Slow.", "a.ms > 9"), Claim("Who knows.", "a.x"))
    out = drawn(Check(claims, certain=True), reading)
    assert "✓ It is 4.0." in out and "✗ Slow." in out and "· Who knows." in out
    assert "so this is a bug" in out and "a.ms" not in out
    expectation = Check(claims, certain=False)
    assert "options that you gave" in drawn(expectation, reading)
    reading.loads[reading.chapter.runs()[0]] = OtherLoad(1.5, 2)
    assert "other programs kept the machine busy" in drawn(expectation, reading)
    told = Check((Claim("Slow.", "a.ms > 9", "It took only {{a.ms:ms}} ms."),), certain=False)
    assert drawn(told, reading) == "✗ Slow.\n  It took only 4.0 ms.\n"


def test_a_finding_is_the_sentence_of_this_run(reading):
    finding = Finding((Outcome("a.ms > 9", "Slow."), Outcome(None, "Fast: {{a.ms:ms}} ms.")))
    assert drawn(finding, reading) == "Fast: 4.0 ms.\n"
    reading.reports.clear()
    assert drawn(finding, reading) == "This run does not tell.\n"


def test_a_busy_machine_is_said_to_be_one(reading):
    (run,) = reading.chapter.runs()
    assert "busy" not in drawn(run, reading)
    reading.loads[run] = OtherLoad(1.5, 2)
    assert "Other programs kept 1.5 of 2 processors busy during this run" in drawn(run, reading)


def test_no_colour_where_none_is_wanted(reading):
    blocks = [Prose("**bold** `code`"), Source("forge.cache.off.OffKvCache.stats"), *reading.chapter.blocks]
    for block in blocks:
        plain = drawn(block, reading, piped(80))
        assert "\x1b" not in plain
        colourless = drawn(block, reading, terminal(80, NO_COLOR="1"))
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m|38;", colourless)
        assert ESCAPES.sub("", drawn(block, reading, terminal(80))) == plain


def test_lines_that_are_caught_are_those_that_would_be_printed(reading):
    console = terminal(80)
    lines = lines_of(console, lambda console: draw_block(console, Prose("one\n\ntwo"), reading))
    assert lines == ["one", "", "two"] and written(console) == ""
