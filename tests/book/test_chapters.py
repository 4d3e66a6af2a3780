"""The chapters themselves: every one runs to its end, its checks hold, its commands work, its sources are there."""

import re
import shlex

import pytest
from rich.text import Text

from chapters.outcomes import render_outcomes
from forge.book.catalog import chapters_folder, entries
from forge.book.chapter import (
    ANSWER,
    GIVEN,
    Check,
    Predict,
    Prose,
    Recap,
    Run,
    Source,
    Verdict,
    expressions_of,
    names_of,
)
from forge.book.drawing import draw_step, lines_of, print_chapter
from forge.book.given import Given, model_facts
from forge.book.measured import evaluate, expressions_in, names_in
from forge.book.session import Session
from forge.book.source_code import excerpt
from forge.cli.chapters import run_reported, with_given
from forge.cli.compare import DIFFERENT
from forge.cli.main import command_named, main
from forge.cli.run_control import INTERRUPTED
from forge.errors import UsageError
from forge.views.progress import COMPILING
from forge.views.terminal import open_console
from tests.book.claims import ill_formed, short_measurements
from tests.views.records import terminal

ENTRIES = entries()
WIDTHS = (80, 120)
COLUMNS = 76
"""A picture that is wider does not fit a terminal of 80."""
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTS = ("What is still wrong", "What production engines do differently", "Exercises", "Answers", "References")

each_chapter = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.command)
LONG = ("batching", "cluster", "constrained", "kernels", "oneshot", "paged", "prefix", "serving", "speculation")
"""Chapters that take long as a reader runs them. `tests.book.test_claims` runs every one with small models."""
each_whole_chapter = pytest.mark.parametrize(
    "entry",
    [pytest.param(entry, marks=[pytest.mark.slow] * (entry.command in LONG)) for entry in ENTRIES],
    ids=lambda entry: entry.command,
)


@pytest.fixture
def short():
    """Measurements that take no longer than they must."""
    with short_measurements():
        yield


def blocks(entry, kind) -> list:
    return [block for block in entry.chapter.blocks if isinstance(block, kind)]


def typed_commands(entry) -> list[str]:
    """The command lines that a reader is told to type, those of the runs left out."""
    text = entry.path.read_text(encoding="utf-8")
    fenced = [line for kind, body in FENCE.findall(text) if kind == "sh" for line in body.splitlines()]
    fenced += [command for recap in blocks(entry, Recap) for command in recap.commands]
    runs = {run.command for run in entry.chapter.runs()}
    return [line for line in dict.fromkeys(fenced) if line.startswith("forge ") and line not in runs]


def test_chapters_are_numbered_without_a_gap_and_each_is_a_command():
    assert [entry.number for entry in ENTRIES] == list(range(1, len(ENTRIES) + 1)) and len(ENTRIES) >= 3
    for entry in ENTRIES:
        assert command_named(entry.command) is not None
        assert entry.path.read_text(encoding="utf-8").startswith(f"# {entry.number} · ")


def test_the_list_names_every_chapter():
    readme = (chapters_folder() / "README.md").read_text(encoding="utf-8")
    for entry in ENTRIES:
        assert f"| {entry.number} | `forge {entry.command}` |" in readme


@each_chapter
def test_a_chapter_has_its_parts(entry):
    text = entry.path.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert set(PARTS) <= set(headings)
    assert blocks(entry, Run) and blocks(entry, Source) and blocks(entry, Predict)
    assert len(blocks(entry, Verdict)) == len(blocks(entry, Predict))
    (recap,) = blocks(entry, Recap)
    assert len(recap.lines) == 5 and recap.commands
    words = sum(len(block.text.split()) for block in blocks(entry, Prose))
    assert 800 <= words <= 1900
    exercises, answers = (text.split(f"## {part}\n")[1].split("\n## ")[0] for part in ("Exercises", "Answers"))
    for part in (exercises, answers):
        assert re.findall(r"^(\d+)\. ", part, re.MULTILINE) == ["1", "2", "3"]
    assert len(FENCE.findall(exercises)) == 3


@each_chapter
def test_every_source_is_there(entry):
    for source in blocks(entry, Source):
        assert excerpt(source.dotted, source.light, source.spans, source.omitted).lines


@each_chapter
def test_nothing_is_said_before_it_is_measured(entry):
    over: set[str] = set()
    for block in entry.chapter.blocks:
        if isinstance(block, Run):
            over.add(block.name)
        elif isinstance(block, Predict):
            texts = (block.question, *(choice.text for choice in block.choices))
            asked = {name for text in texts for expression in expressions_in(text) for name in names_in(expression)}
            assert asked <= {*over, *GIVEN}
        else:
            assert names_of(block.predict if isinstance(block, Verdict) else block) <= over


@each_chapter
def test_pictures_fit_a_narrow_terminal(entry):
    text = entry.path.read_text(encoding="utf-8")
    shown = [line for kind, body in FENCE.findall(text) if not kind.startswith("forge") for line in body.splitlines()]
    assert not [line for line in shown if len(line) > COLUMNS]


def complaints(err: str) -> list[str]:
    """What was written to standard error beside the lines by which a benchmark says in a pipe what it does, and the one
    that a machine's first run says."""
    benchmarks = r"judges beside generations.*|many prompts in one forward|\d+ in, \d+ out, \d+ at once"
    said = re.compile(f"{benchmarks}|{re.escape(COMPILING)}")
    return [line for line in err.splitlines() if not said.fullmatch(line)]


@each_whole_chapter
def test_a_chapter_runs_to_its_end_and_its_checks_hold(entry, capfd, short):
    session = Session(entry.chapter, run_reported, model=model_facts())
    assert print_chapter(open_console(), entry.number, session) == 0
    out, err = capfd.readouterr()
    assert complaints(err) == [] and "\x1b" not in out and "{{" not in out
    assert max(map(len, out.splitlines())) <= 80
    for block in entry.chapter.blocks:
        for expression in expressions_of(block):
            assert evaluate(expression, {**session.measured, ANSWER: 1}) is not None
    for width in WIDTHS:
        for step in entry.chapter.steps():
            lines = lines_of(terminal(width), lambda console, step=step: draw_step(console, step, session))
            assert max(Text.from_ansi(line).cell_len for line in lines) <= width
    certain = [judged for check in blocks(entry, Check) if check.certain for judged in session.judge(check.claims)]
    claimed = [judged for judged in certain if judged.holds is not None]  # the others name what this run cannot test
    assert claimed and all(judged.holds for judged in claimed)
    assert all(session.verdict(predict) or predict.condition for predict in blocks(entry, Predict))
    for outcome in render_outcomes(entry.chapter, session.measured):
        assert outcome.text is not None, f"no facts lead to this outcome of {outcome.question!r}: {outcome.condition}"
        assert not ill_formed(outcome.text), f"{ill_formed(outcome.text)}: {outcome.text}"


@each_chapter
def test_every_command_that_a_reader_is_told_to_type_is_one(entry, capfd):
    assert typed_commands(entry)
    for line in typed_commands(entry):
        assert main([*shlex.split(line)[1:], "--help"]) == 0, line
        assert "Usage" in capfd.readouterr().out


@pytest.mark.slow
@each_chapter
def test_every_command_that_a_reader_is_told_to_type_works(entry, capfd, short):
    assert typed_commands(entry)
    for line in typed_commands(entry):
        status = main(shlex.split(line)[1:])
        out, err = capfd.readouterr()
        assert status == 0 or (status == DIFFERENT and "forge compare" in line), f"{line}: {err}"
        assert out and complaints(err) == []


def test_a_chapter_may_be_opened_by_its_number(forge, small, short):
    by_command = forge("naive", "Once", "6", *small)
    assert by_command.status == 0 and by_command.out.startswith("── 1 · ")
    assert "$ forge naive Once 6 --only run --model" in by_command.out
    by_number = forge("chapter", "1", "Once", "6", *small)
    assert by_number.status == 0 and by_number.out.splitlines()[:40] == by_command.out.splitlines()[:40]
    assert "$ forge naive Once 6 --only run --model" in by_number.out
    wrong = forge("chapter", "99")
    assert wrong.status == 2 and "there is no chapter 99; there are 1 to" in wrong.err
    assert "did you mean kv-cache?" in forge("chapter", "kv-cash").err


def test_an_experiment_alone_has_no_text(forge, small):
    found = forge("naive", "Once", "6", *small, "--only", "run")
    assert found.status == 0 and "── 1 · " not in found.out
    assert forge("naive", "--only", "prose").err == "forge: --only takes run, and 'prose' is something else\n"


def test_a_mistake_in_the_readers_options_is_one_line(forge):
    found = forge("naive", "--model", "nothing.gguf")
    assert found.status == 2 and found.err.count("\n") == 1 and "no such file" in found.err


def test_a_readers_options_reach_a_command_in_a_group_too():
    given = Given({"model": "mine.gguf"})
    line = with_given("forge bench oneshot --only capacity --reps 3", given)
    assert line == "forge bench oneshot --only capacity --reps 3 --model mine.gguf"
    assert with_given("forge oneshot --only run", given) == "forge oneshot --only run --model mine.gguf"


def test_reading_without_a_terminal_is_no_progress(forge, small, state_home):
    forge("naive", "Once", "3", *small)
    assert not state_home.exists()
    assert "0 of" in forge("chapters").out and forge("chapters").out.startswith("What is there to read?")


def test_ctrl_c_in_an_experiment_ends_the_chapter_as_it_ends_the_command(monkeypatch):
    monkeypatch.setattr("forge.cli.main.parse_and_run", lambda words: INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        run_reported("forge naive --only run")


@pytest.mark.parametrize("words", ["naive --wrong", "naive x many", "naiv", "naive --threads", 'naive "', ""])
def test_a_line_that_cannot_be_parsed_is_a_usage_error(words):
    with pytest.raises(UsageError):
        run_reported(f"forge {words}")
