"""What a caller gets back: the texts of a request, why each ended, and what it cost."""

from dataclasses import dataclass

from forge.engine.task import Logprobs, Readout
from forge.reasons import FinishReason
from forge.trace.records import RequestMetrics


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request's output."""

    index: int
    """Which of the request's `n` samples this is."""
    text: str
    """Without the stop string or the end-of-sequence token that ended it."""
    token_ids: tuple[int, ...]
    """Every token sampled, the one that ended it included."""
    finish_reason: FinishReason | None
    """None while it has not ended."""
    stop_reason: str | int | None
    """The stop string, or the end-of-sequence token's id, where `finish_reason` is `stop`."""
    logprobs: tuple[Logprobs | None, ...] | None
    """For each output token the most probable alternatives, where they were asked for. The token itself is always among
    them, in last place if it is not one of them."""
    metrics: RequestMetrics
    errors: tuple[str, ...] = ()
    """What went wrong on the way: what ended it where `finish_reason` is `error`, or a draft that it lost."""
    readout: Readout | None = None
    """The answer to the request's task, where it asked for more than tokens; None while there is none."""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt: str | None
    """The prompt's text, or None where it was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[Logprobs | None, ...] | None
    """For each prompt token its log probability and the most probable alternatives; the first, which nothing precedes,
    has None. None altogether where they were not asked for."""
    seed: int
    """The seed that was used, chosen or drawn."""

    @property
    def metrics(self) -> RequestMetrics:
        """The metrics of the first sample."""
        return self.outputs[0].metrics
