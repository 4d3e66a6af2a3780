import pytest

from forge.book.chapter import Choice, Claim, Predict, Run, parse_chapter
from forge.book.reading import Guess, Reading, closeness, parse_guess
from forge.errors import UsageError
from forge.views.report import Report

RUN = Run("a", "forge naive --only run")
HOW_LONG = Predict("How long?", "{{a.ms:ms}}", (), "")
SHARE = Predict("Which part?", "{{a.share:percent}}", (), "")
HOW_MANY = Predict("How many bytes?", "{{a.bytes:size}}", (), "")
WHICH = Predict("Which?", "", (Choice("slow", "a.ms > 10"), Choice("fast", "a.ms <= 10")), "")


def reading(**facts) -> Reading:
    chapter = parse_chapter(f"# T\n\n```forge run a\n{RUN.command}\n```\n")
    made = Reading(chapter, lambda command: Report(facts, lambda console: None))
    made.perform(RUN)
    return made


def test_what_a_run_found_is_known_by_its_name():
    assert reading(ms=4.0).fill("{{a.ms:ms}}") == "4.0"


def test_a_run_that_fails_leaves_what_was_known():
    made = reading(ms=4.0)

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
        (HOW_LONG, "4x", 4),
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


@pytest.mark.parametrize(("predict", "text"), [(HOW_LONG, "many"), (HOW_LONG, ""), (WHICH, "3"), (WHICH, "x")])
def test_what_is_no_guess_is_refused(predict, text):
    with pytest.raises(UsageError):
        parse_guess(predict, text)


@pytest.mark.parametrize(
    ("guess", "actual", "expected"),
    [
        (4, 4, "exactly"),
        (4.1, 4, "on the mark"),
        (3, 4, "close, a little low"),
        (5, 4, "close, a little high"),
        (40, 4, "too high, by a factor of 10.0"),
        (1, 4, "too low, by a factor of 4.0"),
        (-1, 4, "too low"),
        (1, 0, "too high"),
    ],
)
def test_how_close_a_guess_was(guess, actual, expected):
    assert closeness(guess, actual) == expected


def test_a_verdict_says_the_answer_and_how_close_the_guess_was():
    made = reading(ms=4.0)
    assert made.verdict(HOW_LONG) == "It is 4.0."
    made.guesses = {HOW_LONG: Guess("8", 8.0), WHICH: Guess("1", 0)}
    assert made.verdict(HOW_LONG) == "It is 4.0. You said 8: too high, by a factor of 2.0."
    assert made.verdict(WHICH) == "It is 2, fast. You said 1."
    made.guesses[WHICH] = Guess("2", 1)
    assert made.verdict(WHICH) == "It is 2, fast. You said 2, too."


def test_a_run_that_does_not_tell_gives_no_verdict():
    made = reading(ms=None)
    assert made.verdict(HOW_LONG) is None and made.verdict(WHICH) is None
    assert reading().verdict(HOW_LONG) is None


def test_claims_hold_or_do_not_or_cannot_be_told():
    claims = [Claim("", "a.ms > 1"), Claim("", "a.ms > 10"), Claim("", "a.other")]
    assert [judged.holds for judged in reading(ms=4.0).judge(claims)] == [True, False, None]
