"""The acceptance view, on runs made by hand: what was kept, why the rest was not, and what was gained."""

from dataclasses import replace

import pytest

from forge.experiments.speculation import (
    LiveSpeculation,
    SpeculationResult,
    cycle_line,
    decision_sentence,
    decisions_told,
    marked_text,
    screen,
    speculation_object,
    steps_of,
)
from forge.trace.records import ItemRecord, SpecCycle, SpecDecision, StepRecord, TokenRecord, TokenVerdict, Undrafted
from forge.trace.speculation_summary import SpeculationSummary
from forge.views.json_output import to_json
from forge.views.screen import draw
from tests.views.records import piped, run_of, step, terminal, written

TEXTS = {1: " there", 2: " was", 3: " a", 4: " small", 5: " fox", 6: " tall", 7: " old"}
ON = SpecDecision(4, "wins", 1.8, 0.8)
OFF = SpecDecision(0, "loses", 0.7, 0.1, retry_in=16)


def drafting(
    number: int, proposed: tuple[int, ...], accepted: int, own: int, *, then: SpecDecision = ON, **verdict
) -> StepRecord:
    """A step that verifies `proposed`, keeps the first `accepted`, and adds the target's `own` token."""
    judged = proposed[: accepted + 1]
    verdicts = tuple(
        TokenVerdict(token_id, index < accepted, own if index == accepted else token_id, 0.25, **verdict)
        for index, token_id in enumerate(judged)
    )
    said = (*proposed[:accepted], own)
    plain = step(number, 1, 0.4)
    return replace(
        plain,
        items=(ItemRecord(7, "decode", 9, 1, 0, len(proposed)),),
        tokens=tuple(TokenRecord(7, 9 + index, token_id, TEXTS[token_id], 0.5) for index, token_id in enumerate(said)),
        cycles=(SpecCycle(7, "little", 9, proposed, verdicts, said, 0.2, 0.4, ON, then),),
    )


def result(*steps: StepRecord, sampled: bool = False, **changes) -> SpeculationResult:
    prefill = step(1, 4, 2.0)
    drafted = replace(run_of([(4, 2.0)]), records=(prefill, *steps), sampled=sampled)
    plain = run_of([(4, 2.0)] + [(1, 0.3)] * 9)
    fields = {"proposers": ("little",), "drafted": drafted, "plain": plain, "token_text": TEXTS.__getitem__}
    return SpeculationResult(**(fields | changes))


def test_the_text_shows_what_was_kept_what_fell_and_what_the_target_said():
    steps = steps_of([drafting(2, (1, 2, 6), 2, 3), drafting(3, (4, 5), 2, 7)])

    assert marked_text(steps, TEXTS.__getitem__).plain == "[ there was] ~tall~ a[ small fox] old"


def test_a_cycle_says_why_the_run_ended_where_it_did():
    (mismatch,) = steps_of([drafting(2, (1, 2, 6), 2, 3)])
    (whole,) = steps_of([drafting(2, (1, 2), 2, 3)])
    (drawn,) = steps_of([drafting(2, (6, 2), 0, 3, p=0.1, q=0.5, draw=0.73)])
    (looked_up,) = steps_of([drafting(2, (6, 2), 0, 3, p=0.1, q=1.0, draw=0.73)])

    def line(one):
        return cycle_line(1, one, TEXTS.__getitem__).plain

    assert 'there was ~tall~  2 of 3  the target says " a" (p 0.50), not " tall" (p 0.25)' in line(mismatch)
    assert '2 of 2  and the target adds " a" (p 0.50)' in line(whole)
    assert '" tall" is rejected (kept below 0.10 / 0.50, it drew 0.73); drawn instead: " a"' in line(drawn)
    assert 'the target draws " a" (p 0.50), not " tall" (p 0.10)' in line(looked_up)
    assert line(mismatch).endswith("0.20 + 0.40 ms")


def test_a_text_that_ends_in_a_run_is_said_to():
    record = drafting(2, (1, 2, 3), 3, 4)
    record = replace(record, tokens=record.tokens[:2])
    (ended,) = steps_of([record])

    assert "the text ended in it" in cycle_line(1, ended, TEXTS.__getitem__).plain
    assert marked_text([ended], TEXTS.__getitem__).plain == "[ there was]"


def test_switching_off_and_on_is_told_with_its_reason():
    again = SpecDecision(4, "on_again", 1.7, 0.4)
    records = [drafting(2, (1, 6), 0, 3, then=OFF), step(3, 1, 0.3), drafting(4, (1,), 1, 3, then=again)]

    assert decisions_told(steps_of(records)) == [
        "after step 1: switched off (acceptance 10 %, predicted 0.7 x); it is tried again in 16 tokens",
        "after step 3: on again with 4 draft tokens a cycle (acceptance 40 %, predicted 1.7 x)",
    ]


def test_one_that_never_begins_is_told_too():
    never = SpecDecision(0, "cannot_win", 0.4, None, retry_in=64)
    record = replace(step(2, 1, 0.3), undrafted=(Undrafted(7, "off", 64, never),))

    (told,) = decisions_told(steps_of([record]))
    assert "even draft tokens that are all accepted would not pay" in told and "64 tokens" in told


@pytest.mark.parametrize("reason", ["fixed", "wins", "turned_down", "loses", "probes", "on_again", "cannot_win"])
def test_every_reason_has_its_sentence(reason):
    assert decision_sentence(SpecDecision(2, reason, 1.2, 0.5))


@pytest.mark.parametrize("width", [80, 96, 140])
def test_the_screen_has_the_figures_and_is_not_too_wide(width):
    console = piped(width)
    draw(console, screen(result(*[drafting(number, (1, 2, 6), 2, 3) for number in range(2, 20)]), "Once"))
    text = written(console)

    assert max(map(len, text.splitlines())) <= width
    for expected in (
        "Which draft tokens did the target accept?",
        "accepted by position",
        "100 %",
        "α 0.67",
        "tokens per cycle 3.0",
        "speed-up predicted",
        "measured",
        "The formula takes a verification for one forward; of 4.0 rows it took 1.33",
        "… and 8 cycles more",
    ):
        assert expected in text
    assert "\x1b" not in text


def test_a_revoked_draft_is_told_with_the_time_to_its_release():
    error = "the lease of the draft model was revoked: it can no longer be used"
    lost = SpecCycle(7, "little", 9, (), (), (3,), 0.0, 0.3, ON, won=False, error=error, release_ms=0.2)
    records = (drafting(2, (1, 2), 2, 3), replace(step(3, 1, 0.3), cycles=(lost,)))
    console = piped(140)
    draw(console, screen(result(*records, release_ms=0.118), "Once"))

    assert f"step 3: {error}; released 0.12 ms after that. The target goes on without little." in written(console)


def test_control_characters_in_tokens_do_not_reach_the_terminal():
    nasty = {1: "\x1b[2J", 2: "\x07", 3: " a"}
    console = piped()
    record = drafting(2, (1, 2), 1, 3)
    record = replace(record, tokens=tuple(replaced(token, nasty[token.token_id]) for token in record.tokens))
    draw(console, screen(result(record, token_text=nasty.__getitem__), "Once"))

    assert "\x1b" not in written(console) and "\x07" not in written(console)


def replaced(token: TokenRecord, text: str) -> TokenRecord:
    return token._replace(text=text)


def test_without_any_guess_there_are_no_figures():
    console = piped()
    draw(console, screen(result(step(2, 1, 0.3)), "Once"))

    assert "no draft tokens were proposed: no figures" in written(console)


def test_as_json_nothing_is_rounded_and_every_cycle_is_there():
    found = speculation_object(result(drafting(2, (1, 2, 6), 2, 3), drafting(3, (4, 5), 2, 7)))

    assert to_json(found)
    assert (found["acceptance"], found["num_cycles"], found["accepted_by_position"]) == (0.8, 2, [1.0, 1.0, 0.0])
    assert [cycle["emitted"] for cycle in found["cycles"]] == [[1, 2, 3], [4, 5, 7]]
    assert found["cycles"][0]["verdicts"][2]["accepted"] is False


def test_the_live_view_leaves_nothing_behind():
    console = terminal()
    with LiveSpeculation(console, "Once", TEXTS.__getitem__) as view:
        for number in range(2, 6):
            view.step(drafting(number, (1, 2, 6), 2, 3))
    text = written(console)

    assert "accepted so far" in text
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[2K" in text


# What cycles add up to


def test_the_formula_with_the_verification_as_measured():
    found = result(drafting(2, (1, 2, 6, 7), 2, 3), drafting(3, (1, 2, 3, 4), 4, 7)).summary

    assert found.accepted_by_position == ((2, 2), (2, 2), (1, 2), (1, 2))
    assert found.acceptance == 6 / 8
    assert found.alpha == 6 / 7, "one draft token stands behind a rejected one"
    assert found.tokens_per_cycle == 4
    assert found.draft_cost == pytest.approx(0.05 / 0.3)
    assert found.verify_cost == pytest.approx(0.4 / 0.3)
    assert found.predicted == pytest.approx((3 + 1) / (1 + 4 * 0.05 / 0.3))
    assert found.predicted_with_verification == pytest.approx((3 + 1) / (0.4 / 0.3 + 4 * 0.05 / 0.3))


def test_a_run_without_cycles_adds_up_to_nothing():
    plain = run_of([(4, 2.0), (1, 0.3)]).records

    assert SpeculationSummary.of(plain, plain) is None
