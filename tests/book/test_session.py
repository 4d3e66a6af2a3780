import pytest

from forge.book.chapter import ChapterError, Choice, Claim, Finding, Outcome, Predict, Run, Verdict, parse_chapter
from forge.book.drawing import draw_block
from forge.book.given import OtherLoad
from forge.book.session import Guess, Session, closeness, explanation, parse_guess
from forge.errors import UsageError
from forge.views.screen import Report
from tests.views.records import piped, written

RUN = Run("a", "forge naive --only run")
HOW_LONG = Predict("How long?", "{{a.ms:ms}}", (), "")
SHARE = Predict("Which part?", "{{a.share:percent}}", (), "")
HOW_MANY = Predict("How many bytes?", "{{a.bytes:size}}", (), "")
WHICH = Predict("Which?", "", (Choice("slow", "a.ms > 10"), Choice("fast", None)), "")
RATIO = Predict("How many times as long?", "{{a.ratio:times}}", (), "")
BLOCKS = Predict("How many blocks?", "{{a.blocks:count}}", (), "")
MEAN = Predict("How many tokens on average?", "{{a.mean:.1f}}", (), "")


def session(**facts) -> Session:
    chapter = parse_chapter(f"# T\n\n```forge run a\n{RUN.command}\n```\n")
    made = Session(chapter, lambda command: Report(facts, lambda console: None))
    made.perform(RUN)
    return made


def test_what_a_run_found_is_known_by_its_name():
    assert session(ms=4.0).fill("{{a.ms:ms}}") == "4.0"


def test_a_run_that_fails_leaves_what_was_known():
    made = session(ms=4.0)

    def fail(command):
        raise UsageError("no")

    made.run_command = fail
    with pytest.raises(UsageError):
        made.perform(RUN)
    assert made.fill("{{a.ms:ms}}") == "4.0"


@pytest.mark.parametrize(
    ("predict", "text", "value"),
    [
        (HOW_LONG, "4", 4),
        (HOW_LONG, " 4.5 ms ", 4.5),
        (HOW_LONG, "1,200", 1200),
        (RATIO, "4x", 4),
        (RATIO, "2.5 times", 2.5),
        (HOW_LONG, "2 s", 2000),
        (BLOCKS, "1,216 blocks", 1216),
        (MEAN, "4.4 tokens", 4.4),
        (HOW_LONG, "-.5", -0.5),
        (SHARE, "35 %", 0.35),
        (HOW_MANY, "6 kB", 6000),
        (HOW_MANY, "6144", 6144),
        (HOW_MANY, "1.5 MB", 1_500_000),
        (WHICH, "2", 1),
    ],
)
def test_a_guess_is_read_in_the_unit_of_its_answer(predict, text, value):
    assert parse_guess(predict, text).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("predict", "text", "expected"),
    [
        (HOW_LONG, "many", "a number of milliseconds, such as 2.5"),
        (HOW_LONG, "", "a number of milliseconds"),
        (HOW_LONG, "4 kB", "a number of milliseconds"),
        (RATIO, "1/0", "a number of times, such as 2.5"),
        (RATIO, "4 ms", "a number of times"),
        (BLOCKS, "2.5", "a whole number, such as 12"),
        (BLOCKS, "3 kB", "a whole number"),
        (SHARE, "0.35", "a percentage, such as 35 %"),
        (HOW_MANY, "6 tokens", "a size in bytes"),
        (MEAN, "4 ms", "a number"),
        (WHICH, "3", "one of 1, 2"),
        (WHICH, "x", "one of 1, 2"),
    ],
)
def test_what_is_no_guess_is_refused(predict, text, expected):
    with pytest.raises(UsageError, match=expected):
        parse_guess(predict, text)


@pytest.mark.parametrize(
    ("guess", "actual", "expected"),
    [
        (4, 4, "exact"),
        (4.1, 4, "nearly exact"),
        (3, 4, "a little too low"),
        (5, 4, "a little too high"),
        (40, 4, "too high by a factor of 10.0"),
        (1, 4, "too low by a factor of 4.0"),
        (-1, 4, "too low"),
        (1, 0, "too high"),
    ],
)
def test_how_close_a_guess_was(guess, actual, expected):
    assert closeness(guess, actual) == expected


def test_a_verdict_says_the_answer_and_how_close_the_guess_was():
    made = session(ms=4.0)
    assert made.verdict(HOW_LONG) == "It is 4.0."
    made.guesses = {HOW_LONG: Guess("8", 8.0), WHICH: Guess("1", 0)}
    assert made.verdict(HOW_LONG) == "You said 8. It is 4.0: your guess was too high by a factor of 2.0."
    assert made.verdict(WHICH) == "You said 1, slow. It is 2, fast." and made.is_right(WHICH) is False
    made.guesses = {HOW_LONG: Guess("4.01", 4.01), WHICH: Guess("2", 1)}
    assert made.verdict(WHICH) == "You said 2, and it is 2, fast." and made.is_right(WHICH)
    assert made.verdict(HOW_LONG) == "You said 4.01. It is 4.0: your guess was exact." and made.is_right(HOW_LONG)
    assert made.is_right(RATIO) is None


def test_the_run_chooses_what_is_said():
    outcomes = (Outcome("answer > 10", "Slow: {{answer:.1f}}."), Outcome(None, "Fast."))
    predict = Predict("How long?", "{{a.ms:ms}}", (), "In any case.", outcomes)
    assert explanation(predict, session(ms=12.0).measured) == "Slow: 12.0. In any case."
    assert explanation(predict, session(ms=4.0).measured) == "Fast. In any case."
    assert explanation(predict, session(ms=None).measured) == ""
    choice = Predict("Which?", "", (Choice("slow", "a.ms > 10", "So slow."), Choice("fast", None, "So fast.")), "")
    assert (
        explanation(choice, session(ms=12.0).measured) == "So slow."
        and explanation(choice, session(ms=4.0).measured) == "So fast."
    )
    finding = Finding((Outcome("a.ms > 10", "It took {{a.ms:ms}} ms."), Outcome(None, "Hardly anything.")))
    assert session(ms=12.0).finding(finding) == "It took 12.0 ms." and session(ms=4.0).finding(finding)[0] == "H"
    assert session(ms=None).finding(finding) is None


def test_machine_and_model_can_be_asked_for_without_a_run():
    made = session(ms=4.0)
    made.model = {"num_layers": 12}
    assert made.fill("{{model.num_layers}} {{machine.busy}}") == "12 False"
    made.loads[RUN] = OtherLoad(1.5, 2)
    assert made.fill("{{machine.busy}}") == "True"


def test_a_run_that_does_not_tell_gives_no_verdict():
    made = session(ms=None)
    assert made.verdict(HOW_LONG) is None and made.verdict(WHICH) is None
    assert session().verdict(HOW_LONG) is None


def test_claims_hold_or_do_not_or_cannot_be_told():
    claims = [Claim("", "a.ms > 1"), Claim("", "a.ms > 10"), Claim("", "a.other")]
    assert [judged.holds for judged in session(ms=4.0).judge(claims)] == [True, False, None]


def test_what_depends_on_a_run_that_is_left_out_is_left_out_too():
    text = '# T\n\n```forge run a\nforge naive\nif: not "model" in given\nelse: Yours.\n```\n'
    text += "\nIt took {{a.ms}}.\n\n## Next\n"
    made = Session(parse_chapter(text), lambda command: Report({"ms": 1}, lambda console: None))
    assert made.unperformed(made.steps()) and len(made.steps()) == 3
    made.given = ("model",)
    assert not made.unperformed(made.steps())
    assert [type(block).__name__ for step in made.steps() for block in step] == ["Run", "Prose", "Recap"]


def test_a_prediction_whose_condition_does_not_hold_is_neither_answered_nor_scored():
    told = Predict("How long?", "{{a.ms:ms}}", (), "", untold="It cannot tell.", condition="a.steady")
    which = Predict("Which?", "", WHICH.choices, "", untold="It cannot tell.", condition="a.steady")
    for predict in (told, which):
        assert predict.names() == {"a"}
        steady, shaken = session(ms=4.0, steady=True), session(ms=4.0, steady=False)
        for made in (steady, shaken):
            made.guesses[predict] = Guess("2", 1)
        assert steady.verdict(predict) is not None and steady.score()[1] == 1
        assert shaken.verdict(predict) is None and shaken.score() == (0, 0)
        console = piped(80)
        draw_block(console, Verdict(predict), shaken)
        assert "It cannot tell." in written(console)


def test_a_predictions_condition_says_what_is_told_where_it_does_not_hold():
    text = (
        "# T\n\n```forge run a\nforge naive\n```\n\n```forge predict\nHow long?\n\nanswer: {{a.ms:ms}}\nif: a.steady\n"
    )
    assert any(isinstance(block, Predict) for block in parse_chapter(f"{text}else: No.\n```\n").blocks)
    with pytest.raises(ChapterError, match="'else: SENTENCE'"):
        parse_chapter(f"{text}```\n")
