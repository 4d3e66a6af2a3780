"""What the HTTP server has in place of an engine: a client of all replicas.

`ClusterClient` is an `EngineClient` whose commands go to Ray Serve instead of a socket, and the endpoints do not know
the difference. A request that has sent nothing when its replica dies is tried once more, elsewhere; one that streams
ends with an error that says so. Each replica is followed for as long as it runs: its cache events go to the router, its
steps to the metrics.
"""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Any

from ray.serve.handle import DeploymentHandle

from forge.cache.prefix_index import PrefixIndex
from forge.cluster.fleet import RouteRequest
from forge.cluster.handoff import MIN_PROMPT
from forge.cluster.metrics import ClusterMetrics
from forge.cluster.replica import Report
from forge.cluster.routing import Routing, routing_of
from forge.errors import ForgeError
from forge.server.engine_client import EngineClient, RequestFailed
from forge.server.messages import (
    Abort,
    Answer,
    Ask,
    AskTasks,
    Fault,
    Gauges,
    LoadFailed,
    Ready,
    Submit,
    Update,
    Watch,
    Withdraw,
)
from forge.trace.records import StepRecord

logger = logging.getLogger("forge.server")

ATTEMPTS = 2
_LAST_CALLBACKS = 0.3
"""Seconds in which Ray's threads still tell this loop of calls that have ended."""
_FOLLOW_AGAIN = 0.2
"""Seconds before a replica that could not be followed is followed again."""


class ClusterClient(EngineClient):
    """Submits requests to replicas and follows what becomes of them."""

    def __init__(self, engines: DeploymentHandle, prefills: DeploymentHandle | None = None):
        """prefills: the engines that compute prompts for others, where those are apart."""
        super().__init__("", {})
        self._handle, self._prefills = engines, prefills
        self._handles = [handle for handle in (engines, prefills) if handle is not None]
        self._keys = count(secrets.randbits(48))  # the replicas' other clients have other keys
        self._index, self._block_size = PrefixIndex(), 16
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Of each request and question, by its key or number."""
        self._followers: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._gauges_of: dict[str, Gauges] = {}
        self._watched = False
        self.metrics: ClusterMetrics | None = None

    def _start(self) -> None:
        """The replicas are started by Ray Serve."""

    @property
    def routing(self) -> Routing:
        """Of the replicas that answer."""
        return routing_of(self._handle.deployment_name)

    async def ready(self) -> Ready:
        """Wait until replicas have loaded the model. Raises their `ForgeError`."""
        for handle in reversed(self._handles):
            message = await handle.ready.remote(RouteRequest("ready"))
            routing_of(handle.deployment_name).fleet.end("ready")
            if isinstance(message, LoadFailed):
                error = ForgeError(message.message)
                error.exit_code = message.exit_code
                raise error
        self._device, self._block_size = message.device, message.block_size
        return message

    async def connect(self) -> None:
        self._watched = self.on_record is not None
        for handle in self._handles:
            routing_of(handle.deployment_name).on_change = partial(self._follow_all, handle)
            self._follow_all(handle)

    def disconnect(self) -> None:
        """Leave the loop."""
        self._is_leaving = True
        for task in (*self._tasks.values(), *self._followers.values()):
            task.cancel()

    async def leave(self) -> None:
        """End the routers, whose loop this is."""
        self.disconnect()
        await asyncio.gather(*self._tasks.values(), *self._followers.values(), return_exceptions=True)
        for handle in self._handles:
            await handle.shutdown_async()
        await asyncio.sleep(_LAST_CALLBACKS)

    def close(self) -> None:
        """The replicas are ended by Ray Serve."""

    def new_metrics(  # type: ignore[override]  # reads as one `Metrics`
        self, model_name: str, ready: Ready
    ) -> ClusterMetrics:
        self.metrics = ClusterMetrics(model_name, ready, self.replica_of)
        for _, name in self._followers:
            self.metrics.join(name)
        return self.metrics

    def replica_of(self, request_id: str) -> str | None:
        """Where a request went, if that is remembered."""
        decision = self.routing.decisions.get(request_id)
        return None if decision is None else decision.replica

    async def ask(self, what: str, *arguments: Any) -> Any:
        """As `EngineClient.ask`, of the replica that has the request in question; with the decision that sent it
        there."""
        decision = self.routing.decisions.get(arguments[0]) if arguments else None
        if decision is None or decision.replica not in self.routing.fleet.replicas:
            return None
        found = await self._answer_to(Ask(next(self._numbers), what, arguments), 1)
        return found if found is None else {**found, "route": asdict(decision)}

    # Commands

    def _send(self, command: Any) -> None:
        match command:
            case Submit():
                self._start_task(command.key, self._generate(command))
            case Ask():
                self._start_task(command.number, self._ask(command))
            case AskTasks():
                self._start_task(command.number, self._answer(command))
            case Abort(key) | Withdraw(key):
                if (task := self._tasks.pop(key, None)) is not None and task is not asyncio.current_task():
                    task.cancel()
            case Watch(wanted):
                self._watched = wanted
                for name in self.routing.fleet.replicas:
                    self._start_task(next(self._keys), self._watch(name))

    def _start_task(self, key: int, work: Any) -> None:
        task = self._tasks[key] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda ended: self._tasks.pop(key, None) if self._tasks.get(key) is ended else None)

    async def _generate(self, submit: Submit) -> None:
        """One prompt, from its route to its end."""
        replica = None
        for attempt in range(ATTEMPTS):
            failure = await self._try(submit, avoid=replica)
            if failure is None or submit.key not in self._generations:
                return
            replica, is_last = self.replica_of(submit.request_id), attempt == ATTEMPTS - 1
            logger.warning("replica %s failed at %s: %s", replica, submit.request_id, failure.reason)
            if failure.has_sent or is_last:
                error = _died(replica) if failure.has_sent else RequestFailed(f"{ATTEMPTS} replicas failed at it")
                self.abort(self._generations[submit.key][0], error)
                return

    async def _try(self, submit: Submit, avoid: str | None) -> "_Failure | None":
        """Send a request to a replica, if there is one not to the one that has failed at it; None if it has ended
        there."""
        route, has_sent, calls = replace(self._route_of(submit), avoid=avoid), False, []
        try:
            if self._prefills is not None and len(submit.token_ids) >= MIN_PROMPT:
                # Ray gives what this returns to the replica that continues; its bytes never come here.
                calls.append(self._prefills.prefill.remote(route, submit))
            stream = self._streaming(self._handle).generate.remote(route, submit, *calls)
            calls.append(stream)
            async for update in stream:
                has_sent = has_sent or bool(update.tokens or update.sample_ends)
                if avoid is not None:
                    update.accepted.clear()  # they were, by the first
                self._take_in(update)
                self._flush_when_due()
                if update.ends or update.refused:
                    return None
            return _Failure(has_sent, "its answer ended early")
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            raise
        except Exception as error:
            return _Failure(has_sent, _first_line(error))
        finally:
            for handle in self._handles:
                routing_of(handle.deployment_name).fleet.end(route.request_id)

    @staticmethod
    def _streaming(handle: DeploymentHandle) -> Any:
        return handle.options(stream=True)

    def _route_of(self, submit: Submit) -> RouteRequest:
        keys = self._index.keys(submit.token_ids[:-1], self._block_size, submit.salt)
        most = submit.params.max_tokens * submit.params.n
        return RouteRequest(submit.request_id, keys, len(submit.token_ids), most, self._block_size)

    async def _ask(self, question: Ask) -> None:
        target = self.replica_of(question.arguments[0]) if question.arguments else None
        await self._put(question.number, self._handle.ask.remote(_aimed_at(target), question.what, question.arguments))

    async def _answer(self, question: AskTasks) -> None:
        tokens = question.requests[0][0] if question.requests else []
        keys = self._index.keys(tokens, self._block_size)
        number = sum(len(token_ids) for token_ids, _ in question.requests)
        route = RouteRequest(f"ask-{question.number}", keys, number, 0, self._block_size)
        try:
            for attempt in range(ATTEMPTS):
                response = self._handle.answer.remote(route, question.requests)
                if await self._put(question.number, response, is_last=attempt == ATTEMPTS - 1):
                    return
                route = replace(route, avoid=self.replica_of(route.request_id))
        finally:
            self.routing.fleet.end(route.request_id)

    async def _put(self, number: int, response: Any, is_last: bool = True) -> bool:
        """Take in the answer to a question; False where there is none, which fails the question if it was asked for
        the last time."""
        try:
            answer = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            if is_last:
                fault = Fault(f"the replica that was asked has failed: {_first_line(error)}", internal=True)
                self._take_answer(Answer(number, None, fault))
            return False
        self._take_answer(answer._replace(number=number))
        return True

    async def _watch(self, name: str) -> None:
        with suppress(Exception):
            await self._handle.watch.remote(_aimed_at(name), self._watched)

    # Reports

    def _follow_all(self, handle: DeploymentHandle) -> None:
        """Follow the replicas that run now, and no others."""
        deployment, running = handle.deployment_name, routing_of(handle.deployment_name).fleet.replicas
        for key in [key for key in self._followers if key[0] == deployment and key[1] not in running]:
            self._followers.pop(key).cancel()
            self._gauges_of.pop(key[1], None)
            if self.metrics is not None:
                self.metrics.leave(key[1])
        for name in running:
            if (deployment, name) not in self._followers and not self._is_leaving:
                task = asyncio.get_running_loop().create_task(self._follow(handle, name))
                self._followers[deployment, name] = task
                if self.metrics is not None:
                    self.metrics.join(name)
        self._sum_gauges()

    async def _follow(self, handle: DeploymentHandle, name: str) -> None:
        """Take in a replica's reports until it is gone."""
        while True:
            stream = self._streaming(handle).follow.remote(_aimed_at(name))
            try:
                if self._watched:
                    await self._watch(name)
                async for report in stream:
                    self._take_report(handle, name, report)
            except asyncio.CancelledError:
                stream.cancel()
                raise
            except Exception as error:
                logger.debug("replica %s cannot be followed: %s", name, _first_line(error))
            await asyncio.sleep(_FOLLOW_AGAIN)

    def _take_report(self, handle: DeploymentHandle, name: str, report: Report) -> None:
        routing = routing_of(handle.deployment_name)
        if routing.router is not None and routing.router.needs_events:
            if report.whole and name in routing.fleet.replicas:
                routing.fleet.prefixes.forget(routing.fleet.replicas[name].index)
            routing.fleet.apply(name, report.events)
        if self.metrics is not None:
            self.metrics.take_report(name, report, time.perf_counter())
        if report.gauges is not None:
            self._gauges_of[name] = report.gauges
            self._sum_gauges()
        if report.records:
            self._take_in(Update(records=[self._located(name, record) for record in report.records]))

    def _located(self, name: str, record: StepRecord) -> StepRecord:
        """A step with the engine that took it, and why requests came to it."""
        decisions = self.routing.decisions
        routes = tuple([decisions[one.request_id] for one in record.arrived if one.request_id in decisions])
        return replace(record, replica=name, routes=routes)

    def _sum_gauges(self) -> None:
        self.gauges = Gauges(*[sum(values) for values in zip(Gauges(), *self._gauges_of.values(), strict=True)])


class _Failure:
    """An attempt that came to nothing."""

    def __init__(self, has_sent: bool, reason: str):
        self.has_sent, self.reason = has_sent, reason


def _aimed_at(name: str | None) -> RouteRequest:
    return RouteRequest(f"to-{name}", target=name)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _died(replica: str | None) -> RequestFailed:
    return RequestFailed(f"replica {replica} died while it was answering: send the request again")
