"""One sample of one request on its way through the engine: its tokens, and what is needed to extend them."""

from dataclasses import dataclass, field

from forge.engine.output_text import OutputText
from forge.engine.sampling_params import SamplingParams
from forge.trace.records import FinishReason


@dataclass(eq=False)
class Sequence:
    """A sequence of tokens. Its state (waiting, running, swapped, kept) is the container that holds it, and no field
    here. The tokens are the truth about it; what the cache has of them can always be computed again."""

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
    arrival: int = 0
    """Its place in the order in which sequences came; a request's samples have the same."""
    priority: int = 0
    """Lower is served first, where the order of admission is by priority."""
    salt: str = ""
    """Sequences with different salts share nothing in the cache."""
    keep_cache: bool = False
    """Keep the cache when the sequence ends, for another to continue from."""
    continues: int | None = None
    """The kept sequence whose cache this one takes over."""
    drafts: tuple[str, ...] | None = None
    """Which proposers guess for it, by name; None for all that the engine has."""
    forks: list["Sequence"] = field(default_factory=list)
    """Further samples of the same prompt. They begin as forks of this one in the step that has computed the prompt."""
    times_preempted: int = 0
    times_deferred: int = 0
    """Steps that it waited for another to compute blocks that it begins with too."""
    prefix_keys: tuple[int, ...] = ()
    """What the full blocks of its prompt are known by in the prefix index."""
    finish_reason: FinishReason | None = None
    """Why it ended; set once, when it ends."""
    stop_reason: str | int | None = None
    errors: list[str] = field(default_factory=list)
    """What went wrong on its way, whether it ended it or not."""
    logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: list[tuple[tuple[int, float], ...] | None] = field(default_factory=list)

    def note(self, error: str) -> None:
        """Something went wrong on its way. Noting it again does nothing."""
        if error not in self.errors:
            self.errors.append(error)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log probabilities of prompt tokens are wanted and not all there."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def most_cached(self) -> int:
        """How many of its tokens may come from the cache. The last one is computed in any case, for its logits; where
        the prompt's log probabilities are wanted, all of them are."""
        return 0 if self.needs_prompt_logprobs else len(self.token_ids) - 1
