import pytest

from forge.book.measured import Unmeasured, evaluate, expressions_in, fill, names_in

MEASURED = {
    "climb": {"ms": 1.25, "share": 0.5, "tokens": 8640, "none": None, "items": [{"rows": 1}, {"rows": 8}]},
    "flat": {"ms": 0.05, "bytes": 804_864},
}


def test_facts_are_attributes_of_their_run():
    assert evaluate("climb.ms / flat.ms", MEASURED) == 25
    assert evaluate("climb.items[-1].rows", MEASURED) == 8
    assert evaluate("[item.rows for item in climb.items] == [1, 8]", MEASURED) is True
    assert evaluate("all(item.rows < climb.tokens for item in climb.items)", MEASURED) is True


@pytest.mark.parametrize(
    "expression", ["other.ms", "climb.other", "climb.none > 1", "climb.items[2].rows", "1 / 0", "int('x')", "len(1)"]
)
def test_what_cannot_be_worked_out_is_unmeasured(expression):
    with pytest.raises(Unmeasured):
        evaluate(expression, MEASURED)


def test_nothing_but_a_few_functions_is_in_reach():
    for expression in ("open('x')", "__import__('os')", "print(1)"):
        with pytest.raises(Unmeasured):
            evaluate(expression, MEASURED)


def test_placeholders_are_filled_in_their_format():
    text = "{{climb.ms:ms}} ms, {{climb.share:percent}}, {{climb.tokens:count}}, {{flat.bytes:size}}, {{climb.ms:.2f}}"
    assert fill(text, MEASURED) == "1.2 ms, 50 %, 8,640, 804.9 kB, 1.25"
    assert fill("{{climb.ms / flat.ms:times}} and {{climb.tokens}}", MEASURED) == "25.0 x and 8640"
    assert fill("{{climb.items[1].rows:count}} of {{max(climb.ms, flat.ms):.0f}}", MEASURED) == "8 of 1"


def test_what_was_not_measured_is_a_dash():
    assert (
        fill("{{other.ms:ms}} {{climb.none:ms}} {{climb.items:.1f}} { not } {one}", MEASURED) == "– – – { not } {one}"
    )


def test_the_names_that_an_expression_asks_for():
    assert names_in("max(climb.ms, flat.ms) > 1") == {"climb", "flat"}
    assert names_in("[item.rows for item in climb.items]") == {"climb"}
    assert expressions_in("a {{climb.ms:ms}} b {{flat.bytes}}") == ["climb.ms", "flat.bytes"]
