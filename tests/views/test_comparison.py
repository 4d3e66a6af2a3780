from dataclasses import replace

import numpy as np
import pytest

from forge.views.comparison import (
    ComparisonProgress,
    Side,
    compare_runs,
    comparison_object,
    comparison_screen,
    question_for,
    verdict,
)
from forge.views.forwards import curve_plot, shape_sentence
from forge.views.screen import draw
from tests.views.records import climbing, flat, piped, run_of, step, terminal, written


def logits_for(result, seed=0, size=16):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for _ in result.output.outputs[0].token_ids]


def side_of(name, result, logits=None):
    return Side(name, replace(result, logits=(tuple(logits_for(result) if logits is None else logits),)))


def comparison_of(left, right, left_logits=None, right_logits=None):
    return compare_runs(
        question_for("--kv"),
        "--kv",
        side_of("off", left, left_logits),
        side_of("on", right, right_logits),
    )


def shown(comparison, width=80):
    console = piped(width)
    draw(console, comparison_screen(comparison, "Once upon a time"))
    return written(console)


def test_equal_runs_are_identical_to_the_last_bit():
    comparison = comparison_of(climbing(8), flat(8))
    assert comparison.identical and comparison.first_difference is None
    assert comparison.logits.same_bits and comparison.logits.largest == 0 and comparison.logits.forwards == 8
    out = shown(comparison)
    assert "✓ identical: 8 tokens" in out and "last bit" in out


def test_equal_tokens_with_other_logits_name_the_largest_difference():
    left, right = climbing(8), flat(8)
    moved = logits_for(right)
    moved[5][3] += 0.25
    comparison = comparison_of(left, right, right_logits=moved)
    assert comparison.identical and not comparison.logits.same_bits
    assert comparison.logits.largest == pytest.approx(0.25, rel=1e-5) and comparison.logits.forward == 6
    assert "largest logit difference 0.25 (forward 6 of 8 compared)" in shown(comparison)


def test_a_negative_zero_is_not_the_same_bits():
    left, right = run_of([(4, 1.0)]), run_of([(4, 1.0)])
    zero = [np.zeros(4, np.float32)]
    comparison = comparison_of(left, right, zero, [-zero[0]])
    assert comparison.logits.largest == 0 and not comparison.logits.same_bits


def test_logits_are_compared_only_while_both_sides_saw_the_same_tokens():
    left, right = flat(8), flat(8)
    other = run_of([(4, 1.9), *[(1, 0.6)] * 7], token_ids=(101, 102, 999, 104, 105, 106, 107, 108))
    moved = [logits + 100 * (index > 2) for index, logits in enumerate(logits_for(right))]
    comparison = comparison_of(left, other, logits_for(left), moved)
    assert not comparison.identical and comparison.first_difference == 3
    assert comparison.logits.forwards == 3 and comparison.logits.largest == 0


def test_differing_tokens_are_shown_where_they_begin():
    other = run_of([(4, 1.9), *[(1, 0.6)] * 7], token_ids=(101, 102, 999, 104, 105, 106, 107, 108))
    lines = [line.plain for line in verdict(comparison_of(flat(8), other))]
    assert lines[0].startswith("✗ the tokens differ from output token 3 on")
    assert "(p 0.500)" in lines[1] and "(p 0.500)" in lines[2]


def differing_at(position: int, *, margin: float, moved: float):
    """Two runs whose logits are `moved` apart, and whose tokens part at a decision with that margin on either side."""
    left, right = (run_of([(4, 1.0)] + [(1, 1.0)] * 3, token_ids=(1, 2, 3, last)) for last in (4, 5))
    ours, theirs = logits_for(left), logits_for(right)
    for logits, chosen, other in ((ours, 4, 5), (theirs, 5, 4)):
        logits[position - 1][chosen], logits[position - 1][other] = 9, 9 - margin
    for logits in theirs:
        logits[0] += moved
    return comparison_of(left, right, ours, theirs)


def test_a_token_that_differs_is_reported_with_its_margin():
    clear = differing_at(4, margin=2.5, moved=0.01)
    assert clear.first_difference == 4 and clear.margin.token_ids == (4, 5)
    assert clear.margin.margins == pytest.approx((2.5, 2.5))
    out = shown(clear)
    assert not clear.margin.is_near_tie
    assert "✗ the tokens differ" in out and "apart by 2.5 on either side" in out
    assert comparison_object(clear)["margin"]["apart"] == pytest.approx(2.5)


def test_a_margin_within_what_the_logits_differ_by_anyway_is_a_near_tie():
    close = differing_at(4, margin=0.015, moved=0.01)
    assert comparison_object(close)["margin"]["near_tie"]
    assert "a near tie: the two tokens' logits are apart by 0.015 on either side" in shown(close)
    assert not close.identical


def test_a_run_that_ended_sooner_differs_where_it_ended():
    comparison = comparison_of(flat(8), flat(5))
    assert not comparison.identical and comparison.first_difference == 6
    assert "5 tokens, then length" in verdict(comparison)[2].plain


def test_other_vocabularies_are_not_held_against_each_other():
    left, right = flat(3), flat(3)
    comparison = comparison_of(left, right, logits_for(left, size=16), logits_for(right, size=32))
    assert comparison.logits is None and "logits not compared" in shown(comparison)


def test_a_logit_that_is_not_a_number_counts_as_a_difference():
    left, right = flat(3), flat(3)
    broken = logits_for(right)
    broken[1][0] = np.nan
    comparison = comparison_of(left, right, right_logits=broken)
    assert not comparison.logits.same_bits and comparison.logits.forward == 2


def test_the_table_has_every_figure_of_both_sides():
    out = shown(comparison_of(climbing(32), flat(32)))
    for name in ("time to first token", "decode", "last / second forward", "tokens computed", "KV held"):
        assert name in out
    assert "624" in out and "35" in out
    assert "11.0 x" in out and "1.0 x" in out  # 16.5 ms over 1.5 ms, 0.6 over 0.6


def test_the_shapes_are_named_as_measured():
    assert shape_sentence(climbing(32).forwards) == "climbs: every forward recomputes the whole sequence"
    assert shape_sentence(flat(32).forwards) == "flat: every forward computes one token"
    assert "too few" in shape_sentence(flat(2).forwards)


def test_a_slow_prefill_does_not_make_a_curve_flat_or_steep():
    slow = run_of([(4, 100.0), *[(1, 1.0)] * 20])
    assert shape_sentence(slow.forwards).startswith("flat")
    plot = [line.plain for line in curve_plot(["on"], [slow.forwards], 21, 80)]
    assert plot[0].lstrip().startswith("1.0")
    assert "1 forward cut off, the longest 100.0 ms" in plot[-1]


def test_a_climbing_curve_is_not_cut():
    plot = [line.plain for line in curve_plot(["a", "b"], [climbing(32).forwards, flat(32).forwards], 32, 80)]
    assert plot[0].lstrip().startswith("16.5") and "cut" not in plot[-1]


def test_a_spike_is_cut_and_counted():
    spiky = run_of([(4, 1.0), *[(1, 50.0 if index % 15 == 7 else 1.0) for index in range(30)]])
    plot = [line.plain for line in curve_plot(["on"], [spiky.forwards], 31, 80)]
    assert plot[0].lstrip().startswith("1.0") and "2 forwards cut off, the longest 50.0 ms" in plot[-1]


def test_a_busy_machine_is_not_mistaken_for_a_technique():
    noisy = run_of([(4, 1.0), *[(1, 1.0 + 0.2 * index) for index in range(20)]])
    assert shape_sentence(noisy.forwards).startswith("climbs, although every forward computes one token")


@pytest.mark.parametrize("width", [40, 60, 80, 96, 140])
def test_the_whole_picture_fits_its_width(width):
    out = shown(comparison_of(climbing(64), flat(64)), width)
    assert max(map(len, out.splitlines())) <= width
    assert "\x1b" not in out


def test_curves_carry_their_names_where_they_end():
    plot = [line.plain for line in curve_plot(["off", "on"], [climbing(32).forwards, flat(32).forwards], 32, 80)]
    assert plot[0].endswith(" off")
    assert any(line.endswith(" on") for line in plot)


def test_long_values_are_shortened_in_the_picture():
    result = flat(4)
    side = side_of("models/" + "x" * 200 + ".gguf", result)
    out = shown(compare_runs(question_for("--model"), "--model", side, replace(side, name="tales")))
    assert max(map(len, out.splitlines())) <= 80


def test_the_json_object_has_the_verdict_and_both_sides():
    found = comparison_object(comparison_of(climbing(4), flat(4)))
    assert found["option"] == "--kv" and found["identical"] is True and found["largest_logit_difference"] == 0
    assert [side["value"] for side in found["sides"]] == ["off", "on"]
    assert found["sides"][0]["last_over_second_forward"] == pytest.approx(2.5 / 1.5)


def test_progress_is_drawn_on_a_terminal_and_nowhere_else():
    for console, expected in ((piped(), False), (terminal(), True)):
        with ComparisonProgress(console, "Why?", ["off", "on"], 8) as progress:
            for number in range(1, 5):
                progress.step_of(0, step(number, 1, 60.0))
        assert bool(written(console)) is expected


def test_an_unknown_option_has_a_question_too():
    assert "--spec-k" in question_for("--spec-k")
