"""Parameters of OpenAI's, vLLM's, SGLang's, llama.cpp's and Anthropic's bodies that this server does not have.

A parameter that would change the answer is refused by its name, unless its value asks for nothing. One that this table
does not have and no body declares is ignored, as everywhere: it labels a request (`user`, `metadata`, `session_id`), or
it qualifies a parameter that is refused (`xtc_threshold`, `dry_base`, `mirostat_tau`). The names stand by the value
that asks for nothing.
"""

from collections.abc import Mapping
from typing import Any

from forge.server.errors import ApiError

_ALWAYS = """
    audio background_options context_management conversation image max_completion_tokens max_tool_calls moderation
    personality prediction prompt_cache_options reasoning_effort web_search_options allowed_token_ids chat_template
    ec_transfer_params guided_choice guided_grammar guided_json guided_regex kv_transfer_params messages
    previous_response prompt_embeds prompt_logprobs repetition_detection request_id truncate_prompt_tokens
    truncation_side custom_logit_processor lora_path json_schema n_predict container diagnostics inference_geo
    max_chunks_per_doc max_tokens_per_doc
"""
_UNLESS_FALSE = """
    background echo store continue_final_message enable_response_messages return_prompt_text return_token_offsets
    return_tokens_as_token_ids use_beam_search watermarking grammar_lazy post_sampling_probs reasoning_control
    return_progress return_tokens thinking_forced_open timings_per_token
"""
_UNLESS_TRUE = """
    add_generation_prompt include_reasoning normalize skip_special_tokens spaces_between_special_tokens use_activation
    cache_prompt parse_tool_calls
"""
_UNLESS_AN_EMPTY_LIST = """
    access_programs functions tools bad_words documents logits_processors logprob_token_ids previous_input_messages
    grammar_triggers lora response_fields samplers mcp_servers rank_fields
"""
_UNLESS_ZERO = """
    priority routed_experts_prompt_start min_new_tokens dry_multiplier dynatemp_range min_keep mirostat n_cache_reuse
    n_indent n_probs xtc_probability
"""
_UNLESS_MINUS_ONE = """
    thinking_token_budget adaptive_target id_slot reasoning_budget_tokens sse_ping_interval thinking_budget_tokens
"""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ALWAYS.split(), ()),
    **dict.fromkeys(_UNLESS_FALSE.split(), (False,)),
    **dict.fromkeys(_UNLESS_TRUE.split(), (True,)),
    **dict.fromkeys(_UNLESS_AN_EMPTY_LIST.split(), ([],)),
    **dict.fromkeys(_UNLESS_ZERO.split(), (0,)),
    **dict.fromkeys(_UNLESS_MINUS_ONE.split(), (-1,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    "modalities": (["text"],),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    **dict.fromkeys(("suffix", "cache_salt", "ebnf", "regex", "grammar"), ("",)),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    **dict.fromkeys(("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"), ({},)),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    **dict.fromkeys(("length_penalty", "stream_interval", "n_cmpl", "repeat_penalty", "typical_p"), (1,)),
    "padding": ("do_not_pad",),
    "stop_regex": ([], ""),
    "embd_normalize": (2,),
    "reasoning_format": ("auto", "deepseek"),
    **dict.fromkeys(("t_max_predict_ms", "t_max_prompt_ms"), (0, -1)),
    "top_n_sigma": (-1, 0),
    "speed": ("standard",),
}
"""Fields that are refused, with the values that ask for nothing. A field that a body declares is never looked up
here."""
UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "refusal": ("",),
    "tools": ([],),
}
"""The same of a chat's messages. What else they hold is for the chat template, or labels what was said (`annotations`,
`cache_control`)."""


def check_supported(
    undeclared: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]] = UNSUPPORTED, within: str = ""
) -> None:
    """Raise `ApiError` for the body's first parameter that requests what this server does not do.

    undeclared: what a body has beside the fields that its endpoint declares. table: names, and the values that ask for
    nothing. within: what comes before the name, of a field within a field."""
    for name, value in undeclared.items():
        if value is not None and name in table and value not in table[name]:
            param = (within + name).partition(".")[0]
            message = f"{within}{name} is not supported by this server"
            raise ApiError(message, param=param, code="unsupported_parameter")
