"""An engine of the hash model on the reader's code: requests run to their ends, with every rule of the scheduler looked
at after each step, and compared with what each request says alone."""

from functools import cache
from typing import Any

from forge.engine.sampling_params import SamplingParams
from forge.exercises.exercise import BROKEN, Trial
from forge.exercises.limits import time_limit
from forge.llm import LLM

_MOST_STEPS = 1500
_RUN_SECONDS = 20
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


class EngineTrial(Trial):
    """A subclass sets `llm` and `n`, the samples of each request."""

    llm: LLM
    n: int = 1

    def draw(self) -> str:
        scheduler = self.llm.engine.scheduler
        running = " ".join(str(seq_id) for seq_id in scheduler.running) or "none"
        waiting = " ".join(str(sequence.seq_id) for sequence in scheduler.queue) or "none"
        return f"running {running}   waiting {waiting}   free blocks {self.llm.engine.cache.num_available}"

    def run(self, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        """Run the requests, check every rule of the scheduler after each step, and return each sample's tokens."""
        params = SamplingParams(**GREEDY, n=self.n)
        run = self.llm.start(prompts, params)
        self.calls.append(f"run = llm.start({prompts}, SamplingParams(**{GREEDY}, n={self.n}))".replace("'", '"'))
        self.calls.append("")
        steps = iter(run)
        for number in range(1, _MOST_STEPS):
            self.calls[-1] = f"for _ in range({number}): next(run)"
            before = self.capture()
            try:
                next(steps)
            except StopIteration:
                samples = [sample for output in run.outputs for sample in output.outputs]
                return [tuple(sample.token_ids) for sample in samples]
            self.before = before
            try:
                self.llm.engine.scheduler.check_invariants()
            except AssertionError as error:
                raise self.broken("conforms", str(error)) from None
        raise self.broken("ends", f"after {_MOST_STEPS} steps requests still run")

    def compare(self, prompts: list[list[int]]) -> None:
        samples = self.limited(prompts)
        expected = _alone(tuple(map(tuple, prompts)), self.n)
        for number, (ours, theirs) in enumerate(zip(samples, expected, strict=True)):
            self.require(ours == theirs, "same-tokens", f"sample {number} says {ours[:8]}…, and alone {theirs[:8]}…")

    def limited(self, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        try:
            with time_limit(_RUN_SECONDS):
                return self.run(prompts)
        except BROKEN as error:
            raise self.mistake_of(error) from None


@cache
def _alone(prompts: tuple[tuple[int, ...], ...], n: int) -> list[tuple[int, ...]]:
    """Generate each request alone and without a cache, and return its samples' tokens."""
    llm = LLM("hash", kv="off", max_num_seqs=1)
    outputs = llm.generate([list(prompt) for prompt in prompts], SamplingParams(**GREEDY, n=n))
    return [tuple(sample.token_ids) for output in outputs for sample in output.outputs]
