import pytest

from forge.book.measured import Unmeasured, check_expression, evaluate, expressions_in, fill, names_in

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
    "expression", ["other.ms", "climb.other", "climb.none > 1", "climb.items[2].rows", "1 / 0", "len(1)"]
)
def test_what_cannot_be_worked_out_is_unmeasured(expression):
    with pytest.raises(Unmeasured):
        evaluate(expression, MEASURED)


@pytest.mark.parametrize(
    "expression",
    [
        "open('x')",
        "climb.ms.hex()",
        "(lambda: 1)()",
        "climb.__class__",
        "2 ** 9999999",
        "f'{climb.ms}'",
        "climb.ms >",
        "x := 1",
    ],
)
def test_what_is_neither_comparison_nor_arithmetic_is_refused(expression):
    with pytest.raises(SyntaxError):
        check_expression(expression)
    with pytest.raises(SyntaxError):
        evaluate(expression, MEASURED)


def test_single_values_can_be_read_in_place_of_others():
    read = []

    def touch(path, value):
        read.append((path, value))
        return 10 * value if path[-1] == "rows" else value

    assert evaluate("climb.items[1].rows / climb.ms", MEASURED, touch) == 64
    assert read == [(("climb", "items", 1, "rows"), 8), (("climb", "ms"), 1.25)]
    assert fill("{{climb.items[1].rows}}", MEASURED, touch) == "80"


def test_placeholders_are_filled_in_their_format():
    text = "{{climb.ms:ms}} ms, {{climb.share:percent}}, {{climb.tokens:count}}, {{flat.bytes:size}}, {{climb.ms:.2f}}"
    assert fill(text, MEASURED) == "1.2 ms, 50 %, 8,640, 804.9 kB, 1.25"
    assert fill("{{climb.items[0].rows:plural row}}, {{climb.tokens:plural row}}", MEASURED) == "1 row, 8,640 rows"
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
