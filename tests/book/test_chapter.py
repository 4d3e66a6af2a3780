"""The grammar: a text becomes blocks and steps, and what is wrong is said with its line."""

import pytest

from forge.book.chapter import (
    Chapter,
    ChapterError,
    Check,
    Choice,
    Finding,
    Outcome,
    Predict,
    Prose,
    Recap,
    Run,
    Source,
    Verdict,
    parse_chapter,
)
from forge.book.source_code import Span

TEXT = """# 7 · A title

Intro.

## First

Text with {{a.ms:ms}} in it.

```text
## not a heading
forge not a command
```

```forge source
forge.model.qwen3.Qwen3.forward
light: one
light: two
omit: the start
from: three
to: four
from: five
to: six
omit: the rest
```

```forge predict
How long?

With a second paragraph.

answer: {{a.ms:ms}}
restated: How long, again?
when: answer > 2 and not machine.busy
Because
of that.
otherwise: Because it is fast.
```

```forge predict
Which?

- this one, if a.ms > 1
  Because of this,
  over two lines.
- that one, with a comma, otherwise
- a third, never
why: In any case.
```

```forge run a
forge naive --only run "Once upon a time" 32
```

After.

```forge check
It is so,
over two lines.
    a.ms > 0
And so is this.
    a.ms < 5
```

```forge expect
Fast.
    a.ms < 1
otherwise: Not fast,
    for once.
```

```forge finding
when: a.ms < 1
It is fast.

otherwise:
It is not fast: {{a.ms:ms}} ms.
```
"""


@pytest.fixture(scope="module")
def chapter() -> Chapter:
    return parse_chapter(TEXT)


def kinds(blocks) -> list[str]:
    return [type(block).__name__ for block in blocks]


def test_blocks_come_in_the_order_of_the_text(chapter):
    assert chapter.title == "A title"
    expected = "Prose Prose Source Predict Predict Run Verdict Verdict Prose Check Check Finding Recap"
    assert " ".join(kinds(chapter.blocks)) == expected


def test_each_kind_has_what_was_written(chapter):
    _, prose, source, number, choice, run, *_ = chapter.blocks
    assert isinstance(prose, Prose) and "## not a heading" in prose.text
    assert source == Source(
        "forge.model.qwen3.Qwen3.forward",
        ("one", "two"),
        (Span("three", "four", "the start"), Span("five", "six")),
        "the rest",
    )
    assert number.question == "How long?\n\nWith a second paragraph."
    assert number.answer == "{{a.ms:ms}}" and number.why == "" and number.short_question == "How long, again?"
    assert number.outcomes == (
        Outcome("answer > 2 and not machine.busy", "Because\nof that."),
        Outcome(None, "Because it is fast."),
    )
    assert choice.choices == (
        Choice("this one", "a.ms > 1", "Because of this,\nover two lines."),
        Choice("that one, with a comma", None),
        Choice("a third", "False"),
    )
    assert choice.why == "In any case." and choice.short_question == "Which?"
    assert run == Run("a", 'forge naive --only run "Once upon a time" 32')


def test_checks_are_certain_and_expectations_are_not(chapter):
    check, expectation = [block for block in chapter.blocks if isinstance(block, Check)]
    assert [claim.sentence for claim in check.claims] == ["It is so, over two lines.", "And so is this."]
    assert [claim.expression for claim in check.claims] == ["a.ms > 0", "a.ms < 5"]
    assert check.certain and not expectation.certain
    assert [claim.otherwise for claim in (*check.claims, *expectation.claims)] == ["", "", "Not fast, for once."]


def test_a_finding_has_its_outcomes(chapter):
    finding = chapter.blocks[-2]
    assert finding == Finding((Outcome("a.ms < 1", "It is fast."), Outcome(None, "It is not fast: {{a.ms:ms}} ms.")))


def test_a_recap_is_the_last_step_wherever_it_stands():
    text = "# T\n\n```forge recap\n- One\n  line.\n- Two.\nrun: forge naive 8\n```\n\nAfter.\n"
    assert parse_chapter(text).blocks == (Prose("After."), Recap(("One line.", "Two."), ("forge naive 8",)))


def test_a_chapter_knows_what_it_asks_for(chapter):
    assert chapter.names == {"a", "machine"}


def test_a_step_begins_at_a_heading_and_at_a_run_and_ends_with_a_question(chapter):
    assert [kinds(step) for step in chapter.steps()] == [
        ["Prose"],
        ["Prose", "Source", "Predict"],
        ["Predict"],
        ["Run", "Verdict", "Verdict", "Prose", "Check", "Check", "Finding"],
        ["Recap"],
    ]


def test_the_verdict_follows_the_last_run_that_it_needs():
    run = "```forge run {0}\nforge naive --only run\n```\n"
    question = "```forge predict\nHow?\n\nanswer: {{a.ms / b.ms:times}}\n```\n"
    blocks = parse_chapter("# T\n" + question + run.format("a") + run.format("b")).blocks
    assert kinds(blocks) == ["Predict", "Run", "Run", "Verdict", "Recap"]
    late = parse_chapter("# T\n" + run.format("a") + run.format("b") + question + "After.\n")
    assert kinds(late.blocks) == ["Run", "Run", "Predict", "Verdict", "Prose", "Recap"]
    assert kinds(late.steps()[-2]) == ["Verdict", "Prose"]
    assert isinstance(late.blocks[3], Verdict) and isinstance(late.blocks[2], Predict)


def block(kind: str, body: str) -> str:
    return f"# T\n\ntext\n\n```forge {kind}\n{body}\n```\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no title", "c.md:1: a chapter begins with its title"),
        ("", "c.md:1"),
        (block("dance", ""), "c.md:5: unknown directive 'dance'"),
        (block("run a b", "forge naive"), "c.md:5: a run's name is one word"),
        (block("run", "ls -l"), "c.md:5: a run is one command line"),
        (block("run", ""), "c.md:5: a run is one command line"),
        (block("source", ""), "c.md:5: a source begins with a dotted name"),
        (block("source", "a.b\nbright: x"), "c.md:5: 'bright: x' is not one of"),
        (block("recap", "- 1.\n- 2.\n- 3.\n- 4.\n- 5.\n- 6."), "c.md:5: a recap has 1 to 5 lines, and this one has 6"),
        (block("recap", "Text."), "c.md:5: 'Text.' is neither"),
        (2 * block("recap", "- 1."), "c.md: a chapter has one recap, and this one has 2"),
        (block("source", "a.b\nfrom: x\nfrom: y"), "c.md:5: each 'from' but the last has a 'to'"),
        (block("source", "a.b\nfrom: x\nto: y\nto: z"), "c.md:5: each 'to' but the first follows"),
        (block("predict", "How?"), "c.md:5: a prediction has an answer"),
        (block("predict", "How?\n\nanswer: 12"), "c.md:5: an answer is one placeholder"),
        (block("predict", "How?\n\n- this, if 1 > 0"), "c.md:5: of the choices one ends with ', otherwise'"),
        (block("predict", "How?\n\nanswer: {{a.ms}}\nwhen: a.ms > 1\nSo."), "c.md:5: an 'otherwise' is missing"),
        (block("finding", "when: 1 > 0\nSo."), "c.md:5: an 'otherwise' is missing"),
        (block("finding", "when: 1 > 0\notherwise: So."), "c.md:5: no sentence for '1 > 0'"),
        (block("finding", "otherwise: So.\nwhen: 1 > 0\nSo."), "c.md:5: 'otherwise' is the last outcome"),
        (block("finding", "when: open('x')\nSo.\notherwise: No."), "c.md:5: not an expression: open('x')"),
        (block("finding", "when: b.ms > 1\nSo.\notherwise: No."), "c.md: no run is called 'b'"),
        (block("run model", "forge naive"), "c.md: no run can be called 'model'"),
        ("# T\n\nIt took {{a.ms >}} ms.\n", "c.md: not an expression"),
        (block("check", "No expression."), "c.md:5: a check is sentences"),
        (block("check", "No.\n    a.ms >"), "c.md:5: not an expression"),
        (block("check", "Unknown.\n    a.ms > 1"), "c.md: no run is called 'a'"),
        ("# T\n\n```forge run\nforge naive\n", "c.md:3: this fence is never closed"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text, expected):
    with pytest.raises(ChapterError) as found:
        parse_chapter(text, "c.md")
    assert str(found.value).startswith(expected)


def test_a_claim_and_a_run_may_have_a_condition():
    text = "```forge run a\nforge naive\nif: not model.x\nelse: Left out.\n```\n\n```forge check\nSo.\n    a.ms > 0\n"
    text += "if: a.lost\nelse: Not tested,\n    for once.\n```\n"
    run, check, _ = parse_chapter(f"# T\n\n{text}").blocks
    assert (run.condition, run.unclaimed) == ("not model.x", "Left out.")
    assert (check.claims[0].condition, check.claims[0].unclaimed) == ("a.lost", "Not tested, for once.")
    for part in ("else: Left out.\n", "if: a.lost\n", "lost"):
        wrong = text.replace(part, "")
        with pytest.raises(ChapterError):
            parse_chapter(f"# T\n\n{wrong}")


def test_an_expectation_says_what_is_said_where_it_does_not_hold():
    with pytest.raises(ChapterError, match="has no 'otherwise"):
        parse_chapter("# T\n\n```forge run a\nforge naive\n```\n\n```forge expect\nFast.\n    a.ms < 1\n```\n")
