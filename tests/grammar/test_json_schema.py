"""What of JSON Schema is claimed: the suite's cases and random schemas, on a model without sense.

`json_schema_suite.json.gz` has the cases of the JSON Schema test-suite for draft 2020-12 (MIT license, Copyright 2012
Julian Berman, as distributed with jsonschema 4.26.0): of each its keyword, description, schema and
instances.
"""

import gzip
import json
from pathlib import Path
from random import Random

import jsonschema
import pytest

from forge import LLM, SamplingParams, StructuredOutput
from forge.errors import UsageError
from forge.grammar.compiler import GrammarCompiler
from forge.tokenizer.byte_tokenizer import VOCAB_SIZE, ByteTokenizer

CASES = json.loads(gzip.decompress(Path(__file__).with_name("json_schema_suite.json.gz").read_bytes()))["cases"]
CLAIMED = {
    *("additionalProperties", "allOf", "anchor", "anyOf", "const", "default", "enum", "exclusiveMaximum"),
    *("exclusiveMinimum", "format", "infinite-loop-detection", "items", "maxItems", "maxLength", "maxProperties"),
    *("maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "oneOf", "pattern"),
    *("patternProperties", "prefixItems", "properties", "ref", "required", "type", "content"),
}
REFUSED = {
    *("contains", "dependentRequired", "dependentSchemas", "if-then-else", "maxContains", "minContains", "not"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
}
"""Keywords of which no case is taken."""
REFERRING = {"defs", "dynamicRef", "refRemote", "vocabulary"}
"""About schemas that lie elsewhere, which are refused too."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(), VOCAB_SIZE)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("hash", kv="paged", num_blocks=512, max_num_seqs=32)


def compiled(compiler: GrammarCompiler, schema: dict) -> bool:
    try:
        compiler(StructuredOutput(json=schema))
    except UsageError as error:
        assert "JSON schema is refused: " in str(error) and "\n" not in str(error)
        return False
    return True


def test_every_keyword_of_the_suite_is_claimed_or_refused():
    assert {case["keyword"] for case in CASES} == CLAIMED | REFUSED | REFERRING and len(CASES) > 350


@pytest.mark.parametrize("keyword", sorted(CLAIMED))
def test_no_instance_that_the_suite_calls_invalid_may_come(compiler, keyword):
    num_taken, end = 0, min(ByteTokenizer().eos_token_ids)
    for case in [case for case in CASES if case["keyword"] == keyword]:
        if not compiled(compiler, case["schema"]):
            continue
        num_taken += 1
        for instance, is_valid in case["tests"]:
            token_ids = [*json.dumps(instance, ensure_ascii=False).encode(), end]
            matcher = compiler(StructuredOutput(json=case["schema"])).new_matcher()
            assert is_valid or matcher.num_allowed([], token_ids) < len(token_ids), (case, instance)
    assert num_taken


@pytest.mark.parametrize("keyword", sorted(REFUSED | REFERRING))
def test_what_is_not_claimed_is_refused_before_anything_runs(compiler, keyword):
    names: dict[str, tuple[str, ...]] = {
        "if-then-else": ("if", "then", "else"),
        "defs": ("dynamicAnchor",),
        "vocabulary": ("Resource",),
    }
    names["if-then-else"] += ("exclusive bound",)
    for case in [case for case in CASES if case["keyword"] == keyword]:
        with pytest.raises(UsageError, match="JSON schema is refused") as caught:
            compiler(StructuredOutput(json=case["schema"]))
        named = names.get(keyword, (keyword, "Resource", "dynamicAnchor", "if", "exclusive bound"))
        assert any(name in str(caught.value) for name in named)


def check_finished(llm: LLM, schemas: list[dict], temperatures: tuple[float, ...], max_tokens: int) -> int:
    """How many outputs ended, all of which are valid."""
    asked = [(schema, temperature) for schema in schemas for temperature in temperatures]
    engine = llm.new_engine()
    for seed, (schema, temperature) in enumerate(asked):
        params = SamplingParams(max_tokens, temperature, seed=seed, structured=StructuredOutput(json=schema))
        engine.add_request(str(seed), [65], params)
    while engine.has_unfinished():
        engine.step()
    num_finished = 0
    for seed, (schema, _) in enumerate(asked):
        sample = engine.output(str(seed)).outputs[0]
        assert sample.finish_reason in ("stop", "length")
        if sample.finish_reason == "stop":
            num_finished += 1
            check = jsonschema.Draft202012Validator.FORMAT_CHECKER if "format" in json.dumps(schema) else None
            jsonschema.validate(json.loads(sample.text), schema, jsonschema.Draft202012Validator, format_checker=check)
    return num_finished


def test_what_is_sampled_by_a_schema_of_the_suite_is_valid(llm, compiler):
    schemas = [case["schema"] for case in CASES if case["keyword"] in CLAIMED and compiled(compiler, case["schema"])]
    num_finished = check_finished(llm, schemas, (1.0, 2.0), 48)
    assert len(schemas) > 150 and num_finished > len(schemas) // 2


@pytest.mark.parametrize("num_schemas", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_is_sampled_by_random_schemas_is_valid(llm, compiler, num_schemas):
    rng = Random(23)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    assert all(compiled(compiler, schema) for schema in schemas)
    assert check_finished(llm, schemas, (0.0, 1.0, 2.0), 400) > 0.9 * 3 * num_schemas


def random_schema(rng: Random, depth: int = 0) -> dict:
    """A schema that can be satisfied, with what is claimed to be supported; bounded, so that a text of it ends."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    kinds += ["object", "array", "tuple", "anyOf", "ref"] * (depth < 3)
    kind, low = rng.choice(kinds), rng.randrange(-50, 50)
    if kind == "string":
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
    if kind == "integer":
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 900)}
    if kind == "number":
        return {"type": "number", "exclusiveMinimum": low, "maximum": low + 1.5 + rng.randrange(99)}
    if kind == "enum":
        return {"enum": rng.sample(["happy", "sad", 1, 2.5, None, True, "a b", {"x": 1}], rng.randrange(1, 5))}
    if kind == "const":
        return {"const": rng.choice(['é\n"', 7, False, ["a", 1]])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{1,5}$", "^(up|down)+$", "^\\d{4}-x?$"])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
    if kind == "array":
        fewest = rng.randrange(3)
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": fewest,
            "maxItems": fewest + rng.randrange(2),
        }
    if kind == "tuple":
        items = [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "ref":
        name = f"d{rng.randrange(10**9)}"
        return {"$defs": {name: random_schema(rng, 3)}, "$ref": f"#/$defs/{name}"} if depth == 0 else {"type": "null"}
    if kind == "object":
        names = rng.sample(["name", "na", "x y", "é", "place", "age"], rng.randrange(1, 4))
        required = [name for name in names if rng.random() < 0.7]
        properties = {name: random_schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}
