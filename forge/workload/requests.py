"""Many requests made from a seed, and a run of them: who comes when, with how long a prompt, for how many tokens.

The same seed makes the same requests, whatever runs them. Arrivals are of one of two clocks: seconds are the wall's, so
that a faster engine has shorter queues; steps are the engine's own, so that every machine sees the same run.

A recorded run is a workload too: when its requests arrived, how long their prompts and outputs were. A trace has no
texts (`forge.trace.recorder`), so the prompts are cut from the passage that made-up ones are of.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from forge.engine.engine import Engine
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.errors import UsageError
from forge.trace.recorder import read_trace
from forge.trace.records import StepRecord

PRIORITIES = 3
"""How many priorities there are; under the order `priority`, each request draws one."""
_NAP = 0.02
"""Seconds between two looks at the clock while nothing runs."""
PASSAGE = (
    "Long before the mill had a wheel, the river kept the children of the valley company. It told them of the "
    "mountain where it was born, of a fox who had crossed it on the ice, and of the lantern that an old woman hung "
    "over the ford when the fog came down. Each evening somebody asked for the story of the ferry that went out and "
    "did not return, and each evening the river began it in another way. Some heard of a silver bell, some of a queen "
    "without a crown, and the youngest, who always fell asleep too early, dreamed the end."
)
"""The text that prompts are cut from, so that a model has something to go on with."""


class Encoder(Protocol):
    """Anything that turns a text into token ids."""

    def encode(self, text: str) -> Sequence[int]: ...


@dataclass(frozen=True)
class Request:
    """A request of a workload."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival: float = 0.0
    """The time of its arrival on the workload's clock, from the beginning of the run."""
    priority: int = 0
    num_speculative_tokens: int | None = None
    """Draft tokens per cycle at most; None for what the engine is set to."""
    sampling: SamplingParams | None = None
    """Its parameters; None means `max_tokens` greedy tokens."""
    prompt: str | None = None
    """The prompt's text, where it is known."""

    @property
    def params(self) -> SamplingParams:
        """The parameters that the engine gets."""
        k = self.num_speculative_tokens
        return self.sampling or SamplingParams(self.max_tokens, ignore_eos=True, num_speculative_tokens=k)


@dataclass(frozen=True)
class Workload:
    """The requests of a benchmark, and how they arrive."""

    requests: tuple[Request, ...]
    """The requests in the order of their arrival."""
    clock: Literal["seconds", "steps"] = "seconds"

    @property
    def output_tokens(self) -> int:
        """The number of output tokens at most."""
        return sum(request.max_tokens for request in self.requests)


@dataclass(frozen=True)
class Range:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> "Range":
        """Parse `16`, or `16:256`. Raises `UsageError`, naming the option."""
        low, colon, high = text.partition(":")
        try:
            parsed = cls(int(low), int(high if colon else low))
        except ValueError:
            raise UsageError(
                f"{option} is a number of tokens or two of them, such as 16:256, and not {text!r}"
            ) from None
        if not 1 <= parsed.low <= parsed.high:
            raise UsageError(f"{option} {text}: a range goes from at least 1 upwards")
        return parsed

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Arrival:
    """The times at which requests come."""

    kind: Literal["all", "poisson", "every"]
    rate: float = 0.0
    """For `poisson`, requests per second on average; for `every`, steps between two requests."""

    @classmethod
    def parse(cls, text: str) -> "Arrival":
        """Parse `all` at once, `poisson:20` (a second, by the wall's clock) or `every:3` (steps). Raises
        `UsageError`."""
        kind, _, rate = text.partition(":")
        if text == "all":
            return cls("all")
        try:
            value = float(rate)
        except ValueError:
            value = 0.0
        if kind == "poisson" and 0 < value < 1e6:
            return cls("poisson", value)
        if kind == "every" and 0 < value < 1e6:
            return cls("every", value)
        raise UsageError(
            f"--arrival is all, poisson:20 (requests a second) or every:3 (one in as many steps), not {text!r}"
        )

    def times(self, number: int, rng: random.Random) -> list[float]:
        """Return when each of `number` requests comes."""
        if self.kind == "all":
            return [0.0] * number
        if self.kind == "every":
            return [index * self.rate for index in range(number)]
        return list(accumulate(rng.expovariate(self.rate) for _ in range(number)))


def make_workload(
    tokenizer: Encoder,
    number: int,
    prompt_tokens: Range,
    max_tokens: Range,
    arrival: Arrival | None = None,
    *,
    priorities: bool = False,
    seed: int = 0,
) -> Workload:
    """Make `number` requests whose prompts begin at random places of one passage. Raises `UsageError` for none."""
    if number < 1:
        raise UsageError(f"--requests must be at least 1, got {number}")
    arrival = arrival or Arrival("all")
    rng = random.Random(seed)
    urgency = random.Random(f"{seed}: priorities")  # of its own, so that the rest is the same without
    passage = list(tokenizer.encode(PASSAGE))
    requests = []
    for moment in arrival.times(number, rng):
        prompt = _cut(passage, rng.randrange(len(passage)), prompt_tokens.draw(rng))
        priority = urgency.randrange(PRIORITIES) if priorities else 0
        requests.append(Request(prompt, max_tokens.draw(rng), moment, priority))
    return Workload(tuple(requests), "steps" if arrival.kind == "every" else "seconds")


def passage_prompts(tokenizer: Encoder, lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Return a prompt of each length in tokens, from random places of the passage."""
    passage, rng = list(tokenizer.encode(PASSAGE)), random.Random(seed)
    return [_cut(passage, rng.randrange(len(passage)), length) for length in lengths]


def _cut(passage: Sequence[int], start: int, length: int) -> tuple[int, ...]:
    """Return `length` tokens from `start` on; after the last comes the first."""
    return tuple(passage[(start + index) % len(passage)] for index in range(length))


class WorkloadRun:
    """A workload on its way through an engine: iterate to advance it, then read `outputs`.

    With `together` the requests come in groups of that many, and a group begins when the one before it has ended:
    static batching, as it was before schedulers decided anew in every step. With `callers` at most that many run: one
    comes when another has ended (a closed loop).
    """

    def __init__(self, engine: Engine, workload: Workload, together: int | None = None, callers: int | None = None):
        self._engine, self._workload, self._together, self._callers = engine, workload, together, callers
        self._submitted: list[str] = []
        self._open: list[str] = []
        """The submitted requests that have not ended."""
        self._pending = list(enumerate(workload.requests))
        self._outputs: dict[str, RequestOutput] = {}
        self._steps = 0
        self._began: float | None = None
        self.refused: list[tuple[int, str]] = []
        """Requests by their number that could never run, and why."""

    def __iter__(self) -> Iterator[StepRecord]:
        while self._pending or self._engine.has_unfinished():
            self._submit()
            if self._engine.has_unfinished():
                record = self._engine.step()
                self._steps += 1
                if record.finished:
                    self._collect()
                yield record
            elif self._pending:
                self._wait()

    def abort(self) -> None:
        """Abort what has not ended; what has not come will not."""
        self._pending.clear()
        for request_id in self._open:
            self._engine.abort(request_id)
        self._collect()

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs of the requests that have ended, in the order of their arrival."""
        return [self._outputs[request_id] for request_id in self._submitted if request_id in self._outputs]

    @property
    def _now(self) -> float:
        """The time on the workload's clock."""
        if self._workload.clock == "steps":
            return self._steps
        if self._began is None:
            self._began = time.perf_counter()
        return time.perf_counter() - self._began

    def _submit(self) -> None:
        """Submit the requests that have come."""
        if self._together is not None and self._engine.has_unfinished():
            return
        now, room = self._now, self._together or len(self._pending)
        if self._callers is not None:
            room = self._callers - len(self._open)
        while self._pending and room and self._pending[0][1].arrival <= now:
            number, request = self._pending.pop(0)
            request_id, token_ids, text = f"request-{number}", request.prompt_token_ids, request.prompt
            try:
                self._engine.add_request(request_id, token_ids, request.params, prompt=text, priority=request.priority)
            except UsageError as error:
                self.refused.append((number, str(error)))
                continue
            self._submitted.append(request_id)
            self._open.append(request_id)
            room -= 1

    def _wait(self) -> None:
        """Let time pass until a request arrives: nothing runs."""
        if self._workload.clock == "steps":
            self._steps = max(self._steps, int(self._pending[0][1].arrival + 0.999999))
        else:
            time.sleep(max(0.0, min(_NAP, self._pending[0][1].arrival - self._now)))

    def _collect(self) -> None:
        """Take the outputs of requests that have ended out of the engine."""
        ended = [request_id for request_id in self._open if not self._engine.is_unfinished(request_id)]
        for request_id in ended:
            self._outputs[request_id] = self._engine.output(request_id)
            self._engine.forget(request_id)
            self._open.remove(request_id)


class RecordedRequest(NamedTuple):
    """One sample of a recorded request."""

    arrival: float
    """Seconds after the first request."""
    prompt_tokens: int
    output_tokens: int
    """The tokens that it got; if it had not ended when the record did, the most that it could get."""
    priority: int


def recorded_requests(path: Path) -> tuple[RecordedRequest, ...]:
    """Read the requests of a trace in the order of their arrival, one for each sample.

    Raises `UsageError` for a file that does not exist or in which no request arrived, `TraceError` for one that is not
    a trace.
    """
    steps = read_trace(path).steps
    ended = {finish.seq_id for step in steps for finish in step.finished}
    outputs = Counter(token.seq_id for step in steps for token in step.tokens)
    arrivals = [arrival for step in steps for arrival in step.arrived]
    if not arrivals:
        raise UsageError(f"{path}: no request arrived in this record: record a run from its beginning")
    began = min(arrival.arrived for arrival in arrivals)
    requests = []
    for arrival in arrivals:
        moment, length = arrival.arrived - began, arrival.num_prompt_tokens
        for seq_id in arrival.seq_ids:
            num_tokens = max(1, outputs[seq_id] if seq_id in ended else arrival.max_output_tokens)
            requests.append(RecordedRequest(moment, length, num_tokens, arrival.priority))
    return tuple(sorted(requests, key=lambda request: request.arrival))


def recorded_workload(path: Path, tokenizer: Encoder, seed: int = 0) -> Workload:
    """Build the workload of a trace: its arrivals in wall-clock time, lengths and priorities. seed: where in the
    passage each prompt begins. Raises what `recorded_requests` does."""
    recorded = recorded_requests(path)
    prompts = passage_prompts(tokenizer, [request.prompt_tokens for request in recorded], seed)
    pairs = zip(prompts, recorded, strict=True)
    requests = (Request(prompt, request.output_tokens, request.arrival, request.priority) for prompt, request in pairs)
    return Workload(tuple(requests))
