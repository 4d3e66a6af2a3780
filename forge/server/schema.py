"""What clients may send: OpenAI's parameters, the field's extensions to them, and the native ones.

Types are strict and numbers finite. Of the parameters of OpenAI's, vLLM's, SGLang's, llama.cpp's and Anthropic's bodies
that this server does not have, one that would change the answer is refused by its name, unless its value asks for
nothing (`check_supported`). One that `UNSUPPORTED` does not have and no body declares is ignored, as everywhere: it
labels a request (`user`, `metadata`, `session_id`), or it qualifies a parameter that is refused (`xtc_threshold`,
`dry_base`, `mirostat_tau`).

pydantic, which FastAPI brings, and not msgspec beside it: one more dependency and 99 ms of start-up would replace no
class here, as the description of the endpoints is made from them.

A list is checked for its length before its items, and validation stops at the first wrong item: a body of a million
wrong items costs no more than one.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from forge.server.errors import ApiError

DEFAULT_TOKENS = 16
"""`max_tokens` of a completion that does not say."""
MAX_ITEMS = 8192
"""Items of any list but one of token ids: prompts, messages, documents."""
MAX_BIASES = 16_384
MAX_TOOLS = 128

NumLogprobs = Annotated[int, Field(ge=0, le=20)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)]
Prompts = str | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_ITEMS, fail_fast=True)]


def _few(biases: Any) -> Any:
    """Check the length of a dict before its items; Pydantic checks it after them."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"it should have at most {MAX_BIASES} entries, not {len(biases)}")
    return biases


class Body(BaseModel):
    """A request's body. Fields that are not known are refused."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class RequestBody(Body, extra="allow"):
    """What every endpoint's body has. What else a body has is kept, to be looked through (`check_supported`)."""

    model: str | None = None


RequestId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._:-]{1,128}$")]


class CutPrompt(RequestBody):
    """vLLM's: a prompt that is too long is cut instead of refused."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """Tokens that are kept; -1 keeps what fits beside the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """The side where tokens are cut off; None means left."""
    add_special_tokens: bool | None = None
    """Whether BOS is put before the prompt where the model wants it: by default yes, and no in a chat."""

    @property
    def room_for_answer(self) -> int:
        """The number of tokens that a prompt leaves room for if as much of it is kept as fits."""
        return 0


class StreamOptions(Body, extra="forbid"):
    """OpenAI's `stream_options`. What else it may hold there would change the answer, and is refused."""

    include_obfuscation: bool | None = None
    """Whether events are padded against eavesdroppers: never."""
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    """Every chunk has the usage so far."""


class StructuredOutputs(Body, extra="forbid", populate_by_name=True):
    """vLLM's: one of these. What else it may hold there would change the answer, and is refused."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(Body, extra="forbid", populate_by_name=True):
    """`strict` changes nothing here: a schema is always kept to."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body, extra="forbid", populate_by_name=True):
    """OpenAI's `response_format`. What else it may hold there would change the answer, and is refused."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """llama.cpp's place for the schema, of `json_object` too."""


class Sampling(CutPrompt):
    """What all endpoints that generate have in common."""

    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
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
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    cache_salt: str | None = None
    request_id: RequestId | None = None
    """The end of the answer's id."""
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    """llama.cpp's field for `structured_outputs.grammar`."""
    json_schema: dict[str, Any] | None = None
    """llama.cpp's field for `structured_outputs.json`."""
    drafts: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    """Names of the drafts that propose for this request. None means all of them, an empty list none."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    """Draft tokens per cycle at most, 0 for none; by default what the server is set to."""

    @property
    def room_for_answer(self) -> int:
        return DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream is to end with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.usage_wanted and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class OpenAiRequest(Sampling):
    """vLLM's extensions to both of OpenAI's endpoints."""

    response_format: ResponseFormat | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    """llama.cpp's: every chunk has the times so far, a whole answer those of all of it."""


class CompletionRequest(OpenAiRequest):
    """The body of `/v1/completions`."""

    prompt: Prompts
    logprobs: NumLogprobs | None = None
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


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatTemplateVariables(Body, extra="forbid"):
    """vLLM's `chat_template_kwargs`. Others than these are refused."""

    enable_thinking: bool | None = None


class Conversation(RequestBody):
    """What becomes a prompt by the model's chat template."""

    messages: Messages | None = None
    chat_template_kwargs: ChatTemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None


class ChatRequest(Conversation, OpenAiRequest):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    reasoning_effort: ReasoningEffort | None = None
    """`none` turns thinking off; any other leaves it to the model."""
    parallel_tool_calls: bool | None = None

    @property
    def room_for_answer(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 1


class GenerateRequest(Sampling):
    """The body of `/generate`."""

    prompt: str | TokenIds


class TokenizeRequest(Conversation):
    """The body of `/tokenize`: a text, or a conversation."""

    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    """llama.cpp's name of `add_special_tokens`."""
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    """llama.cpp's: each token with its text, or its bytes where they are no text."""


class DetokenizeRequest(RequestBody):
    """The body of `/detokenize`."""

    tokens: TokenIds


class EmbeddingRequest(CutPrompt):
    """The body of `/v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    request_id: RequestId | None = None


class RerankRequest(RequestBody):
    """The body of `/v1/rerank`."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    request_id: RequestId | None = None


class ScoreRequest(RequestBody):
    """The body of `/v1/score`."""

    text_1: str | Texts
    text_2: str | Texts
    request_id: RequestId | None = None


class ClassifyRequest(CutPrompt):
    """The body of `/classify`."""

    input: str | Texts
    labels: Annotated[list[str], Field(min_length=2, max_length=100, fail_fast=True)] | None = None
    request_id: RequestId | None = None


class TextOptions(Body, extra="forbid"):
    """The form of the answer, as OpenAI's `text`."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body, extra="forbid"):
    """OpenAI's `reasoning`: an effort of `none` turns thinking off, any other leaves it to the model. Thinking is shown
    as it is, and never summarized."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesRequest(RequestBody):
    """The body of `/v1/responses`. What else it has is the chat's: `temperature`, `top_k`, `seed` and so on."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    top_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    """Keep it for `previous_response_id`: yes, unless it says no or the server stores nothing."""
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None


# What no body declares


def harmless(rows: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Build a table from each name to the values that ask for nothing. rows: by names with spaces between them."""
    return {name: values for names, values in rows.items() for name in names.split()}


UNSUPPORTED = harmless(
    {
        """
            audio background_options context_management conversation image max_completion_tokens max_tool_calls
            moderation personality prediction prompt_cache_options reasoning_effort web_search_options allowed_token_ids
            chat_template ec_transfer_params guided_choice guided_grammar guided_json guided_regex kv_transfer_params
            messages previous_response prompt_embeds prompt_logprobs repetition_detection request_id
            truncate_prompt_tokens truncation_side custom_logit_processor lora_path json_schema n_predict container
            diagnostics inference_geo max_chunks_per_doc max_tokens_per_doc
        """: (),
        """
            background echo store continue_final_message enable_response_messages return_prompt_text
            return_token_offsets return_tokens_as_token_ids use_beam_search watermarking grammar_lazy
            post_sampling_probs reasoning_control return_progress return_tokens thinking_forced_open timings_per_token
        """: (False,),
        """
            add_generation_prompt include_reasoning normalize skip_special_tokens spaces_between_special_tokens
            use_activation cache_prompt parse_tool_calls
        """: (True,),
        """
            access_programs functions tools bad_words documents logits_processors logprob_token_ids
            previous_input_messages grammar_triggers lora response_fields samplers mcp_servers rank_fields
        """: ([],),
        """
            priority routed_experts_prompt_start min_new_tokens dry_multiplier dynatemp_range min_keep mirostat
            n_cache_reuse n_indent n_probs xtc_probability
        """: (0,),
        """
            thinking_token_budget adaptive_target id_slot reasoning_budget_tokens sse_ping_interval
            thinking_budget_tokens
        """: (-1,),
        "function_call tool_choice": ("none", "auto"),
        "modalities": (["text"],),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "suffix cache_salt ebnf regex grammar": ("",),
        "truncation": ("disabled",),
        "verbosity": ("medium",),
        "chat_template_kwargs media_io_kwargs mm_processor_kwargs vllm_xargs": ({},),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "length_penalty stream_interval n_cmpl repeat_penalty typical_p": (1,),
        "padding": ("do_not_pad",),
        "stop_regex": ([], ""),
        "embd_normalize": (2,),
        "reasoning_format": ("auto", "deepseek"),
        "t_max_predict_ms t_max_prompt_ms": (0, -1),
        "top_n_sigma": (-1, 0),
        "speed": ("standard",),
    }
)
"""Fields that are refused, with the values that ask for nothing. A field that a body declares is never looked up
here."""
UNSUPPORTED_IN_MESSAGES = harmless({"audio function_call": (), "refusal": ("",), "tools": ([],)})
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
