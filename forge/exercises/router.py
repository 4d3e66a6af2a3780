"""Exercise 11: a router. Fleets whose right choice is known, random ones, and then engines: every request ends once, on
a replica that runs, and little is computed twice."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from forge.cluster.events import CacheEvents
from forge.cluster.fleet import Fleet, RouteRequest
from forge.cluster.local import LocalCluster, LocalRun, Talk, run_talks
from forge.cluster.routers import PrefixRouter, Router
from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.exercises.exercise import Exercise, Rule, Trial
from forge.llm import LLM
from forge.trace.records import RouteRecord, StepRecord

_BLOCK, _NAMES, _FLEETS = 16, ("a", "b", "c"), 120
_PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_TALKS, _TURNS, _SYSTEMS = 12, 3, 4

RULES = {
    "candidate": Rule(
        "A request goes to one of the candidates, by its name.", "Which replicas may be there and not be candidates?"
    ),
    "counted": Rule(
        "choose changes no replica: the request is counted once, afterwards.", "Who counts a request, and when?"
    ),
    "least-busy": Rule(
        "Without a prefix, the replica with the fewest outstanding tokens is chosen.",
        "What does it compare, and does it take the least or the most?",
    ),
    "tie": Rule(
        "Of several with as few tokens, the one that was given the fewest so far is chosen.",
        "Where do all requests go while nothing is outstanding?",
    ),
    "gap": Rule(
        "A block is worth nothing without those before it.",
        "What is returned if the second of three blocks is missing?",
    ),
    "longest": Rule(
        "The least busy holder of the longest prefix is chosen, if it is not too busy.",
        "How many blocks does each candidate have, and which of them have the most?",
    ),
    "threshold": Rule(
        "A holder that is busier than the least busy by more than the threshold is passed over, and no other.",
        "Which difference is compared with the threshold, and what if they are equal?",
    ),
    "told": Rule(
        "The decision tells the reason and the blocks of the chosen replica.",
        "Whose blocks were counted, and why here?",
    ),
    "kept": Rule("Every request is answered once, as one engine answers it.", "Which request went nowhere?"),
    "little": Rule(
        "Little is computed twice: at most a tenth more than under forge's own router.",
        "Which turn of a conversation went where its beginning was not?",
    ),
}

_KNOWN: tuple[tuple[str, dict[str, tuple[int, int, str]], str, str], ...] = (
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
"""(the rule that a wrong choice breaks, of each replica its tokens, those ever given to it and its blocks, the prompt's
blocks, the candidates)."""


class _Known(PrefixRouter):
    """forge's own, with the exercise's threshold."""

    name = "own"


class RouterTrial(Trial):
    """Asks the reader's router about fleets whose right choice is known."""

    def __init__(self, piece: ModuleType):
        super().__init__(
            piece,
            "from forge.cluster.events import CacheEvents",
            "from forge.cluster.fleet import Fleet, RouteRequest",
        )
        self.piece = piece
        self.setup = len(self.calls)

    def known(self, rule: str, fleet: dict[str, tuple[int, int, str]], prompt: str, among: str) -> None:
        """One fleet: the choice must be that of forge's own router."""
        del self.calls[self.setup :]
        given, request = _fleet(fleet), RouteRequest("r", _keys(prompt), 16 * len(prompt) + 8, 8, _BLOCK)
        self.calls += [
            "fleet = Fleet()",
            *(
                f'one = fleet.join("{name}"); one.tokens, one.routed_tokens = {tokens}, {routed}; '
                f'fleet.apply("{name}", CacheEvents({_keys(blocks)}))'
                for name, (tokens, routed, blocks) in fleet.items()
            ),
        ]
        candidates = given.candidates(list(among))
        before = [(one.requests, one.tokens, one.routed_tokens) for one in given.replicas.values()]
        router: Router = self.call("router = piece.MyRouter(fleet)", lambda: self.piece.MyRouter(given))
        line = (
            f'router.choose(RouteRequest("r", {request.keys}, {request.num_prompt_tokens}, 8, 16), '
            f"fleet.candidates({list(among)}))"
        )
        found: RouteRecord = self.call(line, router.choose, request, candidates)
        after = [(one.requests, one.tokens, one.routed_tokens) for one in given.replicas.values()]
        self.require(before == after, "counted", f"requests, tokens and tokens given were {before}, and are {after}")
        name = getattr(found, "replica", None)
        self.require(name in list(among), "candidate", f"it chose {name!r}, and the candidates are {list(among)}")
        own = _Known(given).choose(request, candidates)
        said = f"it chose {found.replica}, and not {own.replica}; {_shown(fleet)}"
        self.require(found.replica == own.replica, self._rule(rule, given, own, found), said)
        self.require(found.why == own.why, "told", f'it said "{found.why}", and it is "{own.why}"; {_shown(fleet)}')
        cached = own.cached_tokens // _BLOCK * _BLOCK
        said = f"it said {found.cached_tokens} cached tokens, and {found.replica} has {cached}; {_shown(fleet)}"
        self.require(found.cached_tokens == cached, "told", said)

    def _rule(self, rule: str, fleet: Fleet, own: RouteRecord, found: RouteRecord) -> str:
        """The rule that a wrong choice breaks. For a random fleet it follows from the two decisions."""
        if rule in ("random", "longest") and "holder_busy" in (own.why, found.why):
            return "threshold"
        if rule not in ("random", "candidate"):
            return rule
        if own.why == "prefix":
            return "longest"
        chosen = fleet.replicas[found.replica]
        return "tie" if chosen.tokens == own.least_load else "least-busy"


def _keys(blocks: str) -> tuple[int, ...]:
    """Letters as keys of blocks."""
    return tuple(map(ord, blocks))


def _fleet(wanted: Mapping[str, tuple[int, int, str]]) -> Fleet:
    fleet = Fleet()
    for name, (tokens, routed, blocks) in wanted.items():
        replica = fleet.join(name)
        replica.tokens, replica.routed_tokens = tokens, routed
        fleet.apply(name, CacheEvents(_keys(blocks)))
    return fleet


def _shown(fleet: Mapping[str, tuple[int, int, str]]) -> str:
    """`a: 50 tokens, blocks xy`."""
    return "; ".join(
        f"{name}: {tokens} tokens ({routed} so far), blocks {blocks or 'none'}"
        for name, (tokens, routed, blocks) in fleet.items()
    )


def _talks() -> list[Talk]:
    random_ = random.Random(2)

    def words(length: int) -> list[int]:
        return [random_.randrange(97, 123) for _ in range(length)]

    systems = [words(120) for _ in range(_SYSTEMS)]
    return [Talk(systems[one % _SYSTEMS], [words(20) for _ in range(_TURNS)]) for one in range(_TALKS)]


def _run(router: Any) -> LocalRun:
    options: dict[str, Any] = {"kv": "prefix", "num_blocks": 96, "max_num_seqs": 8, "threads": 1}
    engines = [LLM("hash", **options).engine for _ in range(2)]
    return run_talks(engines, router, _talks(), _PARAMS, clients=4)


def check(piece: ModuleType) -> None:
    trial = RouterTrial(piece)
    for rule, fleet, prompt, among in _KNOWN:
        trial.known(rule, fleet, prompt, among)
    random_ = random.Random(0)
    for _ in range(_FLEETS):
        blocks = ("", "x", "xy", "xyz", "yz", "z")
        fleet = {
            name: (random_.choice((0, 40, 300, 512, 560, 900)), random_.randrange(4), random_.choice(blocks))
            for name in _NAMES
        }
        trial.known("random", fleet, "xyz", "".join(random_.sample(_NAMES, random_.randint(1, 3))))
    del trial.calls[trial.setup :]
    ours: LocalRun = trial.call(f"two engines, {_TALKS * _TURNS} requests", lambda: _run(piece.MyRouter))
    theirs = _run(PrefixRouter)
    trial.require(ours.answers == theirs.answers, "kept", "the answers are not those of forge's own router")
    said = f"it made the engines compute {ours.computed_tokens} prompt tokens, and forge's own {theirs.computed_tokens}"
    trial.require(ours.computed_tokens <= 1.1 * theirs.computed_tokens, "little", said)


def drive(llm: LLM, router: Any, prompts: Sequence[str], params: SamplingParams) -> tuple[list[Any], list[Any]]:
    """The prompts on two engines of this model behind a router: outputs in order, and all steps."""
    cluster = LocalCluster([llm.new_engine(), llm.new_engine()], router)
    records: list[StepRecord] = []
    cluster.on_step = lambda name, record: records.append(record)
    outputs: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(prompts):
        cluster.submit(str(number), list(llm.tokenizer.encode(prompt)), params)
        outputs |= {name: cluster.take_output(name) for name in cluster.tick()}
    while len(outputs) < len(prompts):
        outputs |= {name: cluster.take_output(name) for name in cluster.tick()}
    return [outputs[str(number)] for number in range(len(prompts))], records


@contextmanager
def engine(piece: ModuleType) -> Iterator[Mapping[str, Any]]:
    yield _OPTIONS | {"drive": lambda llm, prompts, params: drive(llm, piece.MyRouter, prompts, params)}


_OPTIONS = {"kv": "prefix", "num_blocks": 128, "max_num_seqs": 8}
_STORY = "Once upon a time there was a fox who lived in a den under an old oak, and every evening a turtle came. "

EXERCISE = Exercise(
    names=("MyRouter",),
    rules=RULES,
    hints=(
        "num_blocks is a loop over request.keys that ends at the first block that the replica does not have.",
        "choose needs two replicas: the least busy candidate, and the least busy of those with the most blocks. Both "
        "are a min with a key: lambda one: (one.tokens, one.routed_tokens).",
        "If the most blocks are 0, it is the least busy. Otherwise compare holder.tokens - least.tokens with the "
        "threshold: more than it is too busy, as much as it is not.",
        "The last argument of decision is about the chosen replica: for holder_busy those are the blocks of the least "
        "busy one, which may be some.",
    ),
    solution=("forge.cluster.routers.PrefixRouter", "forge.cluster.fleet.PrefixMap.longest"),
    check=check,
    engine=engine,
    own=_OPTIONS | {"drive": lambda llm, prompts, params: drive(llm, PrefixRouter, prompts, params)},
    prompts=tuple(f"{_STORY}The {name}" for name in ("fox", "owl", "hen", "mole", "turtle", "duck", "mouse", "bee")),
    params={"max_tokens": 24, "ignore_eos": True},
)
