"""One sample of one request on its way through the engine: its tokens, and what is needed to extend them.

In files that use this class, `collections.abc.Sequence` is imported as `Items`.
"""

from dataclasses import dataclass, field

from forge.engine.output_text import OutputText
from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import Matcher
from forge.engine.task import GENERATE, NO_READOUT, Logprobs, Readout, Task
from forge.model.model import Draw
from forge.reasons import FinishReason, PoolExhausted


@dataclass(eq=False)
class Sequence:
    """A sequence of tokens, of any kind of request.

    Where it is (waiting, running, swapped, retained) is the container that holds it, and no field here; that it has
    ended is its `finish_reason`. The tokens are the truth: cache, text and place in the queue are rebuilt from them.
    """

    seq_id: int
    request_id: str
    sample_index: int
    """Which of the request's `n` samples this is."""
    token_ids: list[int]
    """Prompt and output so far."""
    num_prompt_tokens: int
    max_output_tokens: int
    """What the request asked for, or what the context and the pool leave, whichever is less."""
    params: SamplingParams
    seed: int
    output_text: OutputText
    task: Task = GENERATE
    """What is wanted of it."""
    finish_reason: FinishReason | None = None
    """Why it ended; set once, when it ends."""
    waiting_samples: list["Sequence"] = field(default_factory=list, init=False)
    """The request's further samples, until the step that computes their prompt: then they fork its cache. Where it ends
    before that, they end with it."""

    # A plain decode step reads no field below.

    matcher: Matcher | None = None
    """Says which tokens may come next, where the output must have a form. It follows from the tokens."""
    prefill_only: bool = False
    """True if one forward pass answers it: its blocks live for one step, and it never decodes. Where a step has too few
    spare tokens for it, it is scheduled as a generation, in chunks, and this becomes False."""
    arrival: int = 0
    """Its place in the order of arrival; a request's samples share one."""
    priority: int = 0
    """Lower is served first, where the order of admission is by priority."""
    salt: str = ""
    """Sequences with different salts share nothing in the cache."""
    retain_cache: bool = False
    """Retain the cache when the sequence ends, for another to continue from."""
    continues_from: int | None = None
    """The ended sequence whose retained cache this one takes over, if it is still there when this one begins."""
    times_preempted: int = 0
    times_deferred: int = 0
    """Steps that it waited for another sequence to compute blocks that it begins with too."""
    prefix_keys: tuple[int, ...] = ()
    """The keys of its prompt's full blocks in the prefix index; empty where no prefixes are planned."""
    stop_reason: str | int | None = None
    errors: list[str] = field(default_factory=list, init=False)
    """What went wrong on its way, whether it ended it or not."""
    logprobs: list[Logprobs | None] = field(default_factory=list, init=False)
    readout: Readout | None = None
    """The answer to its task, once there is one. It follows from the prompt."""
    partial: Readout = NO_READOUT
    """The readout of the chunks of its prompt so far. An embedding is the sum of the hidden states."""
    length_limit: PoolExhausted | None = None
    """Set where the pool, and not the request or the context, limits its length."""

    def add_error(self, error: str) -> None:
        """Add an error message to the output. Adding it again does nothing."""
        if error not in self.errors:
            self.errors.append(error)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def draw(self) -> Draw:
        """What decides its next token, beside the logits."""
        return Draw(self.params, self.seed, self.sample_index, self.token_ids, self.num_prompt_tokens, self.matcher)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def pending_task(self) -> Task:
        """What is still wanted of it: a generation whose prompt is scored goes on as any other."""
        return self.task if self.readout is None else GENERATE

    @property
    def max_cacheable_tokens(self) -> int:
        """The number of its tokens that may come from the cache.

        The last one is computed in any case, for its logits. Rows whose logits are wanted are computed too.
        """
        length = len(self.token_ids)
        return length - 1 if self.task is GENERATE else self.pending_task.logit_rows(0, length).start
