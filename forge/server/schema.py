"""What clients may send: OpenAI's parameters, the field's extensions to them, and the native ones.

Types are strict and numbers finite. A parameter of the field's that this server does not have, and that cannot be
ignored without giving another answer, is refused by its name; an unknown one is ignored, as everywhere.

pydantic, which FastAPI brings, and not msgspec beside it: one more dependency and 99 ms of start-up would replace no
class here, as the description of the endpoints is made from them.

A list is checked for its length before its items, and validation stops at the first wrong item: a body of a million
wrong items costs no more than one.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_ITEMS = 8192
"""Items of any list but one of token ids: prompts, messages, documents."""
MAX_BIASES = 16_384
MAX_TOOLS = 128

TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)]
Prompts = str | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_ITEMS, fail_fast=True)]


def _few(biases: Any) -> Any:
    """Pydantic checks the length of a dict after its items."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"it should have at most {MAX_BIASES} entries, not {len(biases)}")
    return biases


class Body(BaseModel):
    """A request's body. Fields that are not known are refused."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    """Every chunk has the usage so far."""


class StructuredOutputs(Body):
    """vLLM's: one of these. What else it may hold there would change the answer, and is refused."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(Body):
    """`strict` changes nothing here: a schema is always kept to."""

    model_config = ConfigDict(populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


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
    stop: str | Texts | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_few)] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=128, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    parse_special: bool | None = None
    """Whether the text of a control token becomes that token: by default in a prompt, and not in a chat's messages."""
    add_special_tokens: bool | None = None
    """Whether BOS is put before the prompt where the model wants it: by default yes, and no in a chat."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    drafts: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    """Which drafts propose for this request, by name: by default all, none of them for an empty list."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    """Draft tokens per cycle at most, 0 for none; by default what the server is set to."""

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream is to end with its usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.usage_wanted and options is not None and bool(options.continuous_usage_stats)


class OpenAiRequest(Sampling):
    """vLLM's extensions to both of OpenAI's endpoints."""

    response_format: ResponseFormat | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None


class CompletionRequest(OpenAiRequest):
    """The body of `/v1/completions`."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None


class CalledFunction(Body):
    """Which function an earlier answer called, and with what: JSON as text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """A call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One turn. What else it holds is for the model's chat template."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON Schema of the arguments, which are an object; None where there are none."""
    strict: bool | None = None
    """The arguments keep to the schema in any case, and not only where `tool_choice` asks for a call."""


class Tool(Body):
    """OpenAI's tool. Those that a service runs itself are refused."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Which function must be called."""

    name: str


class NamedTool(Body):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatTemplateVariables(Body):
    """vLLM's `chat_template_kwargs`."""

    enable_thinking: bool | None = None


class ChatRequest(OpenAiRequest):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: ChatTemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class GenerateRequest(Sampling):
    """The body of `/generate`."""

    prompt: str | TokenIds


class TokenizeRequest(Body):
    """The body of `/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = True
    parse_special: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds


class EmbeddingRequest(Body):
    """The body of `/v1/embeddings`."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class RerankRequest(Body):
    """The body of `/v1/rerank`."""

    query: str
    documents: Texts
    model: str | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None


class ScoreRequest(Body):
    """The body of `/v1/score`."""

    text_1: str | Texts
    text_2: str | Texts
    model: str | None = None


class ClassifyRequest(Body):
    """The body of `/classify`."""

    input: str | Texts
    labels: Annotated[list[str], Field(min_length=2, max_length=100, fail_fast=True)] | None = None
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
    "echo": (False,),
    "max_completion_tokens": (),
    # vLLM's
    "bad_words": ([],),
    "allowed_token_ids": (),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "logprob_token_ids": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    # SGLang's
    "regex": ("",),
    "ebnf": ("",),
    "json_schema": (),
    "min_new_tokens": (0,),
    "stop_regex": ([], ""),
    "lora_path": (),
    "custom_logit_processor": (),
    # llama.cpp's
    "grammar": ("",),
    "lora": ([],),
    "n_predict": (),
    "n_probs": (0,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "samplers": ([],),
}
"""Parameters that are not supported, with the values that ask for nothing."""


def unsupported_parameter(body: Sampling) -> str | None:
    """The first parameter that asks for what this server does not do."""
    for name, value in (body.model_extra or {}).items():
        if value is None:
            continue
        if name in _HARMLESS and value not in _HARMLESS[name]:
            return name
        if name == "best_of" and value != (body.n or 1):
            return name
    return None
