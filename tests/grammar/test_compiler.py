"""What is compiled, what is refused and how, and that neither can be made to take long."""

import inspect
import json
import sys

import numpy as np
import pytest

from forge.engine.structured_output import MatcherError, StructuredOutput
from forge.errors import UsageError
from forge.grammar import compiler as compiler_module
from forge.grammar.compiler import GrammarCompiler, check_size, compile_grammar, tool_call_grammar, without_gbnf
from forge.grammar.vocabulary import Vocabulary, ll_tokenizer
from forge.tokenizer.byte_tokenizer import ByteTokenizer


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
        (StructuredOutput(json={"type": "number", "minimum": 5, "exclusiveMinimum": True, "maximum": 6}), "5.5", "5"),
        (
            StructuredOutput(json={"type": "number", "minimum": 0.5, "exclusiveMinimum": False, "maximum": 1}),
            "0.5",
            "2",
        ),
        (StructuredOutput(json={"allOf": [{"type": "integer", "exclusiveMinimum": 5, "maximum": 9}]}), "6", "5"),
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
        (StructuredOutput(json={"minimum": 5, "exclusiveMinimum": True, "maximum": 5.5}), "exclusive bound"),
        (StructuredOutput(json={"minimum": 3, "exclusiveMinimum": 5, "maximum": 5.5}), "exclusive bound"),
        (StructuredOutput(json={"minimum": 5, "exclusiveMaximum": 5.5, "maximum": 9}), "exclusive bound"),
        (StructuredOutput(json={"anyOf": [{}, {"exclusiveMaximum": 5.5, "minimum": 5}]}), "exclusive bound"),
        (StructuredOutput(json={"properties": {"a": {}, "b": {"exclusiveMaximum": 1, "minimum": 0.5}}}), "exclusive"),
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


def test_what_is_nested_too_deeply_is_refused(compiler, monkeypatch):
    with pytest.raises(UsageError, match="nested too deeply: make it simpler"):
        StructuredOutput(json=deep(2000))
    with pytest.raises(UsageError, match="nested too deeply: make it simpler"):
        compiler(StructuredOutput(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000))
    structured, limit = StructuredOutput(json=deep(400)), sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 300)
    try:
        with pytest.raises(UsageError, match="nested too deeply: make it simpler"):
            compiler(structured)
    finally:
        sys.setrecursionlimit(limit)


def test_gbnf_is_translated_and_everything_else_stays():
    grammar = StructuredOutput(grammar='root ::= "a" | "b"')
    translated = without_gbnf(grammar)
    assert translated.grammar.startswith("%llguidance") and "root" not in translated.grammar.splitlines()[0]
    for structured in (translated, StructuredOutput(regex="a|b"), StructuredOutput(grammar='start: "a"')):
        assert without_gbnf(structured) is structured or without_gbnf(structured) == structured
    with pytest.raises(UsageError, match="the grammar is refused"):
        without_gbnf(StructuredOutput(grammar="root ::= ("))


def test_a_grammar_is_walked_before_it_is_taken():
    """Two tokens far: what no token of the vocabulary can write there is refused at once, and not in a step."""
    tokens = [bytes([byte]) if byte != ord("z") else b"" for byte in range(256)]
    vocabulary = Vocabulary([*tokens, b"</s>"], [256], frozenset({256}))
    library = ll_tokenizer(vocabulary)
    for text in ("z", "az", "abz"):
        with pytest.raises(UsageError, match="no token of this model's vocabulary"):
            compile_grammar(StructuredOutput(regex=text), library, vocabulary)
    grammar = compile_grammar(StructuredOutput(regex="abcz"), library, vocabulary)
    with pytest.raises(MatcherError, match="no token of this model's vocabulary"):
        grammar.new_matcher().mask(list(b"abc"))


def test_the_states_of_a_grammar_are_limited(monkeypatch):
    """Below what the library allows by itself."""

    def num_tokens() -> int:
        matcher, output = GrammarCompiler(ByteTokenizer(), 259)(structured).new_matcher(), []
        with pytest.raises(MatcherError, match="more work"):
            while True:
                output.append(int(np.flatnonzero(matcher.mask(output))[0]))
        return len(output)

    structured = StructuredOutput(regex="a([ab]{0,99}a[ab]{0,50}){40,50}")
    limited = num_tokens()
    monkeypatch.setattr(compiler_module, "_LIMITS", {})
    assert limited < num_tokens() / 2


ARGUMENTS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FUNCTIONS = [("count", ARGUMENTS), ("stop", {"type": "object", "additionalProperties": False})]
COUNT = '<tool_call>\n{"name": "count", "arguments": {"n": 3}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
WRONG = ['<tool_call>\n{"name": "stop", "arguments": {"n": 3}}\n</tool_call>', COUNT.replace(": 3", ":3"), COUNT[:-1]]
ANSWER = '{"n": 7}'


@pytest.mark.parametrize("parallel", [False, True], ids=["one-call", "parallel"])
@pytest.mark.parametrize(
    ("required", "answer", "good", "bad"),
    [
        (True, None, [COUNT, STOP], ["", "text", "text" + COUNT, COUNT + "text", *WRONG]),
        (True, ARGUMENTS, [COUNT, STOP], ["", ANSWER, *WRONG]),
        (False, ARGUMENTS, [COUNT, STOP, ANSWER], ["", "text", '{"m": 7}', '{"n":7}', ANSWER + COUNT, *WRONG]),
        (False, None, ["", "text\n", "text" + COUNT, COUNT], [f"text{wrong}" for wrong in WRONG]),
    ],
    ids=["required", "required-with-answer", "answer", "text"],
)
def test_what_a_model_with_tools_may_write(compiler, tokenizer, parallel, required, answer, good, bad):
    grammar = tool_call_grammar(FUNCTIONS, required=required, parallel=parallel, answer=answer)
    structured = StructuredOutput(grammar=grammar)
    for text in good:
        assert says(compiler, tokenizer, structured, text), text
    for text in bad:
        assert not says(compiler, tokenizer, structured, text), text
    two = f"{COUNT}\n{STOP}"
    assert says(compiler, tokenizer, structured, two) == parallel
    assert not says(compiler, tokenizer, structured, f"{COUNT}\n{WRONG[0]}")
    assert not says(compiler, tokenizer, structured, f"{COUNT}\n{ANSWER}") or not (required or answer)


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
    assert compiler(StructuredOutput(json={"type": "integer"})) is first, "the one used last stays"
    compiler(StructuredOutput(regex="c"))
    compiler(StructuredOutput(regex="d"))
    assert compiler(StructuredOutput(json={"type": "integer"})) is not first
    assert compiler.load() is compiler.load()


def test_a_grammar_whose_states_are_used_up_is_compiled_again(compiler):
    structured = StructuredOutput(regex="[ab]c")
    grammar = compiler(structured)
    assert compiler(structured) is grammar
    grammar.is_spent = True
    assert compiler(structured) is not grammar
    assert compiler(structured) is compiler(structured)
