"""Real grammars in the whole engine: what is said has the form, whatever is drawn, proposed or interrupted."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from forge import LLM, SamplingParams, StructuredOutput
from forge.engine.sampler import Sampler

PERSON = {
    "type": "object",
    "properties": {
        "hero": {"type": "string", "minLength": 1, "maxLength": 12},
        "place": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "mood": {"enum": ["happy", "sad"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
    },
    "required": ["hero", "place", "mood", "age", "friends"],
    "additionalProperties": False,
}
FORM = StructuredOutput(json=PERSON)


@pytest.fixture(scope="module")
def llm():
    return LLM("tales", kv="paged", check=True)


def says(llm, **params) -> list[tuple[int, ...]]:
    given: dict[str, Any] = {"max_tokens": 150, "structured": FORM, "seed": 4} | params
    outputs = llm.generate(["Once upon a time", "The fox"], SamplingParams(**given))
    return [one.token_ids for output in outputs for one in output.outputs]


def random_schema(rng: random.Random, depth: int = 0) -> dict:
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


NUM_SCHEMAS = 150


def test_outputs_of_random_schemas_validate():
    """Random weights, temperatures 0 to 2: whatever ends by itself is what its schema says."""
    llm, rng, finished = LLM("hash", kv="paged", max_num_seqs=16), random.Random(7), 0
    for _ in range(NUM_SCHEMAS // 10):
        schemas = [random_schema(rng) for _ in range(10)]
        runs = [
            llm.start("x", SamplingParams(400, rng.choice([0, 1, 2]), seed=3, structured=StructuredOutput(json=schema)))
            for schema in schemas
        ]
        for run, schema in zip(runs, schemas, strict=True):
            for _ in run:
                pass
            output = run.outputs[0].outputs[0]
            assert output.finish_reason in ("stop", "length"), (output.errors, schema)
            if output.finish_reason == "stop":
                finished += 1
                jsonschema.validate(json.loads(output.text), schema, format_checker=jsonschema.FormatChecker())
    assert finished > 0.9 * NUM_SCHEMAS


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_the_bundled_model_says_records(llm, temperature):
    for token_ids in says(llm, temperature=temperature, n=2):
        jsonschema.validate(json.loads(llm.tokenizer.decode(token_ids, skip_special=True)), PERSON)


@pytest.mark.parametrize(
    ("structured", "form"),
    [
        (StructuredOutput(regex="(ha|ho){2,5}!"), "(ha|ho){2,5}!"),
        (StructuredOutput(choice=["happy", "sad", "hap"]), "happy|sad|hap"),
        (
            StructuredOutput(grammar='start: "in " place\nplace: "the wood" | /[A-Z][a-z]{1,5}/'),
            "in (the wood|[A-Z].*)",
        ),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_every_form_is_kept_to_the_end(llm, structured, form):
    params = SamplingParams(40, 1.5, n=4, seed=1, structured=structured)
    for one in llm.generate("Mia was", params)[0].outputs:
        assert one.finish_reason == "stop" and re.fullmatch(form, one.text)


def test_an_output_cut_by_its_length_says_so(llm):
    output = llm.generate("Once", SamplingParams(5, structured=FORM))[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculate", ["draft", "ngram", "grammar"])
def test_draft_tokens_change_no_token(llm, speculate, temperature):
    plain = says(llm, temperature=temperature, n=2)
    speculating = LLM("tales", kv="paged", speculate=speculate, k=6, speculate_fixed=True, check=True)
    assert says(speculating, temperature=temperature, n=2) == plain


def test_forced_text_is_mostly_accepted():
    llm = LLM("tales", kv="paged", speculate="grammar", k=6, speculate_fixed=True)
    run = llm.start("Once upon a time", SamplingParams(150, structured=FORM))
    verdicts = [verdict for record in run for cycle in record.cycles for verdict in cycle.verdicts]
    assert sum(verdict.accepted for verdict in verdicts) > 0.9 * len(verdicts) > 20


def test_no_draft_token_that_the_grammar_refuses_is_verified():
    llm = LLM("tales", kv="paged", speculate="draft", k=6, speculate_fixed=True)
    run = llm.start("Once upon a time", SamplingParams(150, structured=FORM))
    proposed = [(cycle.start, cycle.proposed) for record in run for cycle in record.cycles if cycle.proposed]
    output = run.outputs[0]
    matcher = llm.engine.compile_grammar(FORM).new_matcher()
    assert proposed
    for position, token_ids in proposed:
        before = output.outputs[0].token_ids[: position - len(output.prompt_token_ids)]
        assert matcher.num_allowed(before, token_ids) == len(token_ids)


@pytest.mark.parametrize("kv", ["off", "basic", "prefix"])
def test_the_cache_does_not_change_the_output(llm, kv):
    assert says(LLM("tales", kv=kv), temperature=1.0) == says(llm, temperature=1.0)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_does_not_change_the_output(llm, mode):
    tight = LLM("tales", kv="paged", num_blocks=20, block_size=8, mode=mode, max_model_len=160, check=True)
    expected = says(llm, temperature=1.0, n=3)
    run = tight.start(
        ["Once upon a time", "The fox"], SamplingParams(max_tokens=150, structured=FORM, seed=4, temperature=1.0, n=3)
    )
    assert any(record.preempted for record in list(run))
    assert [one.token_ids for output in run.outputs for one in output.outputs] == expected


def test_an_interrupted_step_changes_nothing(llm, monkeypatch):
    expected = says(llm, temperature=1.0)
    run = llm.start(["Once upon a time", "The fox"], SamplingParams(150, 1.0, structured=FORM, seed=4))
    whole, calls = Sampler._emit, 0

    def interrupted(self, *arguments):
        nonlocal calls
        calls += 1
        if calls % 7 == 0:  # one sequence's matcher has moved on, the other's has not
            raise KeyboardInterrupt
        return whole(self, *arguments)

    monkeypatch.setattr(Sampler, "_emit", interrupted)
    ended = False
    while not ended:
        try:
            for _ in run:
                pass
            ended = True
        except KeyboardInterrupt:
            continue
    assert [one.token_ids for output in run.outputs for one in output.outputs] == expected
