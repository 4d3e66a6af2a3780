"""Many engines on one clock that is not the machine's: what two cores cannot show.

Each replica is a scheduler and a prefix cache, as they are, without a model: a step takes the time that `StepTime`
says, which is measured on a real one, and its tokens are the trace's. The routers are those of the server, unchanged.
They learn of the caches and the loads by the same updates, as late as `Transport` says, and know as little of how long
an answer becomes. A run depends on its arguments alone.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

import numpy as np

from forge.cache.prefix import PrefixKvCache
from forge.cluster.events import EventLog, LoadMeter
from forge.cluster.fleet import Fleet, RouteRequest
from forge.cluster.routers import DEFAULT_THRESHOLD, Router, new_router
from forge.engine.policies import SchedulerConfig
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence as EngineSequence
from forge.engine.step_plan import Outcome, StepPlan
from forge.reasons import FinishReason
from forge.trace.records import RouteRecord
from forge.workload.conversations import Client, Conversation, KnownRequest, TraceShape, Turn, conversations


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step: a fixed part, and one for each row by its kind. The defaults were measured on the bundled
    model `tales` with one thread of a Zen 4 core: prompts of 16 to 512 tokens, 1 to 32 sequences that decode."""

    fixed: float = 0.3
    prefill_token: float = 0.11
    decode_token: float = 0.11

    def of(self, plan: StepPlan) -> float:
        """Seconds that a step takes."""
        decodes = sum([item.phase == "decode" for item in plan.items])
        prefilled = sum([item.num_tokens for item in plan.items]) - decodes
        return (self.fixed + self.prefill_token * prefilled + self.decode_token * decodes) / 1e3


def fit_step_time(steps: Sequence[tuple[int, int, float]]) -> StepTime:
    """Fit a step's time to measured steps by least squares: of each the prompt tokens that it computed, the sequences
    that it decoded, and its milliseconds."""
    prefilled, decoded, milliseconds = np.array(steps, float).T
    rows = np.stack([np.ones_like(prefilled), prefilled, decoded], axis=1)
    return StepTime(*[max(0.0, float(cost)) for cost in np.linalg.lstsq(rows, milliseconds, rcond=None)[0]])


@dataclass(frozen=True)
class Transport:
    """Seconds between a client and an engine. The defaults are assumed, a millisecond each way; `forge cluster --part
    measured` measures them."""

    to_engine: float = 0.001
    """From a request's sending until the engine has it: the front's reading, its decision, and the wire."""
    to_front: float = 0.001
    """From a step's end until what it brought is there: tokens, cache events and the load."""


@dataclass(frozen=True)
class SimulationOptions:
    """What is simulated."""

    replicas: int = 8
    router: str = "prefix"
    trace: TraceShape = field(default_factory=TraceShape)
    load: float = 1.2
    """Conversations begin so fast that this share of all replicas' time would be used without a cache hit: above 1, the
    replicas keep up only because of their caches."""
    num_blocks: int = 1024
    """Of each replica's cache."""
    block_size: int = 64
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    step_time: StepTime = field(default_factory=StepTime)
    transport: Transport = field(default_factory=Transport)
    max_tokens: int | None = None
    """What every request allows, as a chat does that may fill the context; None for just what its answer takes. The
    answers are the same: it is what an engine and a router must not count as work."""
    threshold: int = DEFAULT_THRESHOLD
    """Of the routers that know prefixes."""
    fronts: int = 1
    """Each with a router of its own; requests come to them in turn."""


@dataclass
class SimulationResult:
    """What came of a run. Times are simulated, except where they say otherwise."""

    options: SimulationOptions
    num_requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that were not cached."""
    requests_by_replica: list[int] = field(default_factory=list)
    computed_by_replica: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    """Milliseconds from a request's arrival to its first token, sorted."""
    tpot: list[float] = field(default_factory=list)
    """Milliseconds per token after the first, of each request, sorted."""
    seconds: float = 0.0
    """From the first arrival to the last end."""
    decision_seconds: float = 0.0
    """Real ones, that the router took for all of its decisions."""
    routing_entries: int = 0
    """Keys that the router knew at the end."""
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def balance(self) -> float:
        """Requests of the busiest replica over the mean."""
        return max(self.requests_by_replica) * len(self.requests_by_replica) / max(1, self.num_requests)

    @property
    def decisions_per_second(self) -> float:
        return self.num_requests / self.decision_seconds if self.decision_seconds else 0.0


class SimulatedReplica:
    """An engine without a model."""

    def __init__(self, name: str, options: SimulationOptions):
        self.name = name
        self.cache = PrefixKvCache(options.num_blocks, options.block_size)
        self.events = EventLog()
        self.events.observe(self.cache.index)
        self.step_time, self.max_tokens = options.step_time, options.max_tokens
        config = SchedulerConfig(options.max_num_seqs, options.max_num_batched_tokens, prefill_only=False)
        self.scheduler = Scheduler(self.cache, config)
        self.turns: dict[int, tuple[Turn, float]] = {}
        """From a sequence's id to its request and when that arrived."""
        self.plan: StepPlan | None = None
        """The step under way."""
        self.num_requests = self.computed_tokens = 0
        self.meter = LoadMeter(self.scheduler)

    def add(self, seq_id: int, turn: Turn, arrived: float, cached_tokens: int) -> None:
        """arrived: when it came to its front. cached_tokens: what the router expects to be cached."""
        params = SamplingParams(max_tokens=self.max_tokens or len(turn.answer), ignore_eos=True)
        sequence = EngineSequence(
            seq_id=seq_id,
            request_id="",
            sample_index=0,
            token_ids=turn.prompt,
            num_prompt_tokens=len(turn.prompt),
            max_output_tokens=params.max_tokens,
            params=params,
            seed=0,
            output_text=None,  # type: ignore[arg-type]  # no text is made of these tokens
        )
        self.turns[seq_id] = turn, arrived
        self.scheduler.add(sequence)
        self.meter.take(seq_id, cached_tokens)
        self.num_requests += 1

    def begin_step(self) -> float:
        """Plan a step; return the seconds that it takes."""
        self.plan = self.scheduler.schedule()
        return self.step_time.of(self.plan)

    def end_step(self) -> tuple[list[int], list[int]]:
        """Commit the step under way: the sequences that got their first token, and those that ended."""
        plan, outcomes = self.plan, []
        assert plan is not None
        first, ended = [], []
        for item in plan.items:
            if item.phase != "decode":
                self.computed_tokens += item.num_tokens
            if not item.chooses_token:
                outcomes.append(Outcome(item.seq_id, len(item.sequence.token_ids), (), None))
                continue
            sequence, answer = item.sequence, self.turns[item.seq_id][0].answer
            done = sequence.num_output_tokens
            is_last = done + 1 == len(answer)
            if not done:
                first.append(item.seq_id)
            if is_last:
                ended.append(item.seq_id)
            reason: FinishReason | None = "length" if is_last else None
            outcomes.append(Outcome(item.seq_id, len(sequence.token_ids), (answer[done],), reason))
        for sequence in plan.exhausted:
            ended.append(sequence.seq_id)
            outcomes.append(Outcome(sequence.seq_id, 0, (), "length"))
        self.scheduler.commit(plan, tuple(outcomes))
        self.plan = None
        return first, ended


class Simulation:
    """Replicas, a router and a trace, advanced from event to event."""

    def __init__(self, options: SimulationOptions, clients: Sequence[Client] = ()):
        """clients: send their requests in place of the trace's."""
        self.options, self._clients = options, clients
        self.replicas = {str(number): SimulatedReplica(str(number), options) for number in range(options.replicas)}
        self.routers: list[Router] = []
        for front in range(options.fronts):
            fleet = Fleet()
            for name in self.replicas:
                fleet.join(name)
            self.routers.append(new_router(options.router, fleet, options.threshold, front))
        self.result = SimulationResult(options)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._names = count(), count()
        self._trace = conversations(options.trace)
        self._most = inf if clients else options.trace.num_requests
        """Requests that are sent in all."""
        self._begun = 0
        """Requests that are sent or sure to be sent."""
        self._first_tokens: dict[int, float] = {}
        """From a sequence's id to when the front had its first token."""
        self.now = 0.0
        self._arrival_seconds = self._mean_arrival()

    def run(self) -> SimulationResult:
        """Until the last request has ended."""
        if self._clients:
            for client in self._clients:
                self._next_turn(client, self.now)
        else:
            self._begin_conversations()
        while self._queue:
            self.now, _, happen = heapq.heappop(self._queue)
            happen()
        result = self.result
        result.seconds = self.now
        result.ttft.sort()
        result.tpot.sort()
        result.requests_by_replica = [replica.num_requests for replica in self.replicas.values()]
        result.computed_by_replica = [replica.computed_tokens for replica in self.replicas.values()]
        result.computed_tokens = sum(result.computed_by_replica)
        result.routing_entries = len(self.routers[0].fleet.prefixes)
        for replica in self.replicas.values():
            assert not replica.scheduler.has_unfinished() and not replica.turns, "a request was lost"
        return result

    def _mean_arrival(self) -> float:
        """Seconds between two beginnings, from the load that is wanted."""
        shape, cost = self.options.trace, self.options.step_time
        branches = 1 + shape.agents * (shape.branches - 1)
        history = shape.turns * (shape.user_tokens + shape.answer_tokens) / 2
        prompt = shape.system_tokens + shape.agents * shape.task_tokens + history
        request_ms = cost.prefill_token * prompt + shape.answer_tokens * (cost.decode_token + cost.fixed / 8)
        return shape.turns * branches * request_ms / 1e3 / (self.options.load * self.options.replicas)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), happen))

    def _begin_conversations(self) -> None:
        if self._begun >= self._most:
            return
        for conversation in next(self._trace):
            self._next_turn(conversation, self.now - conversation.shape.think_seconds)
        self._at(self.now + self._arrival_seconds, self._begin_conversations)

    def _next_turn(self, conversation: Conversation | Client, now: float) -> None:
        if self._begun >= self._most:
            return
        turn = conversation.next_turn(now)
        if turn is not None:
            self._begun += 1
            self._at(max(self.now, turn.at), lambda: self._arrive(turn))

    def _arrive(self, turn: Turn) -> None:
        seq_id, size = next(self._names), self.options.block_size
        router = self.routers[seq_id % len(self.routers)]
        keys = next(iter(self.replicas.values())).cache.prefix_keys(turn.prompt[:-1])
        request = RouteRequest(str(seq_id), keys, len(turn.prompt), size)
        decided = time.perf_counter()
        decision = router.route(request)
        self.result.decision_seconds += time.perf_counter() - decided
        self.result.num_requests += 1
        self.result.prompt_tokens += len(turn.prompt)
        self.result.reasons[decision.why] = self.result.reasons.get(decision.why, 0) + 1
        replica, arrived = self.replicas[decision.replica], self.now
        at_engine = arrived + self.options.transport.to_engine
        self._at(at_engine, lambda: self._begin(replica, seq_id, turn, arrived, decision))

    def _begin(self, replica: SimulatedReplica, seq_id: int, turn: Turn, arrived: float, decision: RouteRecord) -> None:
        """A request has come to its engine."""
        replica.add(seq_id, turn, arrived, decision.cached_tokens)
        self._report(replica, (str(seq_id),))
        if replica.plan is None:
            self._begin_step(replica)

    def _begin_step(self, replica: SimulatedReplica) -> None:
        self._at(self.now + replica.begin_step(), lambda: self._end_step(replica))

    def _end_step(self, replica: SimulatedReplica) -> None:
        first, ended = replica.end_step()
        later = self.now + self.options.transport.to_front
        for seq_id in first:
            self._first_tokens[seq_id] = later
            self.result.ttft.append((later - replica.turns[seq_id][1]) * 1e3)
        for seq_id in ended:
            turn, _ = replica.turns.pop(seq_id)
            first_token = self._first_tokens.pop(seq_id, later)
            if len(turn.answer) > 1:
                self.result.tpot.append((later - first_token) * 1e3 / (len(turn.answer) - 1))
            self._next_turn(turn.conversation, later)
        self._report(replica)
        if replica.scheduler.has_unfinished():
            self._begin_step(replica)

    def _report(self, replica: SimulatedReplica, accepted: tuple[str, ...] = ()) -> None:
        """Send every front an update: the requests accepted, the load, and what changed in the cache."""
        load, events = replica.meter.load(), replica.events.take()

        def take() -> None:
            for router in self.routers:
                for request_id in accepted:
                    router.fleet.end(request_id)
                router.fleet.report(replica.name, load)
                if events and router.needs_events:
                    router.fleet.apply(replica.name, events)

        self._at(self.now + self.options.transport.to_front, take)


def simulate(options: SimulationOptions) -> SimulationResult:
    """A whole run."""
    return Simulation(options).run()


def replay(options: SimulationOptions, requests: Sequence[KnownRequest], num_clients: int) -> SimulationResult:
    """Simulate clients that send these requests in order, each its next one as soon as its last one is answered."""
    shared = iter(requests)
    return Simulation(options, [Client(shared) for _ in range(num_clients)]).run()
