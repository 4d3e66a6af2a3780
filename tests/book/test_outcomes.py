"""Every outcome is found and rendered with facts that lead to it."""

import pytest

from chapters.outcomes import Rendered, print_outcomes, render_outcomes
from forge.book.chapter import parse_chapter
from tests.views.records import piped, written

RUN = "```forge run a\nforge naive\n```\n"
MEASURED = {"a": {"ms": 4.0, "tokens": 12, "kind": "paged", "same": True, "items": [{"n": 1}, {"n": 2}], "share": 0.5}}


def rendered(directive: str) -> list[Rendered]:
    return render_outcomes(parse_chapter(f"# T\n\n{RUN}\n```forge {directive}\n```\n"), MEASURED)


def test_each_outcome_is_rendered_with_facts_under_which_it_is_said():
    low, high, other = rendered(
        "predict\nHow long?\n\nanswer: {{a.ms:.1f}}\n"
        "when: answer < 1\nLow.\nwhen: answer > 300\nHigh.\notherwise: Middle."
    )
    assert low.question == "How long?" and low.condition == "answer < 1" and other.condition == "otherwise"
    assert float(low.text.split()[2].rstrip(".")) <= 1 and low.text.endswith("Low.")
    assert float(high.text.split()[2].rstrip(".")) > 300 and other.text == "It is 4.0. Middle."


@pytest.mark.parametrize(
    "condition",
    [
        "a.tokens == 0",
        "a.tokens > 1000 and a.ms < 1",
        "a.kind == 'basic'",
        "a.kind != 'paged'",
        "not a.same",
        "a.ms < 3 and not a.same or a.tokens == 40",
        "a.items[0].n > a.items[1].n",
        "all(item.n > 5 for item in a.items)",
        "a.tokens == a.items[1].n",
        "abs(a.share - 0.9) < 0.05",
    ],
)
def test_conditions_of_many_kinds_are_led_to(condition):
    assert [one.text for one in rendered(f"finding\nwhen: {condition}\nSo.\notherwise: Not so.")] == ["So.", "Not so."]


def test_an_outcome_that_no_facts_lead_to_is_told():
    outcomes = rendered("finding\nwhen: a.ms > 1\nA.\nwhen: a.ms > 2\nB.\notherwise: C.")
    assert [one.text for one in outcomes] == ["A.", None, "C."]
    console = piped(80)
    print_outcomes(console, outcomes)
    assert "when a.ms > 2\n  no facts were found that lead to it" in written(console)


def test_choices_and_claims_are_rendered_too():
    choices = rendered("predict\nWhich?\n\n- slow, if a.ms > 9\n  So.\n- fast, otherwise\n- red, never\nwhy: Always.")
    assert [one.text for one in choices] == ["It is 1, slow. So. Always.", "It is 2, fast. Always."]
    claims = rendered("expect\nSlow.\n    a.ms > 9\notherwise: Only {{a.ms:ms}} ms.")
    assert [one.text for one in claims] == ["Slow.", "Only 4.0 ms."]
