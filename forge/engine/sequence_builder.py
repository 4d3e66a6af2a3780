"""From a request to its sequences: one for each of its `n` samples, classified by what answers it."""

from collections.abc import Sequence as Items
from dataclasses import replace

from forge.engine.output_text import OutputText
from forge.engine.policies import SchedulerConfig
from forge.engine.requests import PromptLimits
from forge.engine.sampling_params import SamplingParams
from forge.engine.sequence import Sequence
from forge.engine.structured_output import Grammar
from forge.engine.task import GENERATE, Task
from forge.reasons import PoolExhausted
from forge.tokenizer import StreamingDetokenizer, Tokenizer


class SequenceBuilder:
    """Completes the sequences of requests that have been checked."""

    def __init__(self, tokenizer: Tokenizer, limits: PromptLimits, config: SchedulerConfig, has_scratch: bool):
        """has_scratch: there are blocks for prefill-only requests."""
        self._tokenizer, self._limits = tokenizer, limits
        self._prefill_only = config.prefill_only and has_scratch

    def max_output_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the output tokens that the request asks for, or that context and pool leave if these are fewer."""
        room = self._limits.longest - num_prompt_tokens + 1  # the last output token needs no slot: it is not computed
        return min(params.max_tokens, room)

    def complete(self, first: Sequence, grammar: Grammar | None, begins_computed: bool) -> tuple[Sequence, ...]:
        """Classify a request's first sequence, and return it with the request's further samples.

        begins_computed: another engine has computed its beginning.
        """
        self._classify(first, first.retain_cache or first.continues_from is not None or begins_computed)
        return first, *self._samples_of(first, grammar)

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

    def _classify(self, sequence: Sequence, uses_cache: bool) -> None:
        """Decide whether one forward pass answers it, and note whether the pool limits its length.

        uses_cache: it leaves its cache in place, or begins with one.
        """
        params, pool_size = sequence.params, self._limits.max_cached_len
        if sequence.max_output_tokens < params.max_tokens and self._limits.longest == pool_size:
            sequence.length_limit = PoolExhausted(pool_size)
        if sequence.task is not GENERATE:
            sequence.length_limit = None
            sequence.prefill_only, sequence.max_output_tokens = True, int(sequence.task.sample)
        elif self._prefill_only and not uses_cache:
            sequence.prefill_only = sequence.max_output_tokens <= 1 and params.n == 1
            if sequence.prefill_only and params.prompt_logprobs is not None:
                samples = sequence.max_output_tokens > 0
                sequence.task = Task(samples, score_from=1, top=params.prompt_logprobs)

    def _samples_of(self, first: Sequence, grammar: Grammar | None) -> Items[Sequence]:
        """Build the further samples of a request. All share one list of prompt log probabilities."""
        if first.prefill_only:
            return ()
        return [
            replace(
                first,
                seq_id=first.seq_id + index,
                sample_index=index,
                token_ids=list(first.token_ids),
                output_text=self.new_text(first.params),
                matcher=grammar.new_matcher() if grammar is not None else None,
                waiting_samples=[],
                errors=[],
                logprobs=[],
            )
            for index in range(1, first.params.n)
        ]
