"""Exercise 11: a router. The check asks it about fleets whose right choice is known and about random ones, then runs
engines behind it: every request ends once, on a running replica, and little is computed twice."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from types import ModuleType
from typing import Any

from forge.cluster.events import CacheEvents
from forge.cluster.fleet import Fleet, RouteRequest
from forge.cluster.local import LocalCluster, LocalRun, Talk, run_talks
from forge.cluster.routers import PrefixRouter
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.exercises.exercise import Costs, Driven, Exercise, Part, Trial, words_of
from forge.llm import LLM
from forge.trace.records import RouteRecord, StepRecord

_BLOCK, _NAMES, _FLEETS = 16, ("a", "b", "c"), 120
_PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_TALKS, _TURNS, _SYSTEMS = 12, 3, 4


Described = Mapping[str, tuple[int, int, str]]
"""A fleet: of each replica its tokens, those ever given to it and its blocks."""
_KNOWN: tuple[tuple[str, Described, str, str], ...] = (
    ("candidate", {"a": (0, 0, "xyz"), "b": (70, 0, ""), "c": (30, 0, "")}, "xyz", "bc"),
    ("least-busy", {"a": (50, 0, ""), "b": (20, 0, ""), "c": (90, 0, "")}, "xyz", "abc"),
    ("tie", {"a": (0, 90, ""), "b": (0, 10, ""), "c": (0, 50, "")}, "xyz", "abc"),
    ("longest", {"a": (0, 0, "x"), "b": (40, 0, "xy"), "c": (0, 0, "")}, "xyz", "abc"),
    ("longest", {"a": (80, 0, "xy"), "b": (40, 0, "xy"), "c": (0, 0, "x")}, "xyz", "abc"),
    ("gap", {"a": (10, 0, "x"), "b": (0, 0, "yz"), "c": (5, 0, "")}, "xyz", "abc"),
    ("threshold", {"a": (513, 0, "xyz"), "b": (0, 0, "x"), "c": (9, 0, "")}, "xyz", "abc"),
    ("threshold", {"a": (512, 0, "xyz"), "b": (0, 0, "x"), "c": (9, 0, "")}, "xyz", "abc"),
    ("threshold", {"a": (300, 0, "xyz"), "b": (100, 0, "x"), "c": (9, 0, "")}, "xyz", "abc"),
    ("least-busy", {"a": (0, 0, "")}, "", "a"),
)
"""(the rule that a wrong choice breaks, the fleet, the prompt's blocks, the candidates)."""


class RouterTrial(Trial):
    """Asks the reader's router about fleets whose right choice is known."""

    setup_lines = (
        "from forge.cluster.events import CacheEvents",
        "from forge.cluster.fleet import Fleet, RouteRequest",
    )

    def ask(self, fleet: Described, function: str, arguments: Callable[[Fleet], tuple[str, tuple]]) -> Any:
        """Call a function of the router on this fleet, and check that the fleet has not changed."""
        self.restart()
        filled = _fleet(fleet)
        self.calls += [
            "fleet = Fleet()",
            *(
                f'one = fleet.join("{name}"); one.tokens, one.routed_tokens = {tokens}, {routed}; '
                f'fleet.apply("{name}", CacheEvents({_keys(blocks)}))'
                for name, (tokens, routed, blocks) in fleet.items()
            ),
        ]
        before = _state(filled)
        router = self.call("router = piece.MyRouter(fleet)", lambda: self.piece.MyRouter(filled))
        if self.threshold != 512:
            router.threshold = self.threshold
            self.calls.append(f"router.threshold = {self.threshold}")
        shown, values = arguments(filled)
        returned = self.call(f"router.{function}({shown})", getattr(router, function), *values)
        finding = f"requests, tokens, tokens given and blocks were {before}, and are {_state(filled)}"
        self.require(_state(filled) == before, "counted", finding)
        return returned

    threshold = 512

    def blocks(self, fleet: Described, prompt: str) -> None:
        for name, (_, _, blocks) in fleet.items():
            request = RouteRequest("r", _keys(prompt), 16 * len(prompt) + 8, _BLOCK)
            shown = f'fleet.replicas["{name}"], RouteRequest("r", {request.keys})'
            returned = self.ask(fleet, "num_blocks", lambda filled: (shown, (filled.replicas[name], request)))  # noqa: B023
            self.require(isinstance(returned, Integral), "result", f"it returned {returned!r}")
            expected = _held(blocks, prompt)
            finding = (
                f"it is {returned}, and not {expected}; {name} has blocks {blocks or 'none'} of {prompt or 'none'}"
            )
            self.require(returned == expected, "gap", finding)

    def known(self, rule: str, fleet: Described, prompt: str, among: str) -> None:
        """Check that the choice for one fleet is the one that the template states."""
        request = RouteRequest("r", _keys(prompt), 16 * len(prompt) + 8, _BLOCK)
        left_out = frozenset(fleet) - frozenset(among)
        shown = f'RouteRequest("r", {request.keys}, {request.num_prompt_tokens}, 16), fleet.candidates({left_out})'
        record = self.ask(fleet, "choose", lambda filled: (shown, (request, filled.candidates(left_out))))
        self.require(isinstance(record, RouteRecord), "result", f"it returned {record!r}")
        self.require(record.replica in among, "candidate", f"it chose {record.replica!r} of {list(among)}")
        names, why = _expected(fleet, prompt, among, self.threshold)
        finding = f"it chose {record.replica}, and not {' or '.join(names)}; {_shown(fleet)}"
        self.require(record.replica in names, _broken_rule(rule, fleet, names, why, record), finding)
        self.require(record.why == why, "told", f'it said "{record.why}", and it is "{why}"; {_shown(fleet)}')
        told = record.request_id, record.num_candidates, record.load, record.least_load
        tokens = [tokens for tokens, _, _ in fleet.values()]
        expected = "r", len(fleet), fleet[record.replica][0], min(tokens)
        self.require(told == expected, "told", f"the decision has {told}, and should have {expected}")
        cached = _held(fleet[record.replica][2], prompt) * _BLOCK
        finding = f"it said {record.cached_tokens} cached tokens, and {record.replica} has {cached}; {_shown(fleet)}"
        self.require(record.cached_tokens == cached, "told", finding)


def _broken_rule(rule: str, fleet: Described, names: Sequence[str], why: str, record: RouteRecord) -> str:
    """Return the rule that a wrong choice breaks. For a random fleet it follows from the two decisions."""
    if rule in ("random", "longest") and "holder_busy" in (why, record.why):
        return "threshold"
    if rule not in ("random", "candidate"):
        return rule
    if why == "prefix":
        return "longest"
    return "tie" if fleet[record.replica][0] == fleet[names[0]][0] else "least-busy"


def _held(blocks: str, prompt: str) -> int:
    """Count the prompt's leading blocks that are among these."""
    return next((number for number, block in enumerate(prompt) if block not in blocks), len(prompt))


def _expected(fleet: Described, prompt: str, among: str, threshold: int) -> tuple[tuple[str, ...], str]:
    """Return the replicas that are right choices, and why."""

    def least_busy(names: Sequence[str]) -> tuple[str, ...]:
        least = min(fleet[name][:2] for name in names)
        return tuple(name for name in names if fleet[name][:2] == least)

    least = least_busy(among)
    held = {name: _held(fleet[name][2], prompt) for name in among}
    longest = max(held.values())
    if not longest:
        return least, "no_prefix"
    holders = least_busy([name for name in among if held[name] == longest])
    is_busy = fleet[holders[0]][0] - fleet[least[0]][0] > threshold
    return (least, "holder_busy") if is_busy else (holders, "prefix")


def _state(fleet: Fleet) -> tuple[Any, ...]:
    replicas = [(replica.requests, replica.tokens, replica.routed_tokens) for replica in fleet.replicas.values()]
    return replicas, dict(fleet.prefixes.holders), fleet.candidates_mask()


def _keys(blocks: str) -> tuple[int, ...]:
    """Turn letters into block keys."""
    return tuple(map(ord, blocks))


def _fleet(described: Described) -> Fleet:
    fleet = Fleet()
    for name, (tokens, routed, blocks) in described.items():
        replica = fleet.join(name)
        replica.tokens, replica.routed_tokens = tokens, routed
        fleet.apply(name, CacheEvents(_keys(blocks)))
    return fleet


def _shown(fleet: Described) -> str:
    """Format a fleet as `a: 50 tokens, blocks xy`."""
    return "; ".join(
        f"{name}: {tokens} tokens ({routed} so far), blocks {blocks or 'none'}"
        for name, (tokens, routed, blocks) in fleet.items()
    )


def _talks() -> list[Talk]:
    random_ = random.Random(2)

    def words(length: int) -> list[int]:
        return [random_.randrange(97, 123) for _ in range(length)]

    systems = [words(120) for _ in range(_SYSTEMS)]
    return [Talk(systems[number % _SYSTEMS], [words(20) for _ in range(_TURNS)]) for number in range(_TALKS)]


def _run(router: Any) -> LocalRun:
    options: dict[str, Any] = {"kv": "prefix", "num_blocks": 96, "max_num_seqs": 8, "threads": 1}
    engines = [LLM("hash", **options).engine for _ in range(2)]
    return run_talks(engines, router, _talks(), _PARAMS, clients=4)


def _fleets(number: int) -> Iterator[tuple[Described, str]]:
    random_ = random.Random(0)
    for _ in range(number):
        blocks = ("", "x", "xy", "xyz", "yz", "z", "xz")
        fleet = {
            name: (random_.choice((0, 40, 300, 512, 560, 900)), random_.randrange(4), random_.choice(blocks))
            for name in _NAMES
        }
        yield fleet, "".join(random_.sample(_NAMES, random_.randint(1, 3)))


def _check_blocks(piece: ModuleType) -> None:
    trial = RouterTrial(piece)
    for fleet, _ in _fleets(12):
        for prompt in ("xyz", "", "zyx", "q"):
            trial.blocks(fleet, prompt)


def _check_choose(piece: ModuleType) -> None:
    trial = RouterTrial(piece)
    for rule, fleet, prompt, among in _KNOWN:
        trial.known(rule, fleet, prompt, among)
    for fleet, among in _fleets(_FLEETS):
        trial.known("random", fleet, "xyz", among)
    for threshold in (0, 40, 10_000):
        trial.threshold = threshold
        for fleet, among in _fleets(40):
            trial.known("random", fleet, "xyz", among)
    trial.restart()
    ours: LocalRun = trial.call(f"two engines, {_TALKS * _TURNS} requests", lambda: _run(piece.MyRouter))
    theirs = _run(PrefixRouter)
    trial.require(ours.answers == theirs.answers, "kept", "the answers are not those of forge's own router")
    finding = (
        f"it made the engines compute {ours.computed_tokens} prompt tokens, and forge's own {theirs.computed_tokens}"
    )
    trial.require(ours.computed_tokens <= 1.1 * theirs.computed_tokens, "little", finding)


def drive(llm: LLM, prompts: Sequence[str], params: SamplingParams, piece: ModuleType | None) -> Driven:
    """Run the prompts on two engines behind a router. Returns the outputs in order and all steps."""
    cluster = LocalCluster([llm.new_engine(), llm.new_engine()], piece.MyRouter if piece else PrefixRouter)
    records: list[StepRecord] = []
    cluster.on_step = lambda name, record: records.append(record)
    outputs: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(prompts):
        cluster.submit(str(number), list(llm.tokenizer.encode(prompt)), params)
        outputs |= {name: cluster.take_output(name) for name in cluster.tick()}
    while len(outputs) < len(prompts):
        outputs |= {name: cluster.take_output(name) for name in cluster.tick()}
    return [outputs[str(number)] for number in range(len(prompts))], records


def _cost(piece: ModuleType | None, number: int) -> Callable[[], object]:
    fleet = _fleet({f"r{index}": (37 * index % 500, index, "xyzuvw"[: index % 7]) for index in range(number)})
    router = (piece.MyRouter if piece else PrefixRouter)(fleet)
    return partial(router.choose, RouteRequest("r", _keys("xyzuvw"), 104, _BLOCK), fleet.candidates())


_STORY = "Once upon a time there was a fox who lived in a den under an old oak, and every evening a turtle came. "

EXERCISE = Exercise(
    **words_of("router"),
    parts=(
        Part(("MyRouter.num_blocks",), _check_blocks),
        Part(("MyRouter.num_blocks", "MyRouter.choose"), _check_choose),
    ),
    costs=Costs("{} replicas", (2, 16, 128), _cost),
    options={"kv": "prefix", "num_blocks": 128, "max_num_seqs": 8},
    drive=drive,
    prompts=tuple(f"{_STORY}The {name}" for name in ("fox", "owl", "hen", "mole", "turtle", "duck", "mouse", "bee")),
    params=({"max_tokens": 24, "ignore_eos": True},),
)
