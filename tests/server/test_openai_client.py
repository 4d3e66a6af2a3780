"""OpenAI's own client, unmodified, on every endpoint."""

import asyncio

import openai
import pytest

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


def test_a_completion_has_the_shape_that_the_client_expects(client):
    found = client.completions.create(model="small", prompt=PROMPT, max_tokens=8, temperature=0)
    assert found.object == "text_completion" and found.id.startswith("cmpl-") and found.model == "small"
    assert [choice.index for choice in found.choices] == [0]
    assert found.choices[0].finish_reason in ("stop", "length")
    usage = found.usage
    assert usage.completion_tokens <= 8 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_completion_is_what_the_engine_says_alone(client, alone):
    from forge import SamplingParams

    for params in ({"temperature": 0}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}):
        found = client.completions.create(model="small", prompt=PROMPT, max_tokens=24, **params)
        expected = alone.generate(PROMPT, SamplingParams(24, **params))[0].outputs[0]
        assert found.choices[0].text == expected.text


def test_several_prompts_with_several_samples_come_in_order(client):
    found = client.completions.create(model="small", prompt=["ab", "cd"], n=2, max_tokens=6, seed=1)
    alone = [client.completions.create(model="small", prompt=one, n=2, max_tokens=6, seed=1) for one in ("ab", "cd")]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [c.text for c in found.choices] == [c.text for one in alone for c in one.choices]
    assert found.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)


@pytest.mark.parametrize("prompt", [[97, 98, 99], [[97, 98], [99, 100, 101]], ["ab"]])
def test_prompts_may_be_token_ids(client, prompt):
    found = client.completions.create(model="small", prompt=prompt, max_tokens=2)
    assert len(found.choices) == (len(prompt) if isinstance(prompt[0], list) else 1)


def test_a_stream_has_one_id_and_ends_with_a_reason_and_the_usage(client):
    stream = client.completions.create(
        model="small", prompt=PROMPT, max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens <= 6
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])


def test_completion_logprobs_have_the_legacy_shape(client):
    found = client.completions.create(model="small", prompt="abc", max_tokens=4, logprobs=3, temperature=0, echo=True)
    choice = found.choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith("abc") and len(logprobs.tokens) == 3 + found.usage.completion_tokens
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]


def test_echo_without_output_scores_the_prompt(client):
    found = client.completions.create(model="small", prompt="abc", max_tokens=0, logprobs=1, echo=True)
    assert found.choices[0].text == "abc" and found.usage.completion_tokens == 0
    assert len(found.choices[0].logprobs.tokens) == 3


def test_a_stream_with_echo_and_logprobs_says_the_same_as_a_whole_answer(client):
    asked = {"model": "small", "prompt": "abc", "max_tokens": 5, "logprobs": 2, "temperature": 0, "echo": True}
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[0].logprobs == whole.logprobs


def test_a_chat_stream_names_the_role_first(client):
    asked = {"model": "small", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert chunks[-1].choices[0].finish_reason in ("stop", "length") and not chunks[-1].choices[0].delta.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == client.chat.completions.create(**asked).choices[0].message.content


def test_chat_logprobs_are_the_same_streamed_and_whole(client):
    asked = {"model": "small", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs.content
    stream = client.chat.completions.create(**asked, top_logprobs=2, stream=True)
    streamed = [one for chunk in stream if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert streamed == whole and all(len(one.top_logprobs) == 2 for one in whole)
    assert all(one.logprob == one.top_logprobs[0].logprob for one in whole), "greedy takes the likeliest"


def test_text_parts_and_a_developer_are_understood(client):
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answers = [
        client.chat.completions.create(model="small", messages=messages, max_completion_tokens=6, temperature=0)
        for messages in (parts, plain)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_a_prompt_that_came_before_is_reported_as_cached(client):
    prompt = "a prompt that no other test of these has, long enough for some blocks of it"
    first, second = (client.completions.create(model="small", prompt=prompt, max_tokens=2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


def test_the_async_client_runs_many_at_once(server):
    async def many():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = {"model": "small", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
            wholes = asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(8)))
            stream = await client.chat.completions.create(**asked, stream=True, n=2)
            texts = ["", ""]
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            return {*texts, *(whole.choices[0].message.content for whole in await wholes)}

    assert len(asyncio.run(many())) == 1


def test_models_are_listed_by_name(client):
    assert "small" in [model.id for model in client.models.list().data]
    assert client.models.retrieve("small").id == "small"


@pytest.mark.parametrize(
    "asked, kind, param",
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"stop": ["a"] * 33}, openai.BadRequestError, "stop"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"logprobs": 1000}, openai.BadRequestError, "logprobs"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [-1]}, openai.BadRequestError, "prompt"),
        ({"prompt": [10**6]}, openai.BadRequestError, "prompt"),
        ({"prompt": "x" * 5000}, openai.BadRequestError, "prompt"),
        ({"prompt": "x" * 500_000}, openai.BadRequestError, "prompt"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"best_of": 3}, openai.BadRequestError, "best_of"),
    ],
    ids=str,
)
def test_a_mistake_is_a_typed_exception_that_names_the_parameter(client, asked, kind, param):
    for stream in (False, True):
        with pytest.raises(kind) as found:
            client.completions.create(**{"model": "small", "prompt": "x", "stream": stream} | asked)
        assert found.value.param == param and found.value.type


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        {"top_logprobs": 2},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "wizard", "content": "x"}]},
    ],
    ids=str,
)
def test_what_chat_does_not_support_is_refused_by_name(client, asked):
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**{"model": "small", "messages": MESSAGES} | asked)
    assert found.value.param == next(iter(asked))


def test_penalties_and_biases_reach_the_sampler(client):
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    bias = {"97": 100.0, "98": 97.0}
    plain = client.completions.create(**asked, logit_bias=bias).choices[0].text
    assert plain == "a" * 8
    assert "b" in client.completions.create(**asked, logit_bias=bias, frequency_penalty=2.0).choices[0].text
