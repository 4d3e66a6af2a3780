"""The requests that an engine knows: what they may ask for, their sequences, and their outputs.

A request is checked (`PromptLimits`), becomes one sequence for each of its `n` samples (`SequenceBuilder`), and is
known until its output has been read and it is forgotten (`RequestState`).
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from operator import index

from forge.engine.output_text import OutputText
from forge.engine.outputs import CompletionOutput, RequestOutput
from forge.engine.policies import SchedulerConfig
from forge.engine.sampling_params import SamplingParams
from forge.engine.sequence import Sequence
from forge.engine.structured_output import Grammar
from forge.engine.task import GENERATE, NO_READOUT, Logprobs, Task
from forge.errors import UsageError
from forge.model.model import Model
from forge.reasons import PoolExhausted
from forge.tokenizer import StreamingDetokenizer, Tokenizer
from forge.trace.records import RequestMetrics


@dataclass(frozen=True)
class RequestState:
    """A request and its samples."""

    prompt: str | None
    """Its text, where it was given as one."""
    sequences: tuple[Sequence, ...]

    @property
    def seq_ids(self) -> tuple[int, ...]:
        return tuple(sequence.seq_id for sequence in self.sequences)

    def output(self, metrics: Callable[[int], RequestMetrics]) -> RequestOutput:
        """Build the output so far. metrics: from a sequence id to what it cost."""
        first = self.sequences[0]
        return RequestOutput(
            first.request_id,
            self.prompt,
            tuple(first.token_ids[: first.num_prompt_tokens]),
            tuple(_completion(sequence, metrics(sequence.seq_id)) for sequence in self.sequences),
            _prompt_logprobs(first),
            first.seed,
        )


def _completion(sequence: Sequence, metrics: RequestMetrics) -> CompletionOutput:
    return CompletionOutput(
        index=sequence.sample_index,
        text=sequence.output_text.text,
        token_ids=tuple(sequence.output_token_ids),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        logprobs=tuple(sequence.logprobs) if sequence.params.logprobs is not None else None,
        metrics=metrics,
        errors=tuple(sequence.errors),
        readout=sequence.readout,
    )


def _prompt_logprobs(sequence: Sequence) -> tuple[Logprobs | None, ...] | None:
    """Return the log probabilities of the prompt's tokens as far as they are computed; None where not asked for."""
    score_from, readout = sequence.task.score_from, sequence.readout or sequence.partial
    if score_from is None:
        return None
    return (*[None] * score_from, *readout.scores) if readout is not NO_READOUT else ()


@dataclass(frozen=True)
class PromptLimits:
    """The limits that a prompt has to keep."""

    vocab_size: int
    max_model_len: int
    max_cached_len: int
    """Tokens of the longest sequence that the cache could hold."""
    block_size: int

    def checked(self, prompt_token_ids: Items[int]) -> list[int]:
        """Return the prompt as a list. Raises `UsageError` if it cannot run."""
        try:
            token_ids = list(map(index, prompt_token_ids))
        except TypeError:
            raise UsageError("a prompt is text or a list of token ids, which are whole numbers") from None
        if not token_ids:
            raise UsageError(
                "the prompt is empty: a model continues text, and this one has no beginning-of-text token to "
                "start from, so give it at least one word"
            )
        self.check_ids((min(token_ids), max(token_ids)))
        length, size = len(token_ids), self.block_size
        if length > self.max_model_len:
            raise UsageError(
                f"the prompt has {length} tokens and the context holds {self.max_model_len}: shorten the prompt, or "
                "raise --max-model-len where the model allows it"
            )
        if length > self.max_cached_len:
            raise UsageError(
                f"the prompt has {length} tokens, which take {-(-length // size)} blocks of {size}, and the whole pool "
                f"has {self.max_cached_len // size}: shorten it, or raise --num-blocks"
            )
        return token_ids

    def check_ids(self, token_ids: Items[int], subject: str = "") -> None:
        """Raise `UsageError` for an id that is no token."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise UsageError(f"{subject}token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")

    def check_bias(self, params: SamplingParams) -> None:
        """Raise `UsageError` if the sampling parameters name an id that is no token."""
        self.check_ids(list(dict(params.logit_bias or ())), "logit_bias: ")
        self.check_ids(params.stop_token_ids or (), "stop_token_ids: ")
        self.check_ids(params.allowed_token_ids or (), "allowed_token_ids: ")


def check_answerable(task: Task, model: Model) -> None:
    """Raise `UsageError` for a task that a model of this kind cannot answer."""
    if task.pooling and not model.embeds:
        raise UsageError("this model has no hidden states: take a real one for embeddings")
    if not model.generates and not task.pooling and not (task.candidates and model.labels):
        uses = "it classifies: forge classify, forge rerank" if model.labels else "it embeds: forge embed"
        raise UsageError(f"this model generates no text; {uses}")


def check_drafts(names: Items[str], available: Items[str]) -> None:
    """Raise `UsageError` for the name of a draft that an engine does not have."""
    unknown = [name for name in names if name not in available]
    if unknown:
        known = f"it has {', '.join(available)}" if available else "it has none (--speculate)"
        raise UsageError(f"drafts: this engine has no {unknown[0]!r:.80}; {known}")


class SequenceBuilder:
    """Completes the sequences of requests that have been checked."""

    def __init__(self, tokenizer: Tokenizer, limits: PromptLimits, config: SchedulerConfig, has_scratch: bool):
        """has_scratch: there are blocks for prefill-only requests."""
        self._tokenizer, self._limits = tokenizer, limits
        self._prefill_only = config.prefill_only and has_scratch

    def complete(self, first: Sequence, grammar: Grammar | None, begins_computed: bool) -> tuple[Sequence, ...]:
        """Decide whether one forward pass answers a request's first sequence, and cut its output tokens to what context
        and pool leave. Return it with the request's further samples.

        begins_computed: another engine has computed its beginning.
        """
        params, pool_size = first.params, self._limits.max_cached_len
        if first.task is not GENERATE:
            first.prefill_only, first.max_output_tokens = True, int(first.task.sample)
            return (first,)
        longest = min(pool_size, self._limits.max_model_len)
        room = longest - first.num_prompt_tokens + 1  # the last output token needs no slot: it is not computed
        if room < first.max_output_tokens:
            first.max_output_tokens = room
            first.length_limit = PoolExhausted(pool_size) if longest == pool_size else None
        if params.prompt_logprobs is not None:
            first.task = Task(first.max_output_tokens > 0, score_from=1, top=params.prompt_logprobs)
        uses_cache = first.retain_cache or first.continues_from is not None or begins_computed
        if self._prefill_only and not uses_cache:
            first.prefill_only = first.max_output_tokens <= 1 and params.n == 1
        samples = (
            replace(
                first,
                seq_id=first.seq_id + index,
                sample_index=index,
                token_ids=list(first.token_ids),
                output_text=self.new_text(params),
                matcher=grammar.new_matcher() if grammar is not None else None,
            )
            for index in range(1, params.n)
        )
        return (first, *samples)

    def new_text(self, params: SamplingParams) -> OutputText:
        """Return the empty text of a new output."""
        detokenizer = StreamingDetokenizer(self._tokenizer)
        return OutputText(detokenizer, params.stop or (), params.include_stop_str_in_output, params.min_tokens)

    def rebuild_text(self, sequence: Sequence) -> None:
        """Recompute a sequence's text and log probabilities from its tokens."""
        del sequence.logprobs[sequence.num_output_tokens :]
        output_text = self.new_text(sequence.params)
        for token_id in sequence.output_token_ids:
            output_text.push(token_id)
        sequence.output_text = output_text
