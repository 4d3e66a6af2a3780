"""Every field of OpenAI's, Anthropic's, vLLM's and llama-server's request bodies, and what becomes of it here.

A field is *done* (a value of a wrong type is 400 and names it: it is read), *refused* (400 by name, except for values
that ask for nothing), or *without effect* (it labels the request, or qualifies a field that is refused: any value gives
the answer that none gives). OpenAI's and Anthropic's fields are read from their own packages, so that a new one fails
here.
"""

import typing
from collections.abc import Iterator

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import chat, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from forge.server.errors import ApiError
from forge.server.schema import UNSUPPORTED, check_supported

OFFICIAL = {
    "chat": (
        chat_create_params.CompletionCreateParamsBase,
        chat_create_params.CompletionCreateParamsStreaming,
    ),
    "completions": (
        completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    "embeddings": (embedding_create_params.EmbeddingCreateParams,),
    "responses": (
        response_create_params.ResponseCreateParamsBase,
        response_create_params.ResponseCreateParamsStreaming,
    ),
    "input_tokens": (input_token_count_params.InputTokenCountParams,),
    "messages": (message_create_params.MessageCreateParamsBase, message_create_params.MessageCreateParamsStreaming),
    "count_tokens": (message_count_tokens_params.MessageCountTokensParams,),
}
_VLLM_GENERATION = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval guided_json guided_regex guided_choice
    guided_grammar logits_processors
"""
_VLLM_POOLING = """
    model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs cache_salt
    use_activation normalize
"""
VLLM = {
    "chat": _VLLM_GENERATION
    + """messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text""",
    "completions": _VLLM_GENERATION + "prompt suffix best_of prompt_embeds",
    "embeddings": _VLLM_POOLING
    + """input messages add_special_tokens encoding_format embed_dtype endianness dimensions add_generation_prompt
    continue_final_message chat_template chat_template_kwargs media_io_kwargs""",
    "rerank": _VLLM_POOLING + "query documents top_n",
    "score": _VLLM_POOLING + "text_1 text_2",
    "classify": _VLLM_POOLING + "input messages add_special_tokens",
    "responses": """background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
    parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text tool_choice
    tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output prompt_cache_key
    request_id mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
    previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs""",
    "tokenize": """model prompt add_special_tokens return_token_strs messages add_generation_prompt
    continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
    "detokenize": "model tokens",
}
_LLAMA_GENERATION = """
    temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_discard n_cmpl
    n_cache_reuse stream stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier
    dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat
    mirostat_tau mirostat_eta grammar grammar_lazy grammar_triggers json_schema seed ignore_eos logit_bias n_probs
    min_keep t_max_predict_ms t_max_prompt_ms id_slot cache_prompt return_tokens samplers timings_per_token
    return_progress sse_ping_interval post_sampling_probs response_fields lora top_n_sigma adaptive_target
    adaptive_decay speculative.n_max speculative.n_min speculative.p_min max_tokens
"""
LLAMA = {
    "chat": _LLAMA_GENERATION
    + """messages response_format chat_template_kwargs reasoning_effort reasoning_format reasoning_control
    parallel_tool_calls parse_tool_calls thinking_forced_open thinking_budget_tokens reasoning_budget_tokens tools
    tool_choice add_generation_prompt""",
    "completions": _LLAMA_GENERATION + "prompt",
    "embeddings": "input encoding_format embd_normalize",
    "rerank": "query documents top_n",
    "tokenize": "content add_special parse_special with_pieces",
    "detokenize": "tokens",
}

_DONE = """
    model frequency_penalty logit_bias max_tokens n presence_penalty seed stop stream stream_options temperature top_p
    top_k min_p repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens add_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids bad_words structured_outputs priority request_id
    cache_salt response_format prompt_logprobs return_token_ids logprobs grammar json_schema timings_per_token
"""
_REFUSED = """
    use_beam_search watermarking length_penalty skip_special_tokens spaces_between_special_tokens logprob_token_ids
    return_tokens_as_token_ids routed_experts_prompt_start return_token_offsets kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval guided_json guided_regex guided_choice
    guided_grammar logits_processors dynatemp_range n_predict n_indent n_cmpl n_cache_reuse typical_p repeat_penalty
    dry_multiplier xtc_probability mirostat n_probs min_keep t_max_predict_ms t_max_prompt_ms id_slot cache_prompt
    return_tokens samplers return_progress sse_ping_interval post_sampling_probs response_fields lora top_n_sigma
    adaptive_target grammar_lazy grammar_triggers
"""
_WITHOUT_EFFECT = """
    user session_id return_mm_kwargs dynatemp_exponent n_keep n_discard repeat_last_n dry_base dry_allowed_length
    dry_penalty_last_n dry_sequence_breakers xtc_threshold mirostat_tau mirostat_eta adaptive_decay speculative.n_max
    speculative.n_min speculative.p_min
"""
_POOLING_REFUSED = "padding priority mm_processor_kwargs cache_salt use_activation normalize"
BECOMES = {
    "chat": {
        "done": _DONE
        + """messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls reasoning_effort
        add_generation_prompt continue_final_message chat_template_kwargs""",
        "refused": _REFUSED
        + """echo include_reasoning documents chat_template media_io_kwargs mm_processor_kwargs return_prompt_text
        reasoning_format reasoning_control parse_tool_calls thinking_forced_open thinking_budget_tokens
        reasoning_budget_tokens audio function_call functions modalities moderation prediction prompt_cache_options
        prompt_cache_retention service_tier store verbosity web_search_options""",
        "without effect": _WITHOUT_EFFECT + "metadata prompt_cache_key safety_identifier",
    },
    "completions": {
        "done": _DONE + "prompt echo",
        "refused": _REFUSED + "suffix best_of prompt_embeds",
        "without effect": _WITHOUT_EFFECT,
    },
    "embeddings": {
        "done": """model input encoding_format dimensions truncate_prompt_tokens truncation_side request_id
        add_special_tokens""",
        "refused": _POOLING_REFUSED
        + """ messages embed_dtype endianness add_generation_prompt continue_final_message chat_template
        media_io_kwargs embd_normalize chat_template_kwargs""",
        "without effect": "user",
    },
    "rerank": {
        "done": "model query documents top_n request_id",
        "refused": _POOLING_REFUSED + " truncate_prompt_tokens truncation_side",
        "without effect": "user",
    },
    "score": {
        "done": "model text_1 text_2 request_id",
        "refused": _POOLING_REFUSED + " truncate_prompt_tokens truncation_side",
        "without effect": "user",
    },
    "classify": {
        "done": "model input truncate_prompt_tokens truncation_side request_id add_special_tokens",
        "refused": _POOLING_REFUSED + " messages",
        "without effect": "user",
    },
    "responses": {
        "done": """input instructions max_output_tokens metadata model logit_bias parallel_tool_calls
        previous_response_id reasoning store stream temperature text tool_choice tools top_logprobs top_p top_k
        include_stop_str_in_output priority cache_salt structured_outputs repetition_penalty seed stop ignore_eos
        include stream_options bad_words allowed_token_ids truncate_prompt_tokens grammar json_schema""",
        "refused": """background max_tool_calls prompt service_tier truncation skip_special_tokens request_id
        mm_processor_kwargs enable_response_messages previous_input_messages previous_response vllm_xargs
        access_programs background_options context_management conversation image moderation prompt_cache_options
        prompt_cache_retention messages max_tokens max_completion_tokens response_format n logprobs
        prompt_logprobs return_token_ids timings_per_token""",
        "without effect": "user prompt_cache_key safety_identifier",
    },
    "input_tokens": {
        "done": "input instructions model parallel_tool_calls previous_response_id reasoning text tool_choice tools",
        "refused": "conversation personality truncation",
        "without effect": "",
    },
    "messages": {
        "done": """messages model max_tokens system stop_sequences stream temperature top_p top_k tools tool_choice
        thinking output_config seed min_p logit_bias grammar structured_outputs""",
        "refused": """container diagnostics inference_geo service_tier speed mcp_servers context_management stop
        max_completion_tokens response_format stream_options chat_template_kwargs reasoning_effort request_id
        top_logprobs prompt_logprobs logprobs parallel_tool_calls return_token_ids timings_per_token n
        continue_final_message add_generation_prompt""",
        "without effect": "cache_control metadata user_profile_id workspace_id",
    },
    "count_tokens": {
        "done": "messages model system tools tool_choice thinking output_config",
        "refused": "speed",
        "without effect": "cache_control user_profile_id workspace_id",
    },
    "tokenize": {
        "done": """model prompt content messages add_special_tokens add_special parse_special return_token_strs
        with_pieces add_generation_prompt continue_final_message chat_template_kwargs tools""",
        "refused": "chat_template media_io_kwargs mm_processor_kwargs",
        "without effect": "",
    },
    "detokenize": {"done": "model tokens", "refused": "", "without effect": ""},
}

ASKED = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "seed": 1}),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "seed": 1}),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}),
    "rerank": ("/v1/rerank", {"query": "Hi", "documents": ["a", "b"]}),
    "score": ("/v1/score", {"text_1": "Hi", "text_2": "there"}),
    "classify": ("/classify", {"input": "Hi", "labels": ["a", "b"]}),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "seed": 1}),
    "input_tokens": ("/v1/responses/input_tokens", {"input": "Hi"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "seed": 1}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
    "tokenize": ("/tokenize", {"prompt": "Hi"}),
    "detokenize": ("/detokenize", {"tokens": [72]}),
}
CHANGING = ("id", "created", "created_at", "usage")
"""Of an answer: what is another one each time."""
OF_NO_TYPE = [[0.5]]
"""What no field takes."""


def fields_of_the_others(endpoint: str) -> Iterator[str]:
    for params in OFFICIAL.get(endpoint, ()):
        yield from typing.get_type_hints(params)
    yield from VLLM.get(endpoint, "").split()
    yield from LLAMA.get(endpoint, "").split()


def fields(endpoint: str, becomes: str) -> list[str]:
    return BECOMES[endpoint][becomes].split()


def answer(server, endpoint: str, **further) -> tuple[int, dict]:
    path, body = ASKED[endpoint]
    status, found = server.request(path, body | further)
    for item in found.get("output", ()):
        del item["id"]
    return status, {name: value for name, value in found.items() if name not in CHANGING}


@pytest.mark.parametrize("endpoint", BECOMES)
def test_every_field_is_in_the_table_once(endpoint):
    listed = [name for becomes in BECOMES[endpoint] for name in fields(endpoint, becomes)]
    assert len(listed) == len(set(listed)) and set(fields_of_the_others(endpoint)) <= set(listed)


@pytest.mark.parametrize("endpoint", BECOMES)
def test_a_field_that_is_done_is_read(server, endpoint):
    for name in fields(endpoint, "done"):
        status, found = answer(server, endpoint, **{name: OF_NO_TYPE})
        assert (status, found["error"]["param"]) == (400, name), found


@pytest.mark.parametrize("endpoint", BECOMES)
def test_a_field_that_would_change_the_answer_is_refused_by_name(server, reranker, endpoint):
    server = reranker[1] if endpoint == "rerank" else server
    plain = answer(server, endpoint)
    assert plain[0] == 200
    for name in fields(endpoint, "refused"):
        status, found = answer(server, endpoint, **{name: OF_NO_TYPE})
        assert status == 400 and found["error"]["param"] == name, (name, found)
        assert found["error"]["code"] == "unsupported_parameter" and "not supported" in found["error"]["message"]
        assert answer(server, endpoint, **{name: None}) == plain


@pytest.mark.parametrize("endpoint", BECOMES)
def test_a_field_without_effect_changes_nothing_of_the_answer(server, reranker, endpoint):
    server = reranker[1] if endpoint == "rerank" else server
    plain = answer(server, endpoint)
    assert plain[0] == 200
    for name in fields(endpoint, "without effect"):
        assert answer(server, endpoint, **{name: OF_NO_TYPE}) == plain


@pytest.mark.parametrize("endpoint", ["completions", "embeddings"])
def test_the_values_that_ask_for_nothing_are_accepted(server, endpoint):
    path, body = ASKED[endpoint]
    for index in range(2):
        harmless = {name: values[min(index, len(values) - 1)] for name, values in UNSUPPORTED.items() if values}
        status, found = server.request(path, {"best_of": 1} | harmless | {"stop": None, "grammar": ""} | body)
        assert status == 200, found


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}}},
            "response_format.json_schema.strikt",
        ),
    ],
)
def test_a_field_within_a_field_is_refused_by_both_names(server, body, name):
    status, found = answer(server, "chat", **body)
    assert status == 400 and found["error"]["message"] == f"{name} is not supported by this server"


def test_a_parameter_that_no_server_has_is_ignored(server):
    assert answer(server, "completions", zzz={}) == answer(server, "completions")


MESSAGES = {
    "done": {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"},
    "refused": {"audio", "function_call", "refusal", "tools"},
    "without effect": {"name", "annotations", "cache_control"},
}
"""Of a message's keys: the template of this model shows no name."""
PARTS = {"text": {"text", "type", "prompt_cache_breakpoint", "cache_control"}}
VLLM_MESSAGES = {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "tools"}
LLAMA_MESSAGES = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"}


def of_message(server, **further) -> tuple[int, dict]:
    first = {"role": "assistant", "content": "Hi"} | further
    return answer(
        server, "chat", messages=[{"role": "user", "content": "Hi"}, first, {"role": "user", "content": "Go"}]
    )


def test_every_key_of_a_message_is_in_the_table():
    params = typing.get_args(chat.ChatCompletionMessageParam)
    official = {name for message in params for name in typing.get_type_hints(message)}
    answered = set(chat.ChatCompletionMessage.model_fields)  # clients send an answer back as it came
    assert official | answered | VLLM_MESSAGES | LLAMA_MESSAGES <= set().union(*MESSAGES.values())


@pytest.mark.parametrize("name", sorted(MESSAGES["refused"]))
def test_a_key_of_a_message_that_would_change_the_answer_is_refused_by_name(server, name):
    status, found = of_message(server, **{name: OF_NO_TYPE})
    assert (status, found["error"]["param"]) == (400, "messages")
    assert found["error"]["message"] == f"messages.{name} is not supported by this server"
    assert of_message(server, **{name: None}) == of_message(server)


@pytest.mark.parametrize("name", sorted(MESSAGES["without effect"]))
def test_a_label_of_a_message_changes_nothing_of_the_answer(server, name):
    assert of_message(server, **{name: "x"}) == of_message(server)


def test_an_answer_may_be_sent_back_as_it_came(server):
    _, found = of_message(server)
    message = found["choices"][0]["message"]
    whole = chat.ChatCompletionMessage.model_validate(message).model_dump()
    assert of_message(server, **whole)[0] == of_message(server, **message)[0] == 200


@pytest.mark.parametrize("name", ["tool_calls", "tool_call_id", "content"])
def test_a_key_of_a_message_that_is_done_is_read(server, name):
    status, found = of_message(server, **{name: OF_NO_TYPE})
    assert (status, found["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_of_an_earlier_answer_has_two_names(roomy_server, name):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", name: "hm"}]
    body = {"messages": turns, "add_generation_prompt": False}
    tokens = roomy_server.request("/tokenize", body)[1]["tokens"]
    assert "<think>\nhm\n</think>\n\nHo" in roomy_server.request("/detokenize", {"tokens": tokens})[1]["prompt"]


def test_a_part_is_text_with_hints_or_refused(server):
    plain = of_message(server)
    text = {"type": "text", "text": "Hi"}
    for hint in PARTS["text"] - text.keys():
        assert of_message(server, content=[text | {hint: {"type": "ephemeral"}}]) == plain
    for part in typing.get_args(chat.ChatCompletionContentPartParam):
        kind = typing.get_args(typing.get_type_hints(part)["type"])[0]
        assert kind == "text" or of_message(server, content=[{"type": kind, kind: {}}])[0] == 400
        assert set(typing.get_type_hints(part)) <= PARTS["text"] or kind != "text"


FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "custom": {"name": "look"}},
        {"type": "web_search"},
        {"type": "function", "function": FUNCTION | {"strict": OF_NO_TYPE}},
        {"type": "function", "function": FUNCTION | {"description": OF_NO_TYPE}},
        {"type": "function", "function": FUNCTION | {"parameters": OF_NO_TYPE}},
        {"type": "function", "function": FUNCTION | {"name": OF_NO_TYPE}},
    ],
)
def test_every_key_of_a_tool_is_read_and_other_kinds_are_refused(server, tool):
    status, found = answer(server, "chat", tools=[tool])
    assert (status, found["error"]["param"]) == (400, "tools"), found
    keys = typing.get_type_hints(typing.get_type_hints(chat.ChatCompletionFunctionToolParam)["function"])
    assert set(keys) == {"name", "description", "parameters", "strict"}


@pytest.mark.parametrize("choice", [{"type": "allowed_tools", "allowed_tools": {}}, {"type": "custom", "custom": {}}])
def test_a_choice_of_tools_that_is_not_done_is_refused(server, choice):
    tools = [{"type": "function", "function": FUNCTION}]
    status, found = answer(server, "chat", tools=tools, tool_choice=choice)
    assert (status, found["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    "names", [("n_predict", "audio"), ("audio", "n_predict"), ("speed", "echo"), ("echo", "speed")]
)
def test_of_several_refused_fields_the_first_of_the_body_is_named(names):
    with pytest.raises(ApiError, match=f"{names[0]} is not supported"):
        check_supported({"user": "me", **dict.fromkeys(names, 7)})
