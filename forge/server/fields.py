"""Parameters of OpenAI's, vLLM's, SGLang's, llama.cpp's and Anthropic's bodies that this server does not have.

A parameter that would change the answer is refused by its name, unless its value asks for nothing. One that this table
does not have and no body declares is ignored, as everywhere: it labels a request (`user`, `metadata`, `session_id`), or
it qualifies a parameter that is refused (`xtc_threshold`, `dry_base`, `mirostat_tau`).
"""

from collections.abc import Mapping
from typing import Any

from forge.server.errors import ApiError

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "access_programs": ([],),
    "audio": (),
    "background": (False,),
    "background_options": (),
    "context_management": (),
    "conversation": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "image": (),
    "max_completion_tokens": (),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "moderation": (),
    "personality": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": ("",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": (),
    "embed_dtype": ("float32",),
    "enable_response_messages": (False,),
    "endianness": ("native", "little"),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "normalize": (True,),
    "padding": ("do_not_pad",),
    "previous_input_messages": ([],),
    "previous_response": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_activation": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang's
    "custom_logit_processor": (),
    "ebnf": ("",),
    "lora_path": (),
    "min_new_tokens": (0,),
    "regex": ("",),
    "stop_regex": ([], ""),
    # llama.cpp's
    "adaptive_target": (-1,),
    "cache_prompt": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "embd_normalize": (2,),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "id_slot": (-1,),
    "json_schema": (),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_cache_reuse": (0,),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "n_predict": (),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "reasoning_budget_tokens": (-1,),
    "reasoning_control": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_penalty": (1,),
    "response_fields": ([],),
    "return_progress": (False,),
    "return_tokens": (False,),
    "samplers": ([],),
    "sse_ping_interval": (-1,),
    "t_max_predict_ms": (0, -1),
    "t_max_prompt_ms": (0, -1),
    "thinking_budget_tokens": (-1,),
    "thinking_forced_open": (False,),
    "timings_per_token": (False,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # Anthropic's, Cohere's and Jina's
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "mcp_servers": ([],),
    "rank_fields": ([],),
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
    """Raise `ApiError` for the first parameter that requests what this server does not do.

    undeclared: what a body has beside the fields that its endpoint declares. table: names, and the values that ask for
    nothing. within: what comes before the name, of a field within a field."""
    for name, harmless in table.items():
        value = undeclared.get(name)
        if value is not None and value not in harmless:
            raise unsupported(within + name)


def unsupported(name: str) -> ApiError:
    return ApiError(
        f"{name} is not supported by this server", param=name.partition(".")[0], code="unsupported_parameter"
    )
