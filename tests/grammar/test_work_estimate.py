"""How much work a grammar may be, by its text: more for what stands for more."""

import json

import pytest

from forge.engine.structured_output import StructuredOutput
from forge.grammar.work_estimate import estimate
from tests.grammar.test_sandbox import PRIMES, doubling

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "born": {"type": "integer"}}}
TREE = {"$defs": {f"n{i}": {"items": {"$ref": f"#/$defs/n{i + 1}"}} for i in range(9)}, "$ref": "#/$defs/n0"}
UUID = {"type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}


@pytest.mark.parametrize(
    "bomb",
    [
        doubling(20),
        PRIMES,
        StructuredOutput(regex="(.{1,40}[aeiou]){1,40}"),
        StructuredOutput(
            grammar="start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(20)) + '\nA20: "x"'
        ),
        StructuredOutput(grammar='root ::= (("a"{1,40} "b"){1,40} "c"){1,40}'),
        StructuredOutput(json='{"a":' * 600 + "1" + "}" * 600),
    ],
    ids=["doubling", "primes", "regex", "lark", "gbnf", "deep"],
)
def test_the_estimate_of_a_bomb_exceeds_that_of_an_ordinary_schema(bomb):
    ordinary = [estimate(StructuredOutput(json=schema)) for schema in (PERSON, TREE, UUID, {"multipleOf": 100})]
    assert estimate(bomb) > 2 * max(ordinary)


def beyond_text(**form) -> int:
    """What an estimate adds to the text's length, beyond what it adds to a text that stands for itself."""
    return _added(form) - _added({kind: "{}" if kind == "json" else "-" for kind in form})


def _added(form: dict) -> int:
    structured = StructuredOutput(**form)
    return estimate(structured) - len(getattr(structured, structured.kind))


def added_by_references(schema: dict) -> int:
    """What a schema's references add: without them another keyword stands in their place."""
    text = json.dumps(schema)
    return estimate(StructuredOutput(json=text)) - estimate(StructuredOutput(json=text.replace("$ref", "$rxf")))


N = {"$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    ("schema", "copied"),
    [
        ({"items": N}, 0),
        ({"anyOf": [N, N]}, 0),
        ({"allOf": [N]}, 2),
        ({"allOf": [N, N]}, 4),
        ({"allOf": [{"anyOf": [N]}]}, 2),
        ({"items": {**N, "minLength": 1}}, 2),
    ],
    ids=str,
)
def test_a_definition_that_is_joined_with_another_schema_counts_once_more_for_each_use(schema, copied):
    assert added_by_references({"$defs": {"n": {"type": "string"}}} | schema) == copied, "its two nodes each"


def test_a_copy_holds_the_copies_that_its_parts_need():
    pair = {"n": {"type": "string"}, "pair": {"allOf": [N, N]}}
    within = added_by_references({"$defs": pair})
    assert within == 4
    assert added_by_references({"$defs": pair, "allOf": [{"$ref": "#/$defs/pair"}]}) == within + 6 + 4


def test_of_equal_names_the_last_counts_and_a_part_of_itself_counts_nothing():
    reference = [{"$ref": "#/n"}]
    assert added_by_references({"x": {"n": []}, "y": {"n": [1, 2]}, "allOf": reference}) == 3
    assert added_by_references({"x": {"n": [1, 2]}, "y": {"n": []}, "allOf": reference}) == 1
    assert added_by_references({"n": {"allOf": reference}}) == 4


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "x"', 2),
        ('start: "x" "y"', 3),
        ('start: a a\na: "x" "y"', 7),
        ('start: a b\na: "x" "y"', 5),
        ('start ::= a a\na ::= "x" "y"', 7),
        ('start: "x"\n?a: "x" "y" "z"\n!b: "x"', 4),
        ('start: start "x"', 2),
    ],
    ids=str,
)
def test_a_grammar_counts_the_words_of_its_largest_rule_with_the_rules_copied_in(grammar, words):
    assert beyond_text(grammar=grammar) == words


@pytest.mark.parametrize(
    ("regex", "repetitions"),
    [
        ("ab", 0),
        ("a{9}", 9),
        ("(a{9})", 10),
        ("(a{9}){3}", 10 + 30),
        ("(ab)(cd){3}", 1 + 1 + 3),
        ("(a{9}){3}b{9}", 40 + 9),
        ("((a{9}){3}){9}", 41 + 41 * 9),
    ],
)
def test_repetitions_add_up_over_neighbours_and_multiply_where_they_are_nested(regex, repetitions):
    assert estimate(StructuredOutput(regex=regex)) == len(regex) + repetitions + 1, "no divisor counts as 1"


def test_repetitions_count_by_their_greatest_number_in_every_notation():
    assert beyond_text(regex="a{90}") == beyond_text(regex="a{12,90}") == beyond_text(regex="a{90}b)") == 90
    assert beyond_text(regex="a{90}b{8}") == 98
    ranges = [f'start: "a"{repetition}' for repetition in ("~ 90", "~ 12..90", "{90}")]
    assert {beyond_text(grammar=grammar) - beyond_text(grammar='start: "a" 9') for grammar in ranges} == {90}


def test_divisors_count_by_what_they_need_together():
    def of(*divisors: int) -> int:
        return beyond_text(json={"a": [{"multipleOf": divisor} for divisor in divisors]})

    assert of(6, 3) - of(1, 1) == 5 and of(6, 4) - of(1, 1) == 11 and of(9, 0) == of(9, 1)


def test_a_text_that_is_long_or_a_choice_counts_by_its_length():
    assert estimate(StructuredOutput(choice=["a{999}"])) < 100
    assert estimate(StructuredOutput(regex="a{999}" + "b" * 8187)) == 8193
    assert estimate(StructuredOutput(regex="a{999}" + "b" * 8186)) > 8192 + 999 - 1
