"""What clients may send: OpenAI's parameters, the field's extensions to them, and the native ones.

Types are strict and numbers finite. A parameter of the field's that this server does not have, and that cannot be
ignored without giving another answer, is refused by its name; one that nobody has heard of is ignored, as everywhere.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(ge=-1e9, le=1e9)]
TokenIds = list[int]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Body):
    include_usage: bool | None = False


class Sampling(Body):
    """What all endpoints that generate have in common. What else a body has is kept, to be looked through."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    cache_salt: str | None = None

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream is to end with its usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)


class CompletionRequest(Sampling):
    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None


class Message(BaseModel):
    """One turn. What else it holds is for the model's chat template."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatTemplateVariables(Body):
    enable_thinking: bool | None = None


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: ChatTemplateVariables | None = None


class GenerateRequest(Sampling):
    prompt: str | TokenIds


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class EmbeddingRequest(Body):
    input: str | list[str] | TokenIds | list[TokenIds]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class RerankRequest(Body):
    query: str
    documents: list[str]
    model: str | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None


class ScoreRequest(Body):
    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class ClassifyRequest(Body):
    input: str | list[str]
    labels: Annotated[list[str], Field(min_length=2, max_length=100)] | None = None
    model: str | None = None


_HARMLESS: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    # vLLM's and llama.cpp's
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "json_schema": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Parameters that are not supported, with the values that ask for nothing."""


def unsupported_parameter(body: Sampling) -> str | None:
    """The first parameter that asks for what this server does not do."""
    for name, value in (body.model_extra or {}).items():
        if value is None or (name == "min_tokens" and body.ignore_eos and not body.stop):
            continue  # as load generators ask: nothing ends it before its length anyway
        if name in _HARMLESS and value not in _HARMLESS[name]:
            return name
        if name == "best_of" and value != (body.n or 1):
            return name
    return None
