import json
import math
from dataclasses import replace

from forge.views.json_output import run_object, to_json
from tests.views.records import flat, run_of


def as_object(result):
    return json.loads(to_json(run_object(result, str)))


def test_a_run_has_its_figures_and_one_entry_per_forward():
    found = as_object(flat(5))
    assert found["kv"] == "basic" and found["device"] == "cpu" and found["model"] == "tales-q8_0"
    assert round(found["time_to_first_token_ms"], 6) == 2.1
    assert round(found["decode_tokens_per_second"]) == 1667
    assert found["per_forward_ms"] == {"min": 0.6, "median": 0.6, "max": 1.9, "mean": 0.86, "n": 5}
    assert found["tokens_computed"] == 8 and found["kv_bytes_held"] == 8000
    assert [entry["step"] for entry in found["forwards"]] == [1, 2, 3, 4, 5]
    first = found["forwards"][0]
    assert (first["phase"], first["tokens_computed"], first["milliseconds"]) == ("prefill", 4, 1.9)
    assert (first["token_id"], first["text"], first["probability"]) == (101, " there", 0.5)
    assert found["finish_reason"] == "length" and found["seed"] == 7


def test_every_sample_is_there():
    found = as_object(run_of([(8, 2.0), (2, 1.0)], samples=2))
    assert [sample["index"] for sample in found["samples"]] == [0, 1]
    assert [token["sample"] for token in found["forwards"][0]["tokens"]] == [0, 1]


def test_a_run_without_tokens_has_nulls_and_not_numbers():
    found = as_object(run_of([]))
    assert found["per_forward_ms"] is None and found["time_to_first_token_ms"] is None
    assert found["decode_tokens_per_second"] is None and found["forwards"] == []


def test_log_probabilities_carry_the_text_of_every_token():
    result = flat(2)
    sample = replace(result.output.outputs[0], logprobs=(((101, -0.1), (5, -2.5)), ((102, -0.7),)))
    output = replace(
        result.output, outputs=(sample,), prompt_logprobs=(None, ((2, -1.0),), ((9, -0.2), (3, -4.0)), ((4, 0.0),))
    )
    found = as_object(replace(result, outputs=(output,)))
    assert found["samples"][0]["logprobs"][0][1] == {"token_id": 5, "text": "5", "logprob": -2.5}
    assert [entry["logprob"] for entry in found["prompt_logprobs"]] == [None, -1.0, -4.0, 0.0]
    assert found["prompt_logprobs"][2]["alternatives"][0]["token_id"] == 9


def test_numbers_that_json_does_not_have_become_null():
    assert json.loads(to_json({"a": [math.nan, math.inf, -math.inf, 1.5], "b": (math.nan,)})) == {
        "a": [None, None, None, 1.5],
        "b": [None],
    }
