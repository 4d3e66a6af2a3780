"""Real grammars in the whole engine: what is said has the form, whatever is drawn, proposed or interrupted."""

import json
import re
from typing import Any

import jsonschema
import pytest

from forge import LLM, SamplingParams, StructuredOutput
from forge.engine.async_scheduling import AsyncEngine
from forge.engine.sampler import Sampler, StepLogits
from forge.engine.tasks import classify_prompt

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


def run_through(run) -> int:
    """Iterate to the end, whatever Ctrl-C interrupts; return how often it did."""
    num_interrupted = 0
    while True:
        try:
            for _ in run:
                pass
            return num_interrupted
        except KeyboardInterrupt:
            num_interrupted += 1


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
    assert sum(verdict.accepted for verdict in verdicts) > 0.8 * len(verdicts) > 15


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
    tight = LLM("tales", kv="paged", num_blocks=20, block_size=8, preemption=mode, max_model_len=160, check=True)
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
    assert run_through(run)
    assert [one.token_ids for output in run.outputs for one in output.outputs] == expected


def test_ctrl_c_while_the_grammar_encodes_forced_text_is_no_fault_of_the_grammar(monkeypatch):
    llm = LLM("tales", kv="paged", speculate="grammar", speculate_fixed=True)
    expected = says(llm, temperature=1.0)
    run = llm.start(["Once upon a time", "The fox"], SamplingParams(150, 1.0, structured=FORM, seed=4))
    whole, calls = llm.tokenizer.encode, 0

    def interrupted(text, **options):
        nonlocal calls
        calls += 1
        if calls in (3, 10, 30):
            raise KeyboardInterrupt
        return whole(text, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", interrupted)
    assert run_through(run) == 3
    assert [one.token_ids for output in run.outputs for one in output.outputs] == expected


def test_masks_are_computed_while_a_device_computes(monkeypatch):
    """A model that returns before it has computed: when its logits are read, the masks are there."""
    llm, ready = LLM("hash", kv="paged"), []
    engine = llm.engine
    engine.__class__ = AsyncEngine
    of = StepLogits.of

    def read(rows) -> StepLogits:
        for sequence in engine.scheduler.running.values():
            ready.append(sequence.num_output_tokens in sequence.matcher._masks)
        return of(rows)

    monkeypatch.setattr(StepLogits, "of", read)
    form = StructuredOutput(regex="[a-z]{8}")
    output = llm.generate("x", SamplingParams(20, 1.0, seed=1, n=2, structured=form))[0]
    assert all(re.fullmatch("[a-z]{8}", one.text) for one in output.outputs)
    assert len(ready) > 8 and all(ready)
    monkeypatch.undo()
    assert (
        LLM("hash", kv="paged")
        .generate("x", SamplingParams(20, 1.0, seed=1, n=2, structured=form))[0]
        .outputs[1]
        .token_ids
        == output.outputs[1].token_ids
    )


@pytest.mark.parametrize("mood", ["happy", "sad"])
def test_the_choice_that_is_said_is_the_label_that_classify_finds_likeliest(llm, mood):
    story = f"Once there was a little mole. He lost his crown. At the end of the story the mole was very {mood}."
    prompt = classify_prompt(llm.tokenizer, story, ["happy", "sad"])
    said = llm.generate([prompt], SamplingParams(4, structured=StructuredOutput(choice=["happy", "sad"])))
    assert said[0].outputs[0].text == llm.classify([prompt], ["happy", "sad"])[0].label
