"""What a request asks of the sampler, checked once, before anything is computed."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from forge.engine.structured_output import StructuredOutput
from forge.errors import UsageError
from forge.option import option

_SAMPLING, _SPECULATION = "Sampling", "Speculation"
_GREATEST = sys.float_info.max


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are chosen and when to stop. The defaults are greedy decoding of up to 16 tokens.

    Raises `UsageError` for a value that has no meaning (NaN and infinities included), naming it.
    """

    max_tokens: int = option(16, "Output tokens at most.", _SAMPLING)
    """Output tokens at most. 0 is valid only where `prompt_logprobs` are asked for."""
    temperature: float = option(0.0, "0 is greedy: always the most probable token.")
    """0 takes the likeliest token; otherwise logits are divided by it before anything is filtered."""
    top_p: float = option(1.0, "Keep the most probable tokens up to this sum.", _SAMPLING)
    """Keep the smallest set of likeliest tokens whose probabilities reach this sum (Holtzman et al. 2020)."""
    top_k: int = option(0, "Keep this many of the most probable; 0 keeps all.", _SAMPLING)
    """Keep the k likeliest tokens. 0 keeps all."""
    min_p: float = option(0.0, "Keep tokens this times as probable as the most probable.", _SAMPLING)
    """Keep tokens at least this times as likely as the likeliest (Nguyen et al. 2024)."""
    repetition_penalty: float = option(1.0, "Above 1 repeats less.", _SAMPLING)
    """Logits of tokens already in the prompt or output are divided by it if positive, multiplied if negative
    (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that are in the output already, as OpenAI's API has it."""
    frequency_penalty: float = 0.0
    """Taken from them once for each time that they are."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    """What is added to the logits of single tokens, by token id; kept as pairs, ascending."""
    seed: int | None = option(None, "Same seed, same tokens.", shown="drawn, and shown")
    """Same seed, same tokens. None draws a fresh one, which the output reports."""
    stop: str | Sequence[str] | None = option((), "End before this text; may be repeated.", _SAMPLING)
    """Output ends before the first of these strings, which may span tokens."""
    ignore_eos: bool = option(False, "Go on past the end-of-text token.", _SAMPLING)
    """Go on past the end-of-sequence token."""
    n: int = option(1, "Samples of the same prompt.", _SAMPLING)
    """Independent samples of the same prompt."""
    logprobs: int | None = option(None, "List this many likeliest tokens per output token.", "Output")
    """How many of the likeliest tokens to report with each output token; None reports none."""
    prompt_logprobs: int | None = option(None, "The same for each prompt token.", "Output")
    """The same for each prompt token."""
    stop_token_ids: Sequence[int] | None = ()
    """Output ends with any of these tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the token of `stop_token_ids`, in the text."""
    min_tokens: int = 0
    """The first so many output tokens cannot end it: EOS and `stop_token_ids` are not chosen, stop strings are not
    searched. Log probabilities are the model's own all the same."""
    structured: StructuredOutput | None = None
    """The form that the output must have. Tokens that its grammar refuses get no probability."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may come, end-of-sequence too; None allows all."""
    bad_words: Sequence[str] | None = ()
    """Texts that the output never contains, however they are cut into tokens."""
    drafts: Sequence[str] | None = option(
        None, "Which of several drafts propose for this request, by name; may be repeated.", _SPECULATION, shown="all"
    )
    """Which proposers propose for it, by name: None for all that the engine has, () for none."""
    num_speculative_tokens: int | None = option(
        None, "Draft tokens a cycle of this request, at most; 0 for none.", _SPECULATION, shown="--k"
    )
    """Draft tokens per cycle at most; 0 is off, None is what the engine is set to. The output does not depend on it."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "drafts"):
            texts = getattr(self, name)
            if texts is not None or name != "drafts":
                object.__setattr__(self, name, (texts,) if isinstance(texts, str) else tuple(texts or ()))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require_number(name, getattr(self, name))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            _check(bool(self.allowed_token_ids), "allowed_token_ids is empty: name at least one token, or leave it out")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                _require_int(f"a token id of {name}", token_id)
        _check(_are_texts(self.bad_words), "bad_words are texts, none of them empty")
        _check(all(isinstance(name, str) for name in self.drafts or ()), f"drafts are names, got {self.drafts!r}")
        for name in ("max_tokens", "top_k", "n", "min_tokens"):
            _require_int(name, getattr(self, name))
        if self.seed is not None:
            _require_int("seed", self.seed)
        for name in ("logprobs", "prompt_logprobs", "num_speculative_tokens"):
            value = getattr(self, name)
            if value is not None:
                _require_int(name, value)
                _check(value >= 0, f"{name} must not be negative, got {value}")
        _check(self.max_tokens >= 0, f"max_tokens must not be negative, got {self.max_tokens}")
        _check(
            self.max_tokens > 0 or self.prompt_logprobs is not None,
            "max_tokens is 0: ask for at least 1 token, or for prompt log-probabilities",
        )
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be between 0 and max_tokens, which is {self.max_tokens}, got {self.min_tokens}",
        )
        _check(self.temperature >= 0, f"temperature must not be negative, got {self.temperature:g}")
        _check(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p:g}")
        _check(self.top_k >= 0, f"top_k must not be negative (0 keeps every token), got {self.top_k}")
        _check(0 <= self.min_p <= 1, f"min_p must be between 0 and 1, got {self.min_p:g}")
        _check(self.repetition_penalty > 0, f"repetition_penalty must be above 0, got {self.repetition_penalty:g}")
        _check(self.n >= 1, f"n must be at least 1, got {self.n}")
        _check(self.seed is None or 0 <= self.seed < 2**64, f"seed must be between 0 and 2^64 - 1, got {self.seed}")
        _check(_are_texts(self.stop), "a stop string must be text and not empty")
        if self.structured is not None:
            _check(isinstance(self.structured, StructuredOutput), "structured must be a StructuredOutput")
            _check(
                not self.ignore_eos and not self.min_tokens,
                "ignore_eos and min_tokens do not go with structured output: its grammar says where the output ends",
            )
        self.plain_greedy  # noqa: B018 (cached now, because every token asks for it)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def plain_greedy(self) -> bool:
        """Greedy, without log probabilities, penalties or a grammar: the argmax of the logits is the token."""
        return self.greedy and not self.changes_logits and self.needs_token_only

    @cached_property
    def needs_token_only(self) -> bool:
        """Whether the logits, the sampling parameters and the tokens so far decide the token, and nothing else about it
        was requested. Then a device can choose it."""
        return self.structured is None and not self.filters_tokens and self.logprobs is None

    @property
    def filters_tokens(self) -> bool:
        return self.allowed_token_ids is not None or bool(self.bad_words) or self.min_tokens > 0

    @cached_property
    def changes_logits(self) -> bool:
        """Whether a penalty or a bias changes the model's logits."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


def _bias_pairs(bias: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    pairs = dict(bias or ())
    for token_id, value in pairs.items():
        _require_int("a token id of logit_bias", token_id)
        _check(token_id >= 0, f"a token id of logit_bias must not be negative, got {token_id}")
        _require_number(f"the logit_bias of token {token_id}", value)
    return tuple(sorted(pairs.items()))


def _are_texts(texts: Sequence[str] | None) -> bool:
    return all(isinstance(text, str) and text for text in texts or ())


def _require_number(name: str, value: object) -> None:
    is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and -_GREATEST <= value <= _GREATEST
    _check(is_finite, f"{name} must be a finite number, got {value!r}")


def _require_int(name: str, value: object) -> None:
    _check(isinstance(value, int) and not isinstance(value, bool), f"{name} must be a whole number, got {value!r}")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)
