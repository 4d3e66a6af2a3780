"""What is compiled, what is refused and how, and that neither can be made to take long."""

import json

import pytest

from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.grammar import compiler as compiler_module
from forge.grammar.compiler import GrammarCompiler, check_size


def says(compiler, tokenizer, structured: StructuredOutput, text: str) -> bool:
    """Whether `text` may be the whole output."""
    matcher = compiler(structured).new_matcher()
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_token_ids)]
    return matcher.num_allowed([], token_ids) == len(token_ids)


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (StructuredOutput(regex=r"(a|b)+c[0-9]{2}"), "abbac12", "abbac1"),
        (StructuredOutput(regex=r"[^x]*"), 'ünï "quoted" 🦊\n', "max"),
        (StructuredOutput(choice=['ye"s', "n\\o\n", "déjà"]), "n\\o\n", "déj"),
        (StructuredOutput(choice=["<|im_end|>", "/a/", "{}"]), "<|im_end|>", "a"),
        (StructuredOutput(grammar='start: "x" num\nnum: /[0-9]+/'), "x12", "x"),
        (StructuredOutput(grammar='root ::= "it is " ("good" | "bad")'), "it is bad", "it is"),
        (StructuredOutput(json={"type": "integer", "minimum": 3}), "12", "2"),
        (StructuredOutput(json={"type": "number", "exclusiveMinimum": 5, "maximum": 6}), "5.5", "5"),
        (StructuredOutput(json={}), '{"a": [1, null, "x"]}', "{a}"),
        (StructuredOutput(json='{"enum": ["happy", 1]}'), '"happy"', '"sad"'),
    ],
    ids=str,
)
def test_the_whole_output_is_what_the_grammar_says(compiler, tokenizer, structured, good, bad):
    assert says(compiler, tokenizer, structured, good)
    assert not says(compiler, tokenizer, structured, bad)


def test_json_is_written_as_json_dumps_writes_it(compiler, tokenizer):
    structured = StructuredOutput(json={"type": "object"})
    value = {"name": "Mia", "friends": ["fox", "owl"], "age": {"years": 7}}
    assert says(compiler, tokenizer, structured, json.dumps(value))
    assert not says(compiler, tokenizer, structured, json.dumps(value, indent=2))


@pytest.mark.parametrize(
    ("structured", "named"),
    [
        (StructuredOutput(json={"type": "array", "uniqueItems": True}), "uniqueItems: not supported"),
        (StructuredOutput(json={"not": {"type": "string"}}), "not: not supported"),
        (StructuredOutput(json={"if": {}, "then": {}}), "if, then: not supported"),
        (StructuredOutput(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "take anyOf"),
        (StructuredOutput(json={"type": "string", "format": "banana"}), "banana"),
        (StructuredOutput(json={"type": "banana"}), "banana"),
        (StructuredOutput(json={"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}), "exclusive bound"),
        (StructuredOutput(json={"allOf": [{"exclusiveMinimum": 5}, {"maximum": 5.5}]}), "exclusive bound"),
        (StructuredOutput(json={"$ref": "http://example.com/x"}), "example.com"),
        (StructuredOutput(json={"enum": []}), "nsatisfiable"),
        (StructuredOutput(regex="(a"), "regular expression is refused"),
        (StructuredOutput(regex="(?=a)b"), "look-ahead"),
        (StructuredOutput(grammar="start: missing"), "missing"),
        (StructuredOutput(grammar="\x00"), "grammar is refused"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name_in_one_line(compiler, structured, named):
    with pytest.raises(UsageError, match="is refused") as caught:
        compiler(structured)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def deep(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(regex="(a{1000}){1000}"),
        StructuredOutput(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        StructuredOutput(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
        StructuredOutput(grammar="start: start"),
        StructuredOutput(json={"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        StructuredOutput(json={"type": "integer", "multipleOf": 999_999_937}),
        StructuredOutput(
            json={"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(10)]} for i in range(12)]}
        ),
        StructuredOutput(choice=["a" * (1 << 16), "b"]),
        StructuredOutput(json={"enum": ["x" * 100_000]}),
        StructuredOutput(grammar="start: " + " | ".join(f'"{number}" start' for number in range(20_000))),
    ],
    ids=lambda structured: structured.kind,
)
def test_a_hostile_grammar_is_refused(compiler, structured):
    with pytest.raises(UsageError):
        compiler(structured)


def test_a_schema_nested_too_deeply_is_refused(compiler):
    with pytest.raises(UsageError):
        compiler(StructuredOutput(json=deep(700)))


def test_a_grammar_has_65_536_characters_at_most():
    check_size(StructuredOutput(choice=["a" * 65_536]))
    with pytest.raises(UsageError, match="at most 65536 characters, and this one has 65537"):
        check_size(StructuredOutput(choice=["a" * 65_536, "b"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of json, regex, choice and grammar, got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"regex": 3}, "regex must be text"),
        ({"choice": []}, "one or more texts"),
        ({"choice": ""}, "one or more texts"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"json": "{"}, "no JSON"),
    ],
    ids=str,
)
def test_exactly_one_sound_form_is_given(given, words):
    with pytest.raises(UsageError, match=words):
        StructuredOutput(**given)


def test_a_schema_is_an_object():
    for schema in ("true", "[]", "1"):
        with pytest.raises(UsageError, match="object"):
            StructuredOutput(json=schema)


def test_equal_grammars_are_compiled_once_and_few_are_kept(tokenizer, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    first = compiler(StructuredOutput(json={"type": "integer"}))
    assert compiler(StructuredOutput(json='{ "type" : "integer" }')) is first
    compiler(StructuredOutput(regex="a"))
    assert compiler(StructuredOutput(json={"type": "integer"})) is first
    compiler(StructuredOutput(regex="b"))
    compiler(StructuredOutput(regex="c"))
    assert compiler(StructuredOutput(json={"type": "integer"})) is not first
