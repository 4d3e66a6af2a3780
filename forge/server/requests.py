"""From a client's body to what the engine takes: token ids and `SamplingParams`, within the server's limits."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.grammar.sandbox import CompilersBusy, GrammarSandbox
from forge.grammar.thinking import thinks
from forge.grammar.vocabulary import Vocabulary
from forge.server import schema
from forge.server.engine_client import Prompt
from forge.server.errors import ApiError, validation_error
from forge.server.messages import Ready
from forge.server.settings import Settings
from forge.server.structured import parts_of, shown_call, shown_tools, structured_output

_AS_GIVEN = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
    *("min_tokens", "drafts", "num_speculative_tokens", "include_stop_str_in_output"),
)
"""Fields of a body that are fields of `SamplingParams`."""
LONG_WORK = 8_192
"""Characters, tokens or log probabilities from which on a text or an answer is handled beside the loop."""


_Result = TypeVar("_Result")
_Ids = TypeVar("_Ids", list[int], list[int] | None, dict[int, float])


class Cut(NamedTuple):
    """How much of a prompt that is too long is kept, instead of refusing it."""

    num_tokens: int
    """Tokens that are kept."""
    side: str

    def applied(self, items: Any) -> Any:
        """Return what the cut keeps of token ids or of a text."""
        return items[: self.num_tokens] if self.side == "right" else items[max(0, len(items) - self.num_tokens) :]


class RequestReader:
    """Reads bodies for one model."""

    def __init__(self, ready: Ready, settings: Settings):
        self.tokenizer, self.limits = ready.tokenizer(), settings.limits
        self.model_names = tuple(dict.fromkeys((*settings.model_names, ready.model_name)))
        self.vocab_size, self.max_model_len = ready.vocab_size, ready.max_model_len
        self.default_sampling = ready.default_sampling
        """What a body that does not say gets; greedy where this does not say either."""
        self._longest = f"this model's maximum context length is {self.max_model_len} tokens"  # clients look for it
        self._most_chars = self.max_model_len * max(map(len, self.tokenizer.spec.tokens))
        self.grammars = GrammarSandbox(lambda: Vocabulary.of(self.tokenizer, self.vocab_size))

    def model(self, name: str | None) -> str:
        """Return the model's name for the answer. Raises `ApiError` if the server has no model of that name."""
        if name and name not in self.model_names:
            raise ApiError(
                f"the model {name[:80]!r} does not exist here; this server has {self.model_names[0]}",
                404,
                param="model",
                code="model_not_found",
            )
        return name or self.model_names[0]

    def accept(self, body: schema.RequestBody) -> str:
        """Return the model's name as the answer has it. Raises `ApiError` for another model, and for a parameter that
        requests what this server does not do."""
        schema.check_supported(
            body.model_extra or {}, schema.UNSUPPORTED | {"best_of": (getattr(body, "n", None) or 1,)}
        )
        return self.model(body.model)

    def cut_of(self, body: schema.RequestBody) -> Cut | None:
        """Return how a body wants long prompts cut; None if it does not."""
        if not isinstance(body, schema.CutPrompt):
            return None
        number = body.truncate_prompt_tokens
        if number is None:
            return None
        if number == 0:
            raise ApiError("truncate_prompt_tokens keeps at least 1 token", param="truncate_prompt_tokens")
        kept = number if number > 0 else max(1, self.max_model_len - body.room_for_answer)
        return Cut(kept, body.truncation_side or "left")

    # Prompts

    async def prompts(self, prompt: str | list[Any], param: str = "prompt", **how: Any) -> list[Prompt]:
        """Return one `Prompt` for each that the body has under the name `param`. `how` as for `one_prompt`."""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        self.check_number(prompt, param)
        return [await self.one_prompt(text, param, **how) for text in prompt]

    def check_number(self, prompts: Sequence[Any], param: str) -> None:
        """Raise `ApiError` for no prompts, and for too many."""
        most = self.limits.max_prompts
        if not 1 <= len(prompts) <= most:
            raise ApiError(f"{param} has {len(prompts)} entries: give between 1 and {most}", param=param)

    async def one_prompt(
        self,
        prompt: str | list[int],
        param: str = "prompt",
        *,
        parse: bool | None = False,
        bos: bool | None = None,
        cut: Cut | None = None,
    ) -> Prompt:
        """Encode one prompt. `parse`: whether the text of a control token becomes that token. `bos` false: never put
        BOS first."""
        if not isinstance(prompt, str):
            return Prompt(self.checked_ids(prompt if cut is None else cut.applied(prompt), param))
        if cut is None:
            return Prompt(self.checked_ids(await self.encode(prompt, param, parse=parse, bos=bos), param), prompt)
        part = cut._replace(num_tokens=self._most_chars).applied(prompt)  # which has all the tokens that are kept
        token_ids = cut.applied(await self.encode(part, param, parse=parse, bos=bos))
        return Prompt(self.checked_ids(token_ids, param), self.tokenizer.decode(token_ids))

    async def chat_prompt(self, body: schema.Conversation) -> Prompt:
        """Write a conversation as the model's chat template does. Raises `ApiError` as `accept` does."""
        self.accept(body)
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            error = "continue_final_message goes on with the last message: set add_generation_prompt to false"
            raise ApiError(error, param="continue_final_message")
        messages = body.messages or []
        for message in messages:
            schema.check_supported(message.model_extra or {}, schema.UNSUPPORTED_IN_MESSAGES, "messages.")
        begins = not continues and body.add_generation_prompt is not False
        template: dict[str, Any] = {"add_generation_prompt": begins, "continue_final_message": continues}
        template |= {"tools": shown_tools(body), "enable_thinking": thinking_of(body)}

        def encode() -> tuple[str, list[int]]:
            turns = [message.model_dump(exclude_none=True) for message in messages]
            for turn in turns:
                turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
                turn.setdefault("content", "")
                if "reasoning" in turn:  # vLLM's name
                    turn.setdefault("reasoning_content", turn.pop("reasoning"))
                if "tool_calls" in turn:
                    turn["tool_calls"] = [shown_call(call) for call in turn["tool_calls"]]
            special = {"parse_special": bool(body.parse_special), "add_special_tokens": bool(body.add_special_tokens)}
            return self.tokenizer.encode_chat(turns, **special, **template)

        size = sum(map(_num_chars, messages))
        self._check_size(size, "messages")
        is_plain = not template["tools"] and not any(message.tool_calls or message.model_extra for message in messages)
        try:
            rendered, token_ids = await beside_the_loop(size + 100 * len(messages) if is_plain else LONG_WORK, encode)
        except UsageError as error:
            raise ApiError(str(error), param="messages") from None
        except RecursionError:
            raise ApiError("the messages or tools are nested too deeply", param="messages") from None
        cut = self.cut_of(body)
        if cut is not None and len(token_ids) > cut.num_tokens:
            token_ids = cut.applied(token_ids)
            rendered = self.tokenizer.decode(token_ids)
        return Prompt(self.checked_ids(token_ids, "messages"), rendered)

    async def encode(
        self, text: str, param: str = "prompt", *, parse: bool | None = False, bos: bool | None = None
    ) -> list[int]:
        """Return the token ids of `text`."""

        def encode() -> list[int]:
            return self.tokenizer.encode(text, allow_special=bool(parse), add_special_tokens=bos is not False)

        return await self.encoded(len(text), encode, param)

    async def encoded(self, num_chars: int, encode: Callable[[], list[int]], param: str) -> list[int]:
        """Return the result of `encode`. Refuses a text that no number of tokens could hold before it looks at it."""
        self._check_size(num_chars, param)
        try:
            return await beside_the_loop(num_chars, encode)
        except UsageError as error:
            raise ApiError(str(error), param=param) from None

    def _check_size(self, num_chars: int, param: str) -> None:
        if num_chars > self._most_chars:
            raise self.too_long(f"{num_chars} characters", param)

    def checked_ids(self, token_ids: list[int], param: str) -> list[int]:
        """Check a prompt's tokens and return them. Raises `ApiError` for none, too many, or one that is not in the
        vocabulary."""
        if not token_ids:
            raise ApiError(f"{param} is empty: give it at least one token", param=param)
        if len(token_ids) > self.max_model_len:
            raise self.too_long(f"{len(token_ids)} tokens", param)
        return self._known_ids(token_ids, param)

    def _known_ids(self, token_ids: _Ids, param: str, prefix: str = "") -> _Ids:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ApiError(f"{prefix}token ids lie between 0 and {self.vocab_size - 1}", param=param)
        return token_ids

    def too_long(self, length: str, param: str) -> ApiError:
        message = f"{self._longest}, and {param} has {length}: shorten it"
        return ApiError(message, param=param, code="context_length_exceeded")

    # Parameters

    def max_tokens(self, asked: int | None, default: int, num_prompt_tokens: int, param: str) -> int:
        """Return how many tokens may come: as many as were requested, which must fit behind the prompt; or without a
        `max_tokens`, as many of the `default` as fit."""
        room = self.max_model_len - num_prompt_tokens
        if asked is None:
            return max(1, min(default, room))  # there is room for one behind the fullest: its own keys are never needed
        if asked > room:
            raise ApiError(
                f"{self._longest}, of which the prompt's {num_prompt_tokens} leave {room}, and {param} is {asked}: "
                f"ask for fewer, shorten the prompt, or leave {param} out",
                param=param,
                code="context_length_exceeded",
            )
        return asked

    def completion_params(self, body: schema.CompletionRequest, prompts: Sequence[Prompt]) -> SamplingParams:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        max_tokens = self.max_tokens(body.max_tokens, body.room_for_answer, longest, "max_tokens")
        if max_tokens == 0 and not body.echo:
            raise ApiError("max_tokens is 0: ask for at least 1 token, or for the prompt with echo", param="max_tokens")
        scored = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
        if body.prompt_logprobs not in (None, scored):
            raise ApiError(f"prompt_logprobs must be as logprobs, {scored}, or left out", param="prompt_logprobs")
        self._check_prompt_logprobs(body)
        if max_tokens == 0 and scored is None:
            scored = 0
        return self.params(body, len(prompts), max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)

    def chat_params(
        self, body: schema.ChatRequest, num_prompt_tokens: int, is_thinking: bool = False
    ) -> SamplingParams:
        """Build the sampling parameters of a chat. Raises `ApiError`. is_thinking: the prompt ends inside the thinking
        part."""
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = self.max_tokens(getattr(body, param), self.max_model_len, num_prompt_tokens, param)
        self._check_prompt_logprobs(body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        fields: dict[str, Any] = {"logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs}
        structured = fields["structured"] = structured_output(body)
        if structured is not None and (is_thinking or self._may_think(body)):
            fields["structured"] = replace(structured, thinking="open" if is_thinking else "may_open")
        return self.params(body, 1, max_tokens, **fields)

    def _may_think(self, body: schema.ChatRequest) -> bool:
        """Return whether thinking may come before the form: if it was requested, and before text that only tool calls
        constrain."""
        thinking = thinking_of(body)
        if thinking is None and body.tools and body.response_format is None and body.json_schema is None:
            return body.tool_choice in (None, "auto") and thinks(self.tokenizer)
        return bool(thinking)

    def params(self, body: schema.Sampling, num_prompts: int, max_tokens: int, **fields: Any) -> SamplingParams:
        n = body.n or 1
        if body.stream_options is not None and not body.stream:
            raise ApiError("stream_options are for streams: set stream to true", param="stream_options")
        if n * num_prompts > self.limits.max_choices:
            raise ApiError(f"{num_prompts} prompts times n = {n} is more than {self.limits.max_choices}", param="n")
        values = {
            **{name: getattr(body, name) for name in _AS_GIVEN},
            "top_k": None if body.top_k is None else max(0, body.top_k),
            "logit_bias": self._bias(body.logit_bias),
            "seed": None if body.seed is None else body.seed % 2**64,
            "stop": self._texts((body.stop,) if isinstance(body.stop, str) else body.stop, "stop"),
            "bad_words": self._texts(body.bad_words, "bad_words"),
            "stop_token_ids": self._known_ids(body.stop_token_ids, "stop_token_ids"),
            "allowed_token_ids": self._known_ids(body.allowed_token_ids, "allowed_token_ids"),
            "n": n,
            **({} if "structured" in fields else {"structured": structured_output(body)}),
            **fields,
        }
        stated = {name: value for name, value in values.items() if value is not None}
        try:
            return SamplingParams(max_tokens, **{**self.default_sampling, **stated})
        except UsageError as error:
            raise ApiError(str(error), param=str(error).split()[0]) from None

    async def compiled(self, structured: StructuredOutput, body: schema.Sampling) -> StructuredOutput:
        """Return a body's form once it is known to compile within the limits. Others are read meanwhile. Raises
        `ApiError`."""
        for beginning, param, part in parts_of(body, structured):
            try:
                checked = await asyncio.wrap_future(self.grammars.check(part))
            except UsageError as error:
                raise ApiError(beginning + str(error), param=param) from None
            except CompilersBusy as error:
                raise ApiError(str(error), 429, param=param, code="queue_full", retry_after=1) from None
        return replace(checked, thinking=structured.thinking)

    def _texts(self, texts: Sequence[str] | None, param: str) -> tuple[str, ...]:
        most, longest = self.limits.max_stop, self.limits.max_stop_chars
        if len(texts or ()) > most:
            raise ApiError(f"{param} has {len(texts or ())} strings, at most {most} go", param=param)
        if not all(1 <= len(text) <= longest for text in texts or ()):
            raise ApiError(f"a string of {param} has between 1 and {longest} characters", param=param)
        return tuple(texts or ())

    def _bias(self, bias: dict[str, float] | None) -> dict[int, float] | None:
        if bias is None:
            return None
        try:
            by_token = {int(token_id): value for token_id, value in bias.items()}
        except ValueError:
            raise ApiError("the keys of logit_bias are token ids", param="logit_bias") from None
        return self._known_ids(by_token, "logit_bias", "logit_bias: ")

    def _check_prompt_logprobs(self, body: schema.OpenAiRequest) -> None:
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs are for whole answers: set stream to false", param="prompt_logprobs")


def _num_chars(message: schema.Message) -> int:
    """Count the characters of a message's texts."""
    if isinstance(message.content, list):
        return sum([len(text) for part in message.content if isinstance(text := part.get("text"), str)])
    return len(message.content or "")


def chat_from(
    body: schema.RequestBody, not_here: Mapping[str, tuple[Any, ...]], fields: Mapping[str, Any]
) -> schema.ChatRequest:
    """Build the chat that another API's body is translated to: `fields`, and what else the body has of a chat's.

    not_here: a chat's parameters that have another name in that API, or no place, with the values that ask for nothing.
    Raises `ApiError`."""
    extra = body.model_extra or {}
    schema.check_supported(extra, not_here)
    shared = {name: value for name, value in extra.items() if name not in not_here}
    try:
        return schema.ChatRequest.model_validate({**shared, "model": body.model, **fields})
    except ValidationError as error:
        raise validation_error([{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]) from None


def text_parts(content: Any, kinds: Collection[str], param: str, refusal: str) -> Any:
    """Return another API's content as a chat message has it. Raises `ApiError` for parts of none of these `kinds`.
    refusal: the message, with a place for the kind."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in kinds:
            raise ApiError(f"{param}: {refusal.format(str(kind)[:40])}", param=param)
    return [{"type": "text", "text": part.get("text")} for part in content]


def special_of(body: schema.Sampling | schema.TokenizeRequest) -> dict[str, Any]:
    """Return what a body says about control tokens in a prompt's text, as arguments of `one_prompt`."""
    return {"parse": body.parse_special is not False, "bos": body.add_special_tokens}


def thinking_of(body: schema.Conversation) -> bool | None:
    """Return whether the body requests thinking; None leaves it to the template."""
    thinking = (body.chat_template_kwargs or schema.ChatTemplateVariables()).enable_thinking
    if thinking is None and isinstance(body, schema.ChatRequest) and body.reasoning_effort == "none":
        return False
    return thinking


_BESIDE = ThreadPoolExecutor(1, "forge-beside-the-loop")
"""One thread: each that waits for the interpreter's lock makes the loop wait a switch interval longer for it."""


async def beside_the_loop(size: int, work: Callable[[], _Result]) -> _Result:
    """Do `work` on another thread if it takes long: `size` is in characters, tokens or log probabilities."""
    return await asyncio.get_running_loop().run_in_executor(_BESIDE, work) if size >= LONG_WORK else work()
