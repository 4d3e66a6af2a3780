"""What clients may send: OpenAI's parameters, the field's extensions to them, and the native ones.

Types are strict and numbers finite. A parameter that no engine could ignore without giving another answer, and that
this one does not have, is declared so that it can be refused by its name; one that nobody has heard of is ignored, as
everywhere in the field.
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
    """What all endpoints that generate have in common."""

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


class CompletionRequest(Sampling):
    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    min_tokens: int | None = None
    response_format: Any = None


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
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    min_tokens: int | None = None


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
    labels: Annotated[list[str], Field(min_length=2, max_length=100)]
    model: str | None = None


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "functions": ([],),
    "suffix": ("",),
    "min_tokens": (0,),
}
"""Values of unsupported parameters that ask for nothing."""

_UNSUPPORTED = (*_HARMLESS, "audio", "prediction", "web_search_options")


def unsupported_parameter(body: Sampling) -> str | None:
    """The first parameter that asks for what this server does not do."""
    for name in _UNSUPPORTED:
        value = getattr(body, name, None)
        if value is not None and value not in _HARMLESS.get(name, ()):
            return name
    best_of = getattr(body, "best_of", None)
    return "best_of" if best_of is not None and best_of != (body.n or 1) else None
