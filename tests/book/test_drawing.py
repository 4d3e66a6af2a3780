"""Blocks as lines: within the width, with and without colour."""

import re
from dataclasses import replace

import pytest
from rich.text import Text

from forge.book.chapter import Check, Claim, Finding, Outcome, Prose, Recap, Run, Source, parse_chapter
from forge.book.drawing import draw_block, draw_source, draw_title, lines_of
from forge.book.given import OtherLoad
from forge.book.session import Guess, Session
from forge.book.source_code import Excerpt, Span
from forge.views.screen import Report
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
def session() -> Session:
    report = Report({"ms": 4.0}, lambda console: console.print(Text(f"a report at {console.width}")))
    made = Session(parse_chapter(TEXT), lambda command: report)
    made.perform(made.chapter.runs()[0])
    return made


def drawn(block, session, console=None) -> str:
    console = console or piped(80)
    draw_block(console, block, session)
    return written(console)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_title_fills_the_width(width):
    console = piped(width)
    draw_title(console, 3, "A long title that does not fit everywhere", "2 / 9")
    line = written(console).rstrip("\n")
    assert len(line) == width and line.startswith("── 3 · A long") and line.endswith(" 2 / 9 ──")


@pytest.mark.parametrize("width", [50, 80, 200])
def test_prose_stays_within_its_width_and_has_no_spaces_at_the_end(width, session):
    text = "## A heading\n\n" + "word " * 60 + "\n\n- item " + "word " * 30 + "\n\n```text\npicture [x]\n```"
    lines = drawn(Prose(text), session, piped(width)).splitlines()
    assert max(map(len, lines)) <= min(width, 96)
    assert not [line for line in lines if line != line.rstrip()]
    assert lines[0] == "A heading" and lines[1] == "─" * 9 and lines[-1] == "  picture [x]"


def test_prose_is_filled_in(session):
    assert "took 4.0 ms" in drawn(Prose("It took **{{a.ms:ms}}** ms."), session)


def test_a_run_shows_its_command_and_what_it_found(session):
    out = drawn(session.chapter.runs()[0], session, piped(66))
    assert out.splitlines()[0] == '$ forge naive --only run "Once upon a time"' and "a report at 66" in out
    assert drawn(Run("b", "forge naive"), session) == "$ forge naive\n"


@pytest.mark.parametrize("width", [40, 80, 140])
def test_source_is_marked_wrapped_and_kept_within_its_width(width, session):
    source = Source("forge.model.qwen3.Qwen3.forward_pass", ("return ops.result",))
    lines = drawn(source, session, piped(width)).splitlines()
    assert lines[0].startswith("forge/model/qwen3.py:") and max(map(len, lines)) <= width
    marked = "".join(line[2:].replace(" ", "") for line in lines if line.startswith("▌"))
    assert marked == "returnops.result(ops.linear(self.run_layers(ops,batch,storage),self.weights.head))"


def test_an_excerpt_says_that_it_was_cut(session):
    span = Span("ops.begin_layer(-1)", "ops.begin_layer(index)")
    lines = drawn(Source("forge.model.qwen3.Qwen3.run_layers", (), (span,), "the rest"), session).splitlines()
    assert lines[1].startswith("  … ") and lines[1].endswith("lines") and "  ops.begin_layer(-1)" in lines[2]
    assert lines[-2].strip() == "… the rest"


def test_source_is_never_higher_than_a_screen_and_keeps_the_lines_that_matter(session):
    source = Source("forge.engine.engine.Engine", ("def step(",))
    console = piped(80)
    draw_block(console, source, session, height=20)
    lines = written(console).splitlines()
    assert len(lines) <= 20 and any(line.startswith("▌") and "def step(" in line for line in lines)
    assert any(re.search(r"… [\d,]+ lines", line) for line in lines)


def test_a_wrapped_comment_is_a_comment():
    code = "x = 1  # a comment that is too long for its line and goes on below"
    shown = Excerpt("a.py", "f", 1, (f"    {code}", "    # alone, and just as long as the other comment"), frozenset())
    console = piped(42)
    draw_source(console, shown)
    assert written(console).splitlines()[1:-1] == [
        "      # a comment that is too long for",
        "      # its line and goes on below",
        "      x = 1",
        "      # alone, and just as long as the",
        "      # other comment",
    ]


def test_a_question_and_its_verdict(session):
    predict, _, verdict, _ = session.chapter.blocks
    assert drawn(predict, session) == "Predict\nWhich of these?\n  1  slow\n  2  fast\n"
    assert drawn(verdict, session) == "Which of these?\nIt is 2, fast.\nBecause 4.0 ms.\n"
    session.guesses[predict] = Guess("1", 0)
    assert drawn(predict, session).endswith("\nYou said 1.\n")
    assert drawn(verdict, session).startswith("Which of these?\nYou said 1, slow. It is 2, fast.\n")


def test_a_long_choice_goes_on_below_its_own_words(session):
    predict = parse_chapter(TEXT.replace("- slow", f"- slow{' and slow' * 8}")).blocks[0]
    lines = drawn(predict, session, piped(40)).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("  1  slow and"))
    assert lines[first + 1].startswith("     ") and "slow" in lines[first + 1]


def test_a_check_says_what_holds(session):
    claims = (Claim("It is {{a.ms:ms}}.", "a.ms == 4"), Claim("Slow.", "a.ms > 9"), Claim("Who knows.", "a.x"))
    out = drawn(Check(claims, certain=True), session)
    assert "✓ It is 4.0." in out and "✗ Slow." in out and "· Who knows." in out
    assert "so this is a bug" in out and "a.ms" not in out
    told = Check((Claim("Slow.", "a.ms > 9", "It took only {{a.ms:ms}} ms."),), certain=False)
    assert drawn(told, session) == "✗ Slow.\n  It took only 4.0 ms.\n"


def test_a_claim_is_not_made_where_its_condition_does_not_hold(session):
    claim = Claim("Nothing was lost.", "a.lost == 0", condition="a.ms > 9", unclaimed="Nothing ran in {{a.ms:ms}} ms.")
    assert drawn(Check((claim,), certain=True), session) == "· Nothing was lost.\n  Nothing ran in 4.0 ms.\n"
    met = replace(claim, condition="a.ms > 1", expression="a.ms == 4")
    assert drawn(Check((met,), certain=True), session) == "✓ Nothing was lost.\n"


def test_a_recap_says_what_to_remember_and_where_to_go_on(session):
    predict, *_ = session.chapter.blocks
    recap = Recap(("It took {{a.ms:ms}} ms.", "Two."), ("forge naive 8", "forge kv-cache"))
    session.goes_on = "forge next goes on."
    session.guesses[predict] = Guess("1", 0)
    assert drawn(recap, session).splitlines() == [
        "To remember", "───────────", "", " • It took 4.0 ms.", " • Two.", "",
        "Your predictions: 0 of 1 right, or within a factor of 1.5.", "",
        "To run next:", "  forge naive 8", "  forge kv-cache", "", "forge next goes on.",
    ]  # fmt: skip


def test_a_finding_is_the_sentence_of_this_run(session):
    finding = Finding((Outcome("a.ms > 9", "Slow."), Outcome(None, "Fast: {{a.ms:ms}} ms.")))
    assert drawn(finding, session) == "Fast: 4.0 ms.\n"
    session.reports.clear()
    assert drawn(finding, session) == "This run does not tell.\n"


def test_a_busy_machine_is_said_to_be_one(session):
    (run,) = session.chapter.runs()
    assert "busy" not in drawn(run, session)
    session.loads[run] = OtherLoad(1.5, 2)
    assert "Other programs kept 1.5 of 2 processors busy during this run" in drawn(run, session)


def test_no_colour_where_none_is_wanted(session):
    blocks = [Prose("**bold** `code`"), Source("forge.cache.off.OffKvCache.stats"), *session.chapter.blocks]
    for block in blocks:
        plain = drawn(block, session, piped(80))
        assert "\x1b" not in plain
        colourless = drawn(block, session, terminal(80, NO_COLOR="1"))
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m|38;", colourless)
        assert ESCAPES.sub("", drawn(block, session, terminal(80))) == plain


def test_lines_that_are_caught_are_those_that_would_be_printed(session):
    console = terminal(80)
    lines = lines_of(console, lambda console: draw_block(console, Prose("one\n\ntwo"), session))
    assert lines == ["one", "", "two"] and written(console) == ""
