"""Stored responses: continued from with their own tokens, read, deleted, bounded; by OpenAI's client, unmodified."""

import openai
import pytest

from forge.server.errors import ApiError
from forge.server.response_store import ResponseKey, ResponseStore, StoredResponse
from forge.server.responses_api import ResponsesRequest, read
from tests.server.test_responses_api import FLAT, ONE_CALL
from tests.server.test_tools import END_OF_THINKING, THINK

ASKED = {"model": "small", "max_output_tokens": 40, "temperature": 1, "extra_body": {"seed": 1, "ignore_eos": True}}
BLOCK = 16


def cached(response) -> int:
    return response.usage.input_tokens_details.cached_tokens


def computed_blocks(response) -> int:
    """Tokens of the full blocks whose keys were computed: the last token's never are."""
    return (response.usage.total_tokens - 1) // BLOCK * BLOCK


def test_a_response_goes_on_from_the_tokens_of_the_last_as_they_were_generated(roomy_client):
    """Random bytes: rendered again, they would be other tokens."""
    last = roomy_client.responses.create(**ASKED, instructions="Be brief.", input="First")
    assert "\ufffd" in last.output_text
    for turn in range(3):
        following = roomy_client.responses.create(
            **ASKED, instructions="Be brief.", input=f"Turn {turn}", previous_response_id=last.id
        )
        assert following.previous_response_id == last.id
        assert cached(following) == computed_blocks(last)
        assert following.usage.input_tokens > last.usage.total_tokens
        last = following


def test_a_stream_is_stored_too_and_continues(roomy_client):
    events = list(roomy_client.responses.create(**ASKED, input="First", stream=True))
    last = events[-1].response
    assert roomy_client.responses.retrieve(last.id) == last
    following = roomy_client.responses.create(**ASKED, input="And?", previous_response_id=last.id)
    assert cached(following) == computed_blocks(last)


def test_thinking_stays_in_the_conversation_that_goes_on(roomy_client):
    bias = {THINK: 100, END_OF_THINKING: 3}
    asked = ASKED | {"extra_body": {"seed": 4, "chat_template_kwargs": {"enable_thinking": True}, "logit_bias": bias}}
    last = roomy_client.responses.create(**asked, input="First")
    assert last.output[0].type == "reasoning"
    following = roomy_client.responses.create(**asked, input="And?", previous_response_id=last.id)
    assert cached(following) == computed_blocks(last)


def test_a_called_function_answers_into_the_conversation(roomy_client):
    asked = {"model": "small", "temperature": 1, "max_output_tokens": 300}
    last = roomy_client.responses.create(**asked, **ONE_CALL, input="Where is the fox?")
    result = {"type": "function_call_output", "call_id": last.output[0].call_id, "output": "sunny"}
    following = roomy_client.responses.create(**asked, tools=FLAT, input=[result], previous_response_id=last.id)
    assert cached(following) == computed_blocks(last)


@pytest.mark.parametrize(
    "changed", [{"instructions": "Be long."}, {"tools": FLAT}, {"extra_body": {"truncate_prompt_tokens": 4000}}]
)
def test_another_setting_is_the_conversation_rendered_anew(roomy_client, changed):
    last = roomy_client.responses.create(**ASKED | {"extra_body": {"logit_bias": {"97": 100}}}, input="First")
    assert set(last.output_text) == {"a"}
    asked = {"model": "small", "max_output_tokens": 2} | changed
    following = roomy_client.responses.create(**asked, input="And?", previous_response_id=last.id)
    items = [{"role": "user", "content": "First"}, *[item.to_dict() for item in last.output]]
    whole = roomy_client.responses.create(**asked, input=[*items, {"role": "user", "content": "And?"}], store=False)
    assert following.usage.input_tokens == whole.usage.input_tokens
    assert following.output_text == whole.output_text


def test_an_answer_that_a_stop_string_ended_goes_on_without_the_string(roomy_client):
    bias = {str(byte): 100 - 12 * place for place, byte in enumerate(b"XYZ")}
    extra = {"logit_bias": bias, "repetition_penalty": 100, "stop": "Z"}
    last = roomy_client.responses.create(model="small", input="0", temperature=0, extra_body=extra)
    assert last.output_text == "XY" and last.status == "completed"
    counts = [
        roomy_client.responses.input_tokens.count(input="And?", previous_response_id=last.id).input_tokens,
        roomy_client.responses.input_tokens.count(
            input=[{"role": "user", "content": "0"}, last.output[0].to_dict(), {"role": "user", "content": "And?"}]
        ).input_tokens,
    ]
    assert counts[0] == counts[1]


def test_tokens_are_counted_as_they_will_be_used(roomy_client):
    asked = {"model": "small", "instructions": "Be brief.", "input": "Hi", "tools": FLAT}
    counted = roomy_client.responses.input_tokens.count(**asked).input_tokens
    first = roomy_client.responses.create(**asked, max_output_tokens=5)
    assert counted == first.usage.input_tokens
    asked |= {"input": "And?", "previous_response_id": first.id}
    counted = roomy_client.responses.input_tokens.count(**asked).input_tokens
    assert counted == roomy_client.responses.create(**asked, max_output_tokens=5).usage.input_tokens


def test_a_response_is_read_and_deleted(roomy_client):
    made = roomy_client.responses.create(**ASKED, input="Hi", metadata={"for": "test"})
    assert roomy_client.responses.retrieve(made.id) == made and made.metadata == {"for": "test"}
    roomy_client.responses.delete(made.id)
    for act in (roomy_client.responses.retrieve, roomy_client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="is stored here"):
            act(made.id)
    with pytest.raises(openai.BadRequestError) as found:
        roomy_client.responses.create(**ASKED, input="Hi", previous_response_id=made.id)
    assert found.value.param == "previous_response_id" and found.value.code == "previous_response_not_found"


def test_a_response_that_is_not_to_be_stored_is_not(roomy_client):
    made = roomy_client.responses.create(**ASKED, input="Hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        roomy_client.responses.retrieve(made.id)


def test_the_items_that_a_response_answers_are_listed(roomy_client):
    first = roomy_client.responses.create(**ASKED, input="one")
    items = [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]
    second = roomy_client.responses.create(**ASKED, input=items, previous_response_id=first.id)
    texts = [
        item.content if isinstance(item.content, str) else "answer"
        for item in roomy_client.responses.input_items.list(second.id, order="asc", limit=3)
    ]
    assert texts == ["one", "answer", "two", "three"]  # the client asks for the next page by itself
    last = roomy_client.responses.input_items.list(second.id).data[0]
    assert last.content == "three" and last.id


# Log probabilities


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_the_chats(roomy_client, stream):
    asked = {"model": "small", "temperature": 1, "extra_body": {"seed": 3, "ignore_eos": True}}
    chat = roomy_client.chat.completions.create(
        **asked, messages=[{"role": "user", "content": "Hi"}], max_tokens=9, logprobs=True, top_logprobs=2
    )
    asked |= {"input": "Hi", "max_output_tokens": 9, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    if stream:
        events = list(roomy_client.responses.create(**asked, stream=True))
        found = events[-1].response
        deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
        assert [entry.token for entry in deltas] == [entry.token for entry in found.output[0].content[0].logprobs]
    else:
        found = roomy_client.responses.create(**asked)
    expected = [entry.to_dict() for entry in chat.choices[0].logprobs.content]
    assert [entry.to_dict() for entry in found.output[0].content[0].logprobs] == expected


SPOKEN = [THINK, *map(str, b"QR"), END_OF_THINKING, *map(str, b"XYZ")]
"""Tokens that a greedy model says in this order, each likelier than the next and none twice."""
SAYING = {"logit_bias": {token: 100 - 12 * place for place, token in enumerate(SPOKEN)}, "repetition_penalty": 100}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_thinking_are_not_the_answers(roomy_client, stream):
    asked = {"model": "small", "input": "1", "max_output_tokens": 7, "temperature": 0, "top_logprobs": 0}
    asked |= {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}, **SAYING}}
    if stream:
        found = list(roomy_client.responses.create(**asked, stream=True))[-1].response
    else:
        found = roomy_client.responses.create(**asked)
    reasoning, answer = (item.content[0] for item in found.output)
    assert (reasoning.text, answer.text) == ("QR", "XYZ")
    assert [entry.token for entry in answer.logprobs] == ["X", "Y", "Z"]


# The store itself


def key(response_id: str, owner: str | None = None) -> ResponseKey:
    return ResponseKey(owner, response_id)


def stored(size: int) -> StoredResponse:
    return StoredResponse(b"x" * (size - 1024), b"", 0, b"", None)


def test_the_store_is_bounded_and_drops_what_was_used_least_recently():
    store = ResponseStore(10_000)
    for name in "abc":
        store.put(key(name), stored(3000))
    store.get(key("a"))
    store.put(key("d"), stored(3000))
    assert len(store) == 3
    for name in "acd":
        store.get(key(name))
    with pytest.raises(ApiError, match="no response 'b' is stored"):
        store.get(key("b"))
    store.put(key("huge"), stored(20_000))
    assert len(store) == 0


def test_what_is_deleted_makes_room():
    store = ResponseStore(10_000)
    for _ in range(20):
        store.put(key("a"), stored(6000))
        store.put(key("b"), stored(3000))
        store.delete(key("a"))
        assert store.get(key("b"))
        store.delete(key("b"))
    assert len(store) == 0 and store._num_bytes == 0


def test_a_server_that_stores_nothing_says_so():
    asked = ResponsesRequest(input="Hi")
    read(ResponseStore(0), asked)
    assert asked.store is False
    with pytest.raises(ApiError, match="--max-stored-bytes 0") as found:
        read(ResponseStore(0), ResponsesRequest(input="Hi", store=True))
    assert found.value.param == "store"
