"""The grammar: a text becomes blocks and steps, and what is wrong is said with its line."""

import pytest

from forge.book.chapter import Chapter, ChapterError, Check, Predict, Prose, Run, Source, Verdict, parse_chapter

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
from: three
to: four
```

```forge predict
How long?

With a second paragraph.

answer: {{a.ms:ms}}
why: Because
of that.
```

```forge predict
Which?

- this one, if a.ms > 1
- that one, with a comma, if True
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
```
"""


@pytest.fixture(scope="module")
def chapter() -> Chapter:
    return parse_chapter(TEXT)


def kinds(blocks) -> list[str]:
    return [type(block).__name__ for block in blocks]


def test_blocks_come_in_the_order_of_the_text(chapter):
    assert chapter.title == "A title"
    expected = "Prose Prose Source Predict Predict Run Verdict Verdict Prose Check Check"
    assert " ".join(kinds(chapter.blocks)) == expected


def test_each_kind_has_what_was_written(chapter):
    _, prose, source, number, choice, run, *_ = chapter.blocks
    assert isinstance(prose, Prose) and "## not a heading" in prose.text
    assert source == Source("forge.model.qwen3.Qwen3.forward", ("one", "two"), "three", "four")
    assert number.question == "How long?\n\nWith a second paragraph."
    assert number.answer == "{{a.ms:ms}}" and number.why == "Because\nof that."
    assert [entry.text for entry in choice.choices] == ["this one", "that one, with a comma"]
    assert [entry.condition for entry in choice.choices] == ["a.ms > 1", "True"]
    assert run == Run("a", 'forge naive --only run "Once upon a time" 32')


def test_checks_are_certain_and_expectations_are_not(chapter):
    check, expectation = [block for block in chapter.blocks if isinstance(block, Check)]
    assert [claim.sentence for claim in check.claims] == ["It is so, over two lines.", "And so is this."]
    assert [claim.expression for claim in check.claims] == ["a.ms > 0", "a.ms < 5"]
    assert check.certain and not expectation.certain


def test_a_step_begins_at_a_heading_and_at_a_run_and_ends_with_a_question(chapter):
    assert [kinds(step) for step in chapter.steps()] == [
        ["Prose"],
        ["Prose", "Source", "Predict"],
        ["Predict"],
        ["Run", "Verdict", "Verdict", "Prose", "Check", "Check"],
    ]


def test_the_verdict_follows_the_last_run_that_it_needs():
    run = "```forge run {0}\nforge naive --only run\n```\n"
    question = "```forge predict\nHow?\n\nanswer: {{a.ms / b.ms:times}}\n```\n"
    blocks = parse_chapter("# T\n" + question + run.format("a") + run.format("b")).blocks
    assert kinds(blocks) == ["Predict", "Run", "Run", "Verdict"]
    late = parse_chapter("# T\n" + run.format("a") + run.format("b") + question + "After.\n")
    assert kinds(late.blocks) == ["Run", "Run", "Predict", "Verdict", "Prose"]
    assert kinds(late.steps()[-1]) == ["Verdict", "Prose"]
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
        (block("predict", "How?"), "c.md:5: a prediction has an answer"),
        (block("predict", "How?\n\nanswer: 12"), "c.md:5: an answer is one placeholder"),
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
