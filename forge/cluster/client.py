"""What a front has in place of an engine: a client of all replicas, whose requests survive theirs.

`ClusterClient` is an `EngineClient` whose commands go to the engine that a router chooses, and the endpoints do not
know the difference. It keeps of every request what another engine needs to go on with it: the prompt, a seed, and the
tokens that have come. When an engine fails, its requests are placed elsewhere, and their clients read the same tokens
as if nothing had happened. A request ends with an error only where `ATTEMPTS` engines in a row bring no token of it.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from forge.cache.prefix_index import PrefixIndex
from forge.cluster.fleet import Breaker, Fleet, NoReplica, RouteRequest
from forge.cluster.link import Link, open_link, watch_pulses
from forge.cluster.metrics import ClusterMetrics
from forge.cluster.routers import DEFAULT_THRESHOLD, new_router
from forge.cluster.wire import MIN_PROMPT, Address, Place, ReplicaUpdate, Source, Unreachable, prefill_of
from forge.engine.handoff import Emitted
from forge.engine.output_text import OutputText
from forge.errors import ForgeError, UsageError
from forge.server import messages
from forge.server.engine_client import Generation, ResumableClient
from forge.server.errors import EngineDead, RequestFailed
from forge.server.exchange import current_exchange
from forge.server.resumption import SeenStream, StreamPosition, checksum_of, shown_id
from forge.tokenizer import StreamingDetokenizer
from forge.trace.records import RouteRecord, StepRecord

logger = logging.getLogger("forge.server")

ATTEMPTS = 3
"""Engines that may fail at a request one after another, without a token from any."""
HOMELESS_SECONDS = 60.0
"""How long a request that had an engine waits for another, where none runs."""
MAX_DECISIONS = 4096
"""Decisions that are remembered."""
ENGINES, PREFILLS = "engines", "prefills"


class NoHealthyReplica(EngineDead):
    """No engine can be reached at the moment."""

    def __init__(self) -> None:
        super().__init__("no engine can be reached at the moment: come back in some seconds")


@dataclass(eq=False)
class _Request:
    """A prompt that has not ended, with its tokens so far."""

    submit: messages.Submit
    token_ids: list[list[int]]
    """Of each sample, the output tokens that have come."""
    logprobs: list[list[Any]]
    ended: set[int] = field(default_factory=set)
    """Samples that have ended."""
    replica: str | None = None
    """The engine that has it; None while it waits for one."""
    prefill: str | None = None
    """The engine that computes its prompt, before another one takes it."""
    accepted: bool = False
    resumed: bool = False
    failures: int = 0
    """Engines that failed at it since its last token."""
    avoid: frozenset[str] = frozenset()
    """Those engines."""
    version: str = ""
    """Of the model of the engine that has it, or had it last."""
    pinned: str | None = None
    """The version that began it at another front."""
    trace: str = ""
    """The id of its HTTP request, where requests are logged."""
    first_token: float | None = None
    """When its first token came, in seconds on this process's monotonic clock."""
    homeless_since: float = 0.0

    def emitted(self) -> tuple[Emitted, ...]:
        """Return what another engine has to know. The last token of a sample that has ended is chosen again there."""
        emitted = []
        for sample, (tokens, logprobs) in enumerate(zip(self.token_ids, self.logprobs, strict=True)):
            end = -1 if sample in self.ended else None
            emitted.append(Emitted(tuple(tokens[:end]), tuple(logprobs[:end])))
        return tuple(emitted)


@dataclass(eq=False)
class _Question:
    """A question to one engine, or prefill-only requests to any."""

    command: messages.Ask | messages.AskTasks
    replica: str | None = None
    avoid: frozenset[str] = frozenset()
    began: float = field(default_factory=time.perf_counter)


class Pool:
    """The replicas that can be reached, by name; a router knows no others."""

    def __init__(self, router: str, threshold: int = DEFAULT_THRESHOLD):
        self.fleet = Fleet()
        self.router = new_router(router, self.fleet, threshold, secrets.randbits(32))
        self.breakers: dict[str, Breaker] = {}
        """Of every replica that Ray runs, whether it can be reached or not."""
        self.decisions: OrderedDict[str, RouteRecord] = OrderedDict()
        """The last of each request, the newest last."""

    def route(self, request: RouteRequest) -> RouteRecord:
        """Return the replica that a request goes to, and why. Raises `NoReplica`."""
        decision = self.router.route(request)
        self.decisions[request.request_id] = decision
        self.decisions.move_to_end(request.request_id)
        if len(self.decisions) > MAX_DECISIONS:
            self.decisions.popitem(last=False)
        return decision


class ClusterClient(ResumableClient):
    """Places requests at engines and follows them to their ends. `join` and `leave` say which engines there are."""

    def __init__(
        self,
        secret: bytes,
        ready: messages.Ready,
        router: str = "prefix",
        threshold: int = DEFAULT_THRESHOLD,
        apart: bool = False,
    ):
        """apart: whether engines of the kind `PREFILLS` compute prompts for the others."""
        super().__init__()
        self._device, self._block_size, self._tokenizer = ready.device, ready.block_size, ready.tokenizer()
        self.secret = secret
        """Of the engines that run now."""
        # What decodes comes with its blocks wherever it goes, so there prefixes decide where its prompt is computed.
        self.pools = {ENGINES: Pool("least-tokens" if apart else router, threshold)}
        if apart:
            self.pools[PREFILLS] = Pool(router, threshold)
        self._keys, self._numbers = count(secrets.randbits(60)), count(secrets.randbits(60))  # no other front has these
        self._index = PrefixIndex()
        self._links: dict[str, tuple[Pool, Link]] = {}
        self._addresses: dict[str, tuple[Pool, Address]] = {}
        """Of every replica that there is."""
        self._versions: dict[str, str] = {}
        """Of the model of every replica that there is, or that this front still has a connection to."""
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[str] = set()
        """Replicas that leave as soon as another one is connected to."""
        self._requests: dict[int, _Request] = {}
        self._asked: dict[int, _Question] = {}
        self._homeless: list[_Request] = []
        self.is_traced = False
        """Whether engines log requests, each with the id of its HTTP request."""
        self._loop_tasks: list[asyncio.Task[None]] = []
        self._is_watching = False
        self.metrics: ClusterMetrics = ClusterMetrics(ready, self)  # type: ignore[assignment]  # reads as one `Metrics`
        self.num_resumed = 0
        """Requests that went on at another engine."""

    async def connect(self) -> None:
        """Let replicas join from now on. Call it again after `on_record` is set: those that have joined send steps."""
        if self.on_record is not None:
            self._send(messages.Watch(True))
        if not self._loop_tasks:
            links = lambda: [link for _, link in self._links.values()]  # noqa: E731
            self._loop_tasks = [asyncio.create_task(watch_pulses(links)), asyncio.create_task(self._end_homeless())]

    def disconnect(self) -> None:
        self._is_leaving = True
        for task in (*self._loop_tasks, *self._connecting.values()):
            task.cancel()
        for _, link in list(self._links.values()):
            link.lose("this front has ended")

    @property
    def is_ready(self) -> bool:
        """Return whether a healthy engine can be reached; if prompts are computed apart, one of each kind."""
        return all(pool.fleet.num_healthy > 0 for pool in self.pools.values())

    def check_ready(self) -> None:
        """Raise `NoHealthyReplica` if no engine would answer a request."""
        if not self.is_ready:
            raise NoHealthyReplica

    def probe(self, patience: float) -> bool:
        """Return whether this front still watches its engines. `check_ready` says whether one can be reached."""
        return not any(task.done() for task in self._loop_tasks)

    def replica_of(self, request_id: str) -> str | None:
        """Return the engine that a request went to last, if that is remembered."""
        decision = self.pools[ENGINES].decisions.get(request_id)
        return None if decision is None else decision.replica

    # Replicas

    def join(self, name: str, kind: str, address: Address, version: str = "") -> None:
        """A replica has started: connect to it, and again whenever the connection is lost, until it leaves. version:
        what its model is called here; a stream that has begun goes on at the same version only."""
        if name not in self._addresses:
            pool = self.pools[kind]
            self._addresses[name], pool.breakers[name] = (pool, address), Breaker()
            self._versions[name] = version
            if name in self._links:  # it had left, and was still busy
                pool.fleet.join(name, version)
            else:
                self._connect_after(name, 0.0)

    def leave(self, name: str) -> None:
        """Send no new requests to a replica that has ended, or begins to. It may finish those that it has. The last one
        that can be reached gets requests until another one is connected to, if there is any."""
        if name in self._addresses:
            pool, _ = self._addresses[name]
            coming = [other for other in self._connecting if other != name and self._addresses[other][0] is pool]
            if coming and list(pool.fleet.replicas) == [name]:
                self._leaving.add(name)
                return
            del self._addresses[name]
            del pool.breakers[name]
            pool.fleet.leave(name)
            if name in self._connecting:
                self._connecting.pop(name).cancel()
            if name not in self._links:
                del self._versions[name]
            self._close_if_done(name)

    def replicas(self, kind: str) -> set[str]:
        """Return the names of all replicas of a kind that have joined and not left."""
        return {name for name, (pool, _) in self._addresses.items() if pool is self.pools[kind]}

    def _close_if_done(self, name: str) -> None:
        """Close the connection to a replica that has left, once it has none of this front's requests."""
        if name in self._addresses or name not in self._links:
            return
        if not any(name in (request.replica, request.prefill) for request in self._requests.values()):
            self._links[name][1].lose("it has left")

    def _connect_after(self, name: str, pause: float) -> None:
        if not self._is_leaving:
            task = self._connecting[name] = asyncio.get_running_loop().create_task(self._connect_to(name, pause))
            task.add_done_callback(lambda _: self._connecting.pop(name, None))

    async def _connect_to(self, name: str, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            pool, address = self._addresses[name]
            try:
                link = await open_link(name, address, self.secret, self._take_update, self._lost)
                break
            except Unreachable as error:
                pause = pool.breakers[name].failed(is_gone=True) or 0.0
                logger.warning("%s; next try in %.1f s", error, pause)
        self._links[name] = pool, link
        pool.fleet.join(name, self._versions[name])
        self.metrics.join(name)
        if self._is_watching:
            link.send(messages.Watch(True))
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._place(request)
        leaving, self._leaving = self._leaving - {name}, set()
        for other in leaving:
            self.leave(other)

    def _lost(self, link: Link) -> None:
        """Place the requests of a lost connection elsewhere."""
        pool, _ = self._links.pop(link.name)
        pool.fleet.leave(link.name)
        self.metrics.leave(link.name)
        if self._is_leaving:
            return
        if link.name in self._addresses:
            logger.warning("replica %s is lost: %s", link.name, link.why_lost)
            self._connect_after(link.name, pool.breakers[link.name].failed(is_gone=True) or 0.0)
        else:
            del self._versions[link.name]
        for request in list(self._requests.values()):
            if link.name in (request.replica, request.prefill):
                self._fail_over(request, link.name, link.why_lost)
        for question in list(self._asked.values()):
            if question.replica == link.name:
                self._ask_elsewhere(question, link.name, link.why_lost)

    def _suspend(self, name: str, pool: Pool, pause: float) -> None:
        """Send a failing replica no requests for a while."""
        logger.warning("replica %s fails: it gets no requests for %.1f s", name, pause)
        pool.fleet.suspend(name)
        asyncio.get_running_loop().call_later(pause, pool.fleet.resume, name)

    # Commands

    def submit(self, generation: Generation) -> None:
        """Submit as `EngineClient.submit` does. Raises `NoHealthyReplica` if no engine can be reached."""
        self._submit(generation, secrets.randbits(32))

    async def resume(self, seen: SeenStream, generation: Generation) -> None:
        """Resume as `ResumableClient.resume` does. If an engine remembers the tokens, the prompt goes on behind them;
        else they are all generated again, and are the same."""
        known, params = None, generation.params
        # Its engine may not know yet that it was left.
        generation.request_id = f"{shown_id(seen.request_id)}~{secrets.token_hex(3)}"
        if not seen.tokens:
            of_prompt = messages.prompt_id(seen.request_id, 0)
            known = await self.tokens_of(seen.request_id) or await self.tokens_of(of_prompt)
            if known is None:
                raise UsageError(f"no engine remembers the request {seen.request_id}: leave Last-Event-ID out")
            self._submit(generation, known[0])
            return
        if len(generation.prompts) == 1 and params.logprobs is None and any(seen.tokens):
            known = await self.tokens_of(seen.request_id)
        if known is None or known[0] != seen.seed or len(known[1]) != params.n:
            self._submit(generation, seen.seed, seen)
            return
        # A sample may have ended with its last token, which is chosen again.
        emitted = [tokens[:-1] for tokens in known[1]]
        self._submit(generation, seen.seed, seen, emitted)
        for sample, tokens in enumerate(emitted):
            text = OutputText(
                StreamingDetokenizer(self._tokenizer),
                params.stop or (),
                params.include_stop_str_in_output,
                params.min_tokens,
            )
            for token_id in tokens:
                generation.add_token(sample, token_id, text.push(token_id), None)
        generation.wake()

    def _submit(
        self,
        generation: Generation,
        seed: int,
        seen: SeenStream | None = None,
        emitted: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Submit a generation's prompts. seed: for a request that gives none. The tokens must be the same wherever they
        are chosen, so it is fixed here; a prompt's is that of the request and its number. emitted: the tokens of each
        sample that are known."""
        self._check_reachable()
        prompts, params, pinned = generation.prompts, generation.params, None
        if generation.stream:
            checksum = checksum_of([prompt.token_ids for prompt in prompts], params)
            models = set(self._versions.values())
            num_choices = len(prompts) * params.n
            position = StreamPosition(generation.request_id, seed, checksum, num_choices, seen, models)
            pinned = None if seen is None else position.model
            generation.position = position
        exchange = current_exchange() if self.is_traced else None
        for index, command in enumerate(self._follow(generation)):
            if params.seed is None:
                command = command._replace(params=replace(params, seed=(seed + index) % 2**64))
            token_ids = [list(tokens) for tokens in emitted or [()] * params.n]
            request = _Request(command, token_ids, [[] for _ in token_ids], pinned=pinned)
            request.trace = exchange.id if exchange is not None else ""
            self._requests[command.key] = request
            self._place(request)

    def _send(self, command: Any) -> None:
        match command:
            case messages.Ask() | messages.AskTasks():
                self._put_question(self._asked.setdefault(command.number, _Question(command)))
            case messages.Abort(key):
                if key in self._requests:
                    self._abort(self._requests.pop(key))
            case messages.Withdraw(number):
                asked = self._asked.pop(number, None)
                if asked is not None and asked.replica in self._links:
                    self._links[asked.replica][1].send(command)
            case messages.Watch(is_on):
                self._is_watching = is_on
                for _, link in self._links.values():
                    link.send(command)

    # Requests

    def _place(self, request: _Request) -> None:
        """Send a request to the engine that its router chooses; without an engine, it waits for one."""
        submit, emitted = request.submit, request.emitted()
        request.replica = request.prefill = None
        is_begun = any(sample.token_ids for sample in emitted)
        longest = max((sample.token_ids for sample in emitted), key=len)
        known = [*submit.token_ids, *longest]
        keys = self._index.keys(known[:-1], self._block_size, submit.salt)
        pinned = request.version if is_begun and request.pinned is None else request.pinned
        route = RouteRequest(submit.request_id, keys, len(known), self._block_size, request.avoid, pinned)
        try:
            if PREFILLS in self.pools and not is_begun and len(submit.token_ids) >= MIN_PROMPT:
                decision = self.pools[PREFILLS].route(route)
                request.prefill = decision.replica
                place = Place(prefill_of(submit), decision.cached_tokens, hands_over=True)
            else:
                decision = self.pools[ENGINES].route(route)
                request.replica = decision.replica
                place = Place(submit, decision.cached_tokens, emitted if is_begun else ())
        except NoReplica:
            request.homeless_since = request.homeless_since or time.monotonic()
            self._homeless.append(request)
            return
        request.homeless_since = 0.0
        self._send_place(request, decision.replica, place)

    def _send_place(self, request: _Request, replica: str, place: Place) -> None:
        """Send a request to an engine, and note which model computes it: the ids of its stream's events hold that."""
        self._links[replica][1].send(place._replace(num_streams=len(self._streams), trace=request.trace))
        request.version = self._versions[replica]
        generation, _ = self._generations.get(request.submit.key, (None, 0))
        if generation is not None and generation.position is not None:
            generation.position.model = request.version

    def _continue(self, request: _Request) -> None:
        """Send a request whose prompt is computed to the engine that decodes, which takes its beginning."""
        submit, prefill = request.submit, request.prefill
        assert prefill is not None, "an engine has computed its prompt"
        route = RouteRequest(submit.request_id, (), 1, self._block_size, request.avoid, request.pinned)
        try:
            decision = self.pools[ENGINES].route(route)
        except NoReplica:
            self._place(request)  # it waits
            return
        source = Source(self._addresses[prefill][1], submit.key) if prefill in self._addresses else None
        request.replica, request.prefill = decision.replica, None
        self._send_place(request, decision.replica, Place(submit, source=source))

    def _fail_over(self, request: _Request, name: str, why: str) -> None:
        """Place a request that an engine failed at elsewhere, or end it if too many have failed."""
        self._end_everywhere(request)
        request.failures += 1
        request.avoid |= {name}
        trace = request.trace and f"[{request.trace}] "
        request_id = request.submit.request_id
        logger.warning("%sreplica %s failed at %s (%s): it goes on elsewhere", trace, name, request_id, why)
        if request.failures >= ATTEMPTS:
            self._give_up(request, f"{request.failures} engines failed at this request, the last because {why}")
            return
        request.resumed = True
        self.num_resumed += 1
        self._place(request)

    def _give_up(self, request: _Request, why: str) -> None:
        key = request.submit.key
        if key in self._generations:
            self.abort(self._generations[key][0], RequestFailed(why))

    def abort(self, generation: Generation, error: ForgeError | None = None) -> None:
        """Abort as `EngineClient.abort` does, and count the abort where its requests were."""
        requests = [self._requests[key] for key in generation.keys if key in self._requests]
        for request in requests:
            self.metrics.take_end(request.replica, "abort" if error is None else "error", generation.params.n)
        super().abort(generation, error)

    def _abort(self, request: _Request) -> None:
        self._end_everywhere(request)
        self._homeless = [waiting for waiting in self._homeless if waiting is not request]
        for name in (request.replica, request.prefill):
            if name in self._links:
                self._links[name][1].send(messages.Abort(request.submit.key))

    def _end_everywhere(self, request: _Request) -> None:
        """Stop counting a request as under way to any engine."""
        for pool in self.pools.values():
            pool.fleet.end(request.submit.request_id)

    async def _end_homeless(self) -> None:
        """End requests that have waited too long for an engine."""
        while True:
            await asyncio.sleep(1.0)
            deadline = time.monotonic() - HOMELESS_SECONDS
            late = [request for request in self._homeless if request.homeless_since < deadline]
            self._homeless = [request for request in self._homeless if request not in late]
            for request in late:
                self._give_up(request, f"no engine could be reached for {HOMELESS_SECONDS:.0f} s")

    # Questions

    async def ask(self, subject: str, *arguments: Any) -> Any:
        """Ask, as `EngineClient.ask` does, the replica that has the request in question; add the decision that sent it
        there."""
        decision = self.pools[ENGINES].decisions.get(arguments[0]) if arguments else None
        if decision is None or decision.replica not in self._links:
            return None
        try:
            answer = await self._answer_to(messages.Ask(next(self._numbers), subject, arguments), 1)
        except RequestFailed:  # its engine has failed
            return None
        if answer is None:
            return None
        prefill = self.pools[PREFILLS].decisions.get(arguments[0]) if PREFILLS in self.pools else None
        return {**answer, "route": asdict(decision)} | ({} if prefill is None else {"prefill_route": asdict(prefill)})

    async def answer(self, requests: list[tuple[list[int], Any]]) -> list[Any]:
        self._check_reachable()
        return await super().answer(requests)

    def _check_reachable(self) -> None:
        if not self.pools[ENGINES].fleet.replicas:
            raise NoHealthyReplica

    async def tokens_of(self, request_id: str) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
        """Return the seed of a request that any front had, and its samples' tokens, if an engine remembers them."""
        asked = [(messages.Ask(next(self._numbers), "tokens", (request_id,)), name) for name in self._links]
        self._asked |= {question.number: _Question(question, name) for question, name in asked}
        answers = await asyncio.gather(*[self._answer_to(question, 0) for question, _ in asked], return_exceptions=True)
        arrived = [answer for answer in answers if isinstance(answer, tuple)]
        return max(arrived, key=lambda known: sum(map(len, known[1])), default=None)

    def _put_question(self, question: _Question) -> None:
        command = question.command
        if isinstance(command, messages.Ask):
            if question.replica is None and command.arguments:
                question.replica = self.replica_of(command.arguments[0])
            if question.replica not in self._links:
                self._answer_failed(question, "the replica that was asked has ended")
                return
        else:
            tokens = command.requests[0][0] if command.requests else []
            keys = self._index.keys(tokens, self._block_size)
            num_tokens = sum(len(token_ids) for token_ids, _ in command.requests)
            name = f"ask-{command.number}"
            route = RouteRequest(name, keys, num_tokens, self._block_size, question.avoid)
            try:
                question.replica = self.pools[ENGINES].route(route).replica
            except NoReplica as error:
                self._answer_failed(question, str(error))
                return
        self._links[question.replica][1].send(command)

    def _ask_elsewhere(self, question: _Question, name: str, why: str) -> None:
        """Ask another replica after one has failed at a question, of which nothing has been sent."""
        self.pools[ENGINES].fleet.end(f"ask-{question.command.number}")
        question.avoid |= {name}
        if isinstance(question.command, messages.Ask) or len(question.avoid) >= ATTEMPTS:
            self._answer_failed(question, f"the replica that was asked has failed: {why}")
        else:
            self._put_question(question)

    def _answer_failed(self, question: _Question, why: str) -> None:
        number = question.command.number
        self._asked.pop(number, None)
        future = self._questions.get(number)
        if future is not None:
            answer = messages.Answer(number, None, messages.Fault(why, internal=True))
            asyncio.get_running_loop().call_soon(self._take_answer, answer)

    # Updates

    def _take_update(self, link: Link, update: ReplicaUpdate) -> None:
        """Take in what an engine has sent: what is every front's concern first, then this one's requests."""
        name, now = link.name, time.perf_counter()
        pool, _ = self._links[name]
        if pool.router.needs_events and update.events:
            pool.fleet.apply(name, update.events)
        for key in update.accepted:
            if (request := self._requests.get(key)) is not None:
                self._end_everywhere(request)
        if update.load is not None:
            pool.fleet.report(name, update.load)
        self.metrics.take_update(name, update, now)
        self._judge(name, pool, update)
        update.accepted = self._note_accepted(name, update.accepted)
        update.tokens = self._note_tokens(update.tokens, now)
        update.sample_ends = [end for end in update.sample_ends if self._note_sample_end(end.key, end.sample)]
        update.ends = [end for end in map(partial(self._finish, name), update.ends) if end is not None]
        update.refused = [refusal for refusal in update.refused if not self._retry_refused(name, refusal)]
        update.answers = [answer for answer in update.answers if not self._retry_answer(name, answer)]
        update.records = [self._located(name, record) for record in update.records]
        update.steps, update.gauges = [], None  # they are counted
        self._take_in(update)
        if name not in self._addresses:
            self._close_if_done(name)

    def _judge(self, name: str, pool: Pool, update: ReplicaUpdate) -> None:
        """Note whether the engine works: steps that raise open its breaker."""
        breaker = pool.breakers.get(name)
        if breaker is None:
            return
        if not update.failed_in_a_row:
            if update.steps:
                breaker.succeeded()
        elif (pause := breaker.failed()) is not None:
            self._suspend(name, pool, pause)

    def _note_accepted(self, name: str, keys: list[int]) -> list[int]:
        """Note that an engine accepted requests; return those that were not accepted before, of which clients hear."""
        accepted = []
        for key in keys:
            request = self._requests.get(key)
            if request is not None and not request.accepted and request.replica == name:
                request.accepted = True
                accepted.append(key)
        return accepted

    def _note_tokens(self, tokens: list[messages.TokenDelta], now: float) -> list[messages.TokenDelta]:
        """Note tokens; return them without those of samples that have ended: they were chosen again."""
        new, find = [], self._requests.get
        for token in tokens:
            key, sample, token_id, _, logprobs = token
            request = find(key)
            if request is None or sample in request.ended:
                continue
            new.append(token)
            if request.first_token is None:
                request.first_token = now
            request.token_ids[sample].append(token_id)
            if logprobs is not None:
                request.logprobs[sample].append(logprobs)
            if request.failures:
                request.failures, request.avoid = 0, frozenset()
        return new

    def _note_sample_end(self, key: int, sample: int) -> bool:
        """Note that a sample has ended; return whether it had not before, and so its client has to hear of it."""
        request = self._requests.get(key)
        if request is None or sample in request.ended:
            return False
        request.ended.add(sample)
        return True

    def _finish(self, name: str, end: messages.RequestEnd) -> messages.RequestEnd | None:
        """Forget a request that has ended, and return its end with the times of all engines that had it. One whose
        engine could not finish it, or has computed its prompt for another, continues elsewhere: None."""
        request = self._requests.get(end.key)
        if request is None:
            return end
        fault = end.fault
        if fault is None and any(sample.finish_reason == "error" for sample in end.output.outputs):
            fault = messages.Fault("it could not finish it", internal=True)
        if fault is not None and fault.internal:
            self._fail_over(request, name, fault.message)
            return None
        if request.prefill == name and fault is None:
            self._end_everywhere(request)
            self._continue(request)
            return None
        del self._requests[end.key]
        if request.resumed and end.key in self._generations:
            arrived = self._generations[end.key][0].arrived
            return end._replace(output=self.metrics.timed(name, end.output, arrived, request.first_token))
        return end

    def _retry_refused(self, name: str, refusal: Any) -> bool:
        """Place a refused request elsewhere if the engine, and not the request, was at fault, and forget it otherwise.
        Return whether it goes on, and so its client hears nothing of the refusal."""
        request = self._requests.get(refusal.key)
        if request is None:
            return False
        if refusal.fault.internal:
            self._fail_over(request, name, refusal.fault.message)
            return True
        if request.prefill == name:  # the engine that is to continue it says why
            self._end_everywhere(request)
            self._continue(request)
            return True
        self._end_everywhere(request)
        del self._requests[refusal.key]
        return False

    def _retry_answer(self, name: str, answer: messages.Answer) -> bool:
        """Ask another engine where this one failed at prefill-only requests, and take the question as answered
        otherwise. Return whether it was asked again, and so this answer is dropped."""
        question = self._asked.get(answer.number)
        if question is None:
            return False
        self.pools[ENGINES].fleet.end(f"ask-{answer.number}")
        if answer.fault is not None and answer.fault.internal and isinstance(question.command, messages.AskTasks):
            self._ask_elsewhere(question, name, answer.fault.message)
            return True
        del self._asked[answer.number]
        if isinstance(question.command, messages.AskTasks) and answer.fault is None:
            lengths = [len(token_ids) for token_ids, _ in question.command.requests]
            self.metrics.take_answered(name, lengths, time.perf_counter() - question.began)
        return False

    def _located(self, name: str, record: StepRecord) -> StepRecord:
        """Return a step with the engine that took it, and why requests came to it."""
        decisions = self.pools[ENGINES].decisions
        routes = tuple([decisions[request.request_id] for request in record.arrived if request.request_id in decisions])
        return replace(record, replica=name, routes=routes)
