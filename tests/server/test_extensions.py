"""What vLLM's clients ask for beyond OpenAI's parameters."""

import json

import numpy as np
import pytest

EOS = 268
"""Of the small model: `<|im_end|>`."""
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
COMPLETION = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
BOTH = pytest.mark.parametrize("path, asked", [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])


def whole(server, path: str, **asked) -> dict:
    status, found = server.request(path, asked)
    assert status == 200, found
    return found


def chunks(server, path: str, **asked) -> list[dict]:
    _, text = server.request(path, asked | {"stream": True})
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def prompt_ids(server, path: str) -> list[int]:
    asked = {"messages": CHAT["messages"]} if "chat" in path else {"prompt": "abc"}
    return server.request("/tokenize", asked)[1]["tokens"]


@BOTH
def test_token_ids_come_with_the_answer_whole_and_streamed(server, path, asked):
    found = whole(server, path, **asked, return_token_ids=True)
    choice = found["choices"][0]
    assert len(choice["token_ids"]) == 5
    holder = found if "chat" in path else choice
    assert holder["prompt_token_ids"] == prompt_ids(server, path)

    parts = chunks(server, path, **asked, return_token_ids=True)
    choices = [part["choices"][0] for part in parts]
    assert [token_id for one in choices for token_id in one.get("token_ids", [])] == choice["token_ids"]
    holders = parts if "chat" in path else choices
    assert [one["prompt_token_ids"] for one in holders if "prompt_token_ids" in one] == [prompt_ids(server, path)]
    assert not any("token_ids" in one["choices"][0] for one in chunks(server, path, **asked))


@BOTH
def test_usage_comes_with_every_chunk_where_asked(server, path, asked):
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk["usage"] for chunk in chunks(server, path, **asked, n=2, stream_options=options)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-2:] == [10, 10]
    assert {usage["prompt_tokens"] for usage in usages} == {len(prompt_ids(server, path))}
    plain = chunks(server, path, **asked, stream_options={"include_usage": True})
    assert not any(chunk["usage"] for chunk in plain[:-1])


@BOTH
def test_usage_with_every_chunk_is_accepted_and_left_out_where_usage_is_not_asked_for(server, path, asked):
    parts = chunks(server, path, **asked, stream_options={"continuous_usage_stats": True})
    assert parts and not any("usage" in chunk for chunk in parts)


@BOTH
def test_every_answer_and_chunk_has_the_same_fingerprint_of_the_system(server, path, asked):
    prints = {chunk["system_fingerprint"] for chunk in chunks(server, path, **asked)}
    assert prints == {whole(server, path, **asked)["system_fingerprint"]} and prints.pop().startswith("fp_")


@BOTH
def test_a_stop_token_ends_the_answer_and_is_its_reason(server, path, asked):
    token_ids = whole(server, path, **asked, return_token_ids=True)["choices"][0]["token_ids"]
    stop = token_ids[2]
    first = token_ids.index(stop) + 1
    found = whole(server, path, **asked, stop_token_ids=[stop], return_token_ids=True)["choices"][0]
    assert found["finish_reason"] == "stop" and found["stop_reason"] == stop
    assert found["token_ids"] == token_ids[:first]
    parts = chunks(server, path, **asked, stop_token_ids=[stop])
    assert parts[-1]["choices"][0]["stop_reason"] == stop
    found = whole(server, path, **asked, stop_token_ids=[stop], min_tokens=5, return_token_ids=True)["choices"][0]
    assert len(found["token_ids"]) == 5 and stop not in found["token_ids"]


def test_until_min_tokens_there_is_no_end_of_text(server):
    asked = {"prompt": "abc", "max_tokens": 6, "logit_bias": {str(EOS): 100}, "return_token_ids": True}
    assert whole(server, "/v1/completions", **asked)["choices"][0]["token_ids"] == [EOS]
    token_ids = whole(server, "/v1/completions", **asked, min_tokens=4)["choices"][0]["token_ids"]
    assert EOS not in token_ids[:4] and token_ids[4:] == [EOS]


def test_the_stop_string_can_stay(server):
    spelled = {"logit_bias": {str(ord(c)): 100 - 12 * i for i, c in enumerate("abcd")}, "repetition_penalty": 100}
    asked = {"prompt": "0", "max_tokens": 4, "temperature": 0, "stop": "bc"} | spelled
    for wanted, text in ((False, "a"), (True, "abc")):
        found = whole(server, "/v1/completions", **asked, include_stop_str_in_output=wanted)["choices"][0]
        assert (found["text"], found["stop_reason"]) == (text, "bc")


def test_prompt_logprobs_are_those_of_echo(server):
    echoed = whole(server, "/v1/completions", **COMPLETION, echo=True, logprobs=2)["choices"][0]["logprobs"]
    found = whole(server, "/v1/completions", **COMPLETION, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == 3
    for place, (token, entry) in enumerate(zip("bc", found[1:], strict=True), 1):
        own = entry[str(ord(token))]
        assert own["logprob"] == echoed["token_logprobs"][place] and own["decoded_token"] == token
        assert [one["rank"] for one in entry.values()][:2] == [1, 2]
    chat = whole(server, "/v1/chat/completions", **CHAT, prompt_logprobs=0)["prompt_logprobs"]
    assert len(chat) == len(prompt_ids(server, "/v1/chat/completions"))


def test_the_last_message_can_be_gone_on_with(server):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once upon"}]
    asked = CHAT | {"messages": turns, "return_token_ids": True}
    path = "/v1/chat/completions"
    found = whole(server, path, **asked, add_generation_prompt=False, continue_final_message=True)
    assert server.request("/detokenize", {"tokens": found["prompt_token_ids"]})[1]["prompt"].endswith("\nOnce upon")
    without = whole(server, path, **asked, add_generation_prompt=False)
    assert without["prompt_token_ids"][: len(found["prompt_token_ids"])] == found["prompt_token_ids"]
    status, refused = server.request(path, asked | {"add_generation_prompt": True, "continue_final_message": True})
    assert status == 400 and refused["error"]["param"] == "continue_final_message"


def test_embeddings_can_be_shortened(server):
    whole_vector = np.array(whole(server, "/v1/embeddings", input="abc")["data"][0]["embedding"])
    short = np.array(whole(server, "/v1/embeddings", input="abc", dimensions=8)["data"][0]["embedding"])
    assert short == pytest.approx(whole_vector[:8] / np.linalg.norm(whole_vector[:8]), abs=1e-6)
    status, found = server.request("/v1/embeddings", {"input": "abc", "dimensions": 10_000})
    assert status == 400 and found["error"]["param"] == "dimensions"


def test_a_body_says_which_drafts_propose_and_how_many_tokens(server):
    plain = whole(server, "/v1/completions", prompt="abc", max_tokens=4, temperature=0)
    off = whole(
        server, "/v1/completions", prompt="abc", max_tokens=4, temperature=0, num_speculative_tokens=0, drafts=[]
    )
    assert off["choices"][0]["text"] == plain["choices"][0]["text"]
    status, found = server.request("/v1/completions", {"prompt": "abc", "max_tokens": 4, "drafts": ["no such draft"]})
    assert status == 400 and "no such draft" in found["error"]["message"]
