"""Routers: each request goes to one replica that runs, loads are exact, and a prefix goes where it is cached."""

import random

import pytest

from forge.cluster.events import SEQUENCE_TOKENS, CacheEvents, Load
from forge.cluster.fleet import Fleet, NoReplica, PrefixMap, Replica, RouteRequest, SentPrompts
from forge.cluster.routers import ROUTERS, EstimatedPrefixRouter, new_router
from forge.errors import UsageError


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    for name in names:
        fleet.join(name)
    return fleet


def request(number: int, keys: tuple[int, ...] = (), tokens: int = 100) -> RouteRequest:
    return RouteRequest(f"r{number}", keys, tokens, 16)


@pytest.mark.parametrize("name", ROUTERS)
def test_whatever_joins_leaves_and_is_accepted_every_request_counts_once_at_a_replica_that_runs(name: str):
    random_ = random.Random(7)
    fleet = fleet_of("a", "b")
    router, outstanding, number = new_router(name, fleet), {}, 0
    for _ in range(2000):
        match random_.choice(("route", "route", "end", "join", "leave", "events", "again")):
            case "route" if fleet.replicas:
                number += 1
                keys = tuple(random_.choices(range(40), k=random_.randint(0, 5)))
                decision = router.route(request(number, keys))
                outstanding[f"r{number}"] = fleet.replicas[decision.replica]
                assert decision.replica in fleet.replicas
            case "again" if outstanding and fleet.replicas:
                request_id = random_.choice(list(outstanding))
                decision = router.route(RouteRequest(request_id, (), 50))
                outstanding[request_id] = fleet.replicas[decision.replica]
            case "end" if outstanding:
                request_id = random_.choice(list(outstanding))
                fleet.end(request_id)
                fleet.end(request_id)
                del outstanding[request_id]
            case "join":
                fleet.join(random_.choice("abcd"))
            case "leave" if len(fleet.replicas) > 1:
                fleet.leave(random_.choice(list(fleet.replicas)))
            case "events" if fleet.replicas:
                keys = tuple(random_.sample(range(40), 6))
                fleet.apply(random_.choice("abcd"), CacheEvents(keys[:3], keys[3:]))
        for replica in fleet.replicas.values():
            assert replica.requests == sum(one is replica for one in outstanding.values())
            assert replica.tokens >= 0 and (replica.requests or not replica.tokens)
        bits = {1 << one.index for one in fleet.replicas.values()}
        assert len(bits) == len(fleet.replicas)
        assert all(fleet.prefixes.holders.values())


def test_round_robin_takes_each_in_turn():
    router = new_router("round-robin", fleet_of("a", "b", "c"))
    assert [router.route(request(number)).replica for number in range(6)] == list("abcabc")


def test_p2c_takes_the_one_of_two_with_fewer_requests():
    router = new_router("p2c", fleet_of("a", "b"))
    for number in range(10):
        router.route(request(number))
    assert {one.requests for one in router.fleet.replicas.values()} == {5}


def test_p2c_compares_two_of_many_and_one_where_there_is_no_other():
    router = new_router("p2c", fleet_of(*"abcdefgh"))
    decisions = [router.route(request(number)) for number in range(400)]
    assert {decision.num_candidates for decision in decisions} == {2}
    taken = sorted(replica.requests for replica in router.fleet.replicas.values())
    assert taken[-1] - taken[0] > 1, "comparing three or more of eight would leave them even"
    assert new_router("p2c", fleet_of("a")).route(request(0)).num_candidates == 1


def test_of_a_prompt_that_is_cached_whole_one_token_is_computed():
    fleet = fleet_of("a")
    fleet.apply("a", CacheEvents(published=(1, 2)))
    router = new_router("prefix", fleet)
    assert router.route(RouteRequest("r0", (1, 2), 32, 16)).cached_tokens == 31
    assert router.route(RouteRequest("r1", (1, 2), 33, 16)).cached_tokens == 32
    assert router.route(RouteRequest("r3", (), 0, 16)).cached_tokens == 0
    no_prefix = router.route(RouteRequest("r2", (7,), 16, 16))
    assert (no_prefix.cached_tokens, no_prefix.holder, no_prefix.holder_tokens, no_prefix.holder_load) == (
        0,
        None,
        0,
        0,
    )


@pytest.mark.parametrize("name", ["prefix", "prefix-estimate"])
def test_the_threshold_is_the_one_that_a_router_is_made_with(name):
    fleet = fleet_of("a", "b")
    router = new_router(name, fleet, threshold=0)
    fleet.prefixes.publish(fleet.replicas["b"].index, (1, 2, 3))
    decisions = [router.route(RouteRequest(f"r{number}", (1, 2, 3, 9), 300)) for number in range(2)]
    assert [decision.why for decision in decisions] == ["prefix", "holder_busy"]


def test_fronts_with_different_seeds_draw_differently_and_one_seed_draws_the_same():
    def drawn(seed: int) -> list[str]:
        router = new_router("p2c", fleet_of(*"abcdefgh"), seed=seed)
        return [router.route(request(number)).replica for number in range(20)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_least_tokens_weighs_requests_by_their_length():
    router = new_router("least-tokens", fleet_of("a", "b"))
    assert router.route(request(0, tokens=1000)).replica == "a"
    assert [router.route(request(number, tokens=50)).replica for number in range(1, 4)] == ["b", "b", "b"]


def test_a_prefix_goes_to_its_holder_until_that_is_busier_by_the_threshold():
    fleet = fleet_of("a", "b")
    router = new_router("prefix", fleet)
    fleet.apply("b", CacheEvents(published=(1, 2, 3)))
    keys = (1, 2, 3, 9)
    decisions = [router.route(RouteRequest(f"r{number}", keys, 300)) for number in range(3)]
    assert [(one.replica, one.why) for one in decisions] == [("b", "prefix"), ("b", "prefix"), ("a", "holder_busy")]
    assert decisions[0].cached_tokens == 48
    assert decisions[2].holder == "b" and decisions[2].holder_load == 2 * (300 - 48 + SEQUENCE_TOKENS)


def test_a_load_is_the_prompt_tokens_left_and_the_sequences_and_not_how_long_an_answer_may_become():
    fleet = fleet_of("a", "b")
    router = new_router("least-tokens", fleet)
    assert router.route(request(0, tokens=1000)).replica == "a"
    fleet.end("r0")  # accepted: from here on the engine's reports count it
    fleet.report("a", Load(1000, 1))
    assert [fleet.replicas[name].tokens for name in "ab"] == [1000 + SEQUENCE_TOKENS, 0]
    fleet.report("a", Load(0, 1))  # its prompt is computed, and it decodes
    assert fleet.replicas["a"].tokens == SEQUENCE_TOKENS
    fleet.report("b", Load(400, 1))  # of another front's request
    assert router.route(request(1)).replica == "a"


def test_a_suspended_replica_gets_requests_only_while_there_is_no_other():
    fleet = fleet_of("a", "b")
    router = new_router("least-tokens", fleet)
    fleet.suspend("a")
    assert {router.route(request(number)).replica for number in range(4)} == {"b"} and fleet.num_healthy == 1
    fleet.suspend("b")
    assert router.route(request(5)).replica == "a" and not fleet.num_healthy
    fleet.resume("b")
    assert router.route(request(6)).replica == "b"


@pytest.mark.parametrize("name", ROUTERS)
def test_a_decision_among_a_thousand_replicas_reads_as_many_loads_as_one_among_a_hundred(name: str, monkeypatch):
    read: list[str] = []
    get = object.__getattribute__
    monkeypatch.setattr(Replica, "__getattribute__", lambda one, key: read.append(key) or get(one, key))
    reads = []
    for number in (100, 1000):
        fleet = fleet_of(*map(str, range(number)))
        for replica in range(0, number, 2):
            fleet.apply(str(replica), CacheEvents(published=(1, 2)))
        router = new_router(name, fleet)
        router.route(request(0, (1, 2)))
        read.clear()
        for index in range(1, 50):
            router.route(request(index, (1, 2)))
        reads.append(len(read))
    assert reads[1] < 1.3 * reads[0]


def test_a_prefix_decision_that_avoids_a_replica_builds_no_mask_of_all_others(monkeypatch):
    fleet = fleet_of(*map(str, range(1000)))
    for name in ("0", "1"):
        fleet.apply(name, CacheEvents(published=(1, 2)))
    router = new_router("prefix", fleet)
    router.route(request(0, (1, 2)))
    read: list[str] = []
    get = object.__getattribute__
    monkeypatch.setattr(Replica, "__getattribute__", lambda one, key: read.append(key) or get(one, key))
    assert router.route(RouteRequest("r1", (1, 2), 100, avoid=frozenset("0"))).replica == "1"
    assert read.count("index") < 10


def test_the_mask_of_the_candidates_is_theirs_whatever_is_avoided_suspended_or_of_another_version():
    random_, fleet = random.Random(3), Fleet()
    for index, name in enumerate("abcdef"):
        fleet.join(name, version="new" if index % 2 else "old")
    for _ in range(500):
        change = random_.choice((fleet.suspend, fleet.resume, fleet.leave, fleet.join))
        name = random_.choice("abcdef")
        if change == fleet.join:
            fleet.join(name, random_.choice(("new", "old")))
        elif change != fleet.leave or len(fleet.replicas) > 1:
            change(name)
        avoid = frozenset(random_.sample("abcdef", random_.randrange(7)))
        version = random_.choice([None, *(replica.version for replica in fleet.replicas.values())])
        candidates = fleet.candidates(avoid, version)
        assert fleet.candidates_mask(avoid, version) == sum(1 << replica.index for replica in candidates)


def test_a_draw_among_many_finds_one_of_the_least_busy_and_fills_all():
    router = new_router("least-tokens", fleet_of(*map(str, range(200))))
    for number in range(2000):
        router.route(request(number))
    requests = [replica.requests for replica in router.fleet.replicas.values()]
    assert sum(requests) == 2000 and min(requests) >= 7 and max(requests) <= 12


def test_of_idle_replicas_the_one_is_chosen_that_all_fronts_together_gave_least():
    router = new_router("least-tokens", fleet_of("a", "b", "c"))
    for name, given in (("a", 300), ("b", 100), ("c", 200)):
        router.fleet.report(name, Load(given=given))
    assert router.route(request(0, tokens=150)).replica == "b"
    router.fleet.end("r0")
    router.fleet.report("b", Load(given=250))  # that request, which has ended
    assert router.route(request(1)).replica == "c"


def test_a_replica_that_failed_at_a_request_is_avoided_if_there_is_another():
    router = new_router("round-robin", fleet_of("a", "b"))
    assert {router.route(RouteRequest("r", avoid=frozenset("a"))).replica for _ in range(3)} == {"b"}
    assert router.route(RouteRequest("r", avoid=frozenset("ab"))).replica in "ab"


def test_the_index_is_bounded_and_keeps_what_was_published_last():
    prefixes = PrefixMap(max_bytes=320 * 1000)
    for key in range(5000):
        prefixes.publish(0, (7_000_000, key))  # one key is published again and again
    assert len(prefixes.holders) <= 1000 and 7_000_000 in prefixes.holders and 4999 in prefixes.holders


def test_a_replica_that_leaves_is_swept_in_parts_and_never_seen_meanwhile():
    fleet = fleet_of("a", "b")
    fleet.apply("a", CacheEvents(published=tuple(range(2000))))
    fleet.leave("a")
    assert len(fleet.prefixes.holders) == 2000, "leaving does not walk through the index"
    assert fleet.join("c").index == 2, "a bit is not given again before it is swept"
    assert fleet.prefixes.longest((1, 2), fleet.candidates_mask()) == (0, 0)
    for key in range(10_000, 10_008):
        fleet.apply("b", CacheEvents(published=(key,)))
    assert len(fleet.prefixes.holders) == 8 and fleet.join("d").index == 0


def test_the_longest_prefix_wins_and_an_evicted_block_ends_it():
    fleet = fleet_of("a", "b")
    router = new_router("prefix", fleet)
    fleet.apply("a", CacheEvents(published=(1,)))
    fleet.apply("b", CacheEvents(published=(1, 2)))
    assert router.route(request(0, (1, 2))).replica == "b"
    fleet.apply("b", CacheEvents(evicted=(1, 2)))
    assert router.route(request(1, (1, 2))).replica == "a"
    fleet.apply("a", CacheEvents(evicted=(1,)))
    assert router.route(request(2, (1, 2))).why == "no_prefix"


def test_a_replica_that_comes_back_has_nothing_cached():
    fleet = fleet_of("a", "b")
    fleet.apply("a", CacheEvents(published=(1, 2)))
    fleet.leave("a")
    fleet.join("a")
    assert fleet.prefixes.longest((1, 2), fleet.candidates_mask()) == (0, 0)


def test_the_estimate_believes_in_what_it_sent_and_forgets_the_oldest():
    fleet = fleet_of("a", "b")
    router = EstimatedPrefixRouter(fleet, num_blocks=4)
    first = router.route(request(0, (1, 2))).replica
    fleet.end("r0")
    assert router.route(request(1, (1, 2, 3))).replica == first
    router.route(request(2, (7, 8, 9)))
    assert fleet.prefixes.longest((1, 2, 3), fleet.candidates_mask())[0] == 3
    router.route(request(3, (11,)))
    assert fleet.prefixes.longest((1, 2, 3), fleet.candidates_mask()) == (0, 0)
    assert fleet.prefixes.longest((7, 8, 9), fleet.candidates_mask())[0] == 3 and len(fleet.prefixes) == 4


def test_the_estimate_remembers_ten_thousand_blocks_unless_another_number_is_given():
    router = new_router("prefix-estimate", fleet_of("a"))
    for number in range(100):
        router.route(request(number, tuple(range(100 * number, 100 * number + 100))))
    assert router.fleet.prefixes.longest(tuple(range(100)), 1) == (100, 1)


def test_the_estimate_keeps_what_was_sent_again():
    fleet = fleet_of("a")
    router = EstimatedPrefixRouter(fleet, num_blocks=4)
    for number, keys in enumerate([(1,), (2,), (3,), (1,), (4,), (5,)]):
        router.route(request(number, keys))
    assert [key for key in range(1, 6) if fleet.prefixes.longest((key,), 1)[0]] == [1, 3, 4, 5]


def test_the_estimate_finds_by_halving_what_a_walk_along_the_prompts_finds():
    random_, prefixes = random.Random(5), SentPrompts(200)
    halves: list[set[tuple[int, tuple[int, ...]]]] = [set(), set()]
    """The blocks that were sent, newer first, each with its replica and its whole prefix, which is its key."""
    for _ in range(3000):
        tokens = tuple(random_.choices(range(2), k=random_.randrange(9)))
        prefix = [tokens[:end] for end in range(1, len(tokens) + 1)]
        keys = [hash(part) for part in prefix]
        if random_.random() < 0.5:
            replica = random_.randrange(3)
            if len({part for _, part in halves[0]}) >= 100:
                halves = [set(), halves[0]]
            prefixes.publish(replica, keys)
            halves[0] |= {(replica, part) for part in prefix}
        among = random_.randrange(1, 8)
        length, best = 0, 0
        for end, part in enumerate(prefix, 1):
            bits = sum({1 << replica for half in halves for replica, known in half if known == part}) & among
            if bits:
                length, best = end, bits
        assert prefixes.longest(keys, among) == (length, best)
        assert len(prefixes) == len({part for half in halves for _, part in half})


def test_the_estimate_looks_at_a_few_blocks_of_a_long_prompt():
    looked_at = []

    class Key(int):
        def __hash__(self) -> int:
            looked_at.append(int(self))
            return int(self)

    prefixes, keys = SentPrompts(2000), [Key(number) for number in range(512)]
    prefixes.publish(0, keys[:500])
    looked_at.clear()
    assert prefixes.longest(keys, 1) == (500, 1) and len(looked_at) < 25
    looked_at.clear()
    prefixes.publish(0, keys)
    assert len(looked_at) < 70, "but for the new ones"


def test_the_bit_of_a_replica_that_left_is_given_again_when_the_estimate_has_forgotten_it():
    fleet = fleet_of("a", "b")
    router = EstimatedPrefixRouter(fleet, num_blocks=4)
    router.route(request(0, (1, 2)))
    (gone,) = [name for name in "ab" if fleet.prefixes.longest((1,), 1 << fleet.replicas[name].index)[0]]
    index = fleet.replicas[gone].index
    fleet.leave(gone)
    given = []
    for number in range(1, 5):
        given.append(fleet.join(f"new {number}").index)
        assert fleet.prefixes.longest((1,), 1 << given[-1]) == (0, 0), "it has nothing of that replica's"
        router.route(request(number, (10 * number, 10 * number + 1)))
    assert given[:2] == [2, 3] and index in given[2:]


def test_a_request_that_is_routed_again_does_not_count_against_where_it_was():
    router = new_router("least-tokens", fleet_of("a", "b"))
    assert [router.route(request(0)).replica for _ in range(3)] == ["a", "a", "a"]


def test_a_record_says_the_load_before_the_request_came_and_the_least():
    router = new_router("round-robin", fleet_of("a", "b"))
    decisions = [router.route(request(number)) for number in range(4)]
    assert [(decision.load, decision.least_load) for decision in decisions] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    router.fleet.end("r1")
    assert [(one.load, one.least_load) for one in [router.route(request(4))]] == [(2, 1)]
    router = new_router("p2c", fleet_of("a", "b"))
    router.fleet.begin(request(9), router.choose(request(9), [router.fleet.replicas["a"]]))
    decision = router.route(request(0))
    assert (decision.replica, decision.load, decision.least_load) == ("b", 0, 0)
    decision = router.choose(request(1), [router.fleet.replicas["a"]])
    assert (decision.load, decision.least_load) == (1, 1)


def test_the_least_busy_replica_that_a_busy_holder_yields_to_may_have_a_part_of_the_prefix():
    fleet = fleet_of("a", "b")
    fleet.apply("a", CacheEvents(published=(1,)))
    fleet.apply("b", CacheEvents(published=(1, 2, 3)))
    fleet.report("b", Load(5000, 1))
    decision = new_router("prefix", fleet).route(RouteRequest("r0", (1, 2, 3), 100, 16))
    assert (decision.replica, decision.why, decision.cached_tokens) == ("a", "holder_busy", 16)
    assert (decision.holder, decision.holder_tokens, decision.least_load) == ("b", 48, 0)


def test_a_holder_that_is_as_busy_as_all_others_is_still_chosen():
    fleet = fleet_of("a", "b")
    fleet.apply("b", CacheEvents(published=(1, 2, 3)))
    for name in "ab":
        fleet.report(name, Load(5000, 1))
    decision = new_router("prefix", fleet).route(RouteRequest("r0", (1, 2, 3), 100, 16))
    assert (decision.replica, decision.why) == ("b", "prefix")


@pytest.mark.parametrize("name", ROUTERS)
def test_a_record_names_its_request_its_router_and_the_replica(name):
    fleet = fleet_of("a", "b")
    decision = new_router(name, fleet).route(request(7))
    assert (decision.request_id, decision.router) == ("r7", name)
    assert fleet.replicas[decision.replica].requests == 1
    reasons = {"round-robin": "turn", "p2c": "fewer_requests", "least-tokens": "fewer_tokens"}
    assert (decision.why, decision.num_candidates) == (reasons.get(name, "no_prefix"), 2)


def test_of_more_than_sixteen_replicas_sixteen_are_compared():
    router = new_router("least-tokens", fleet_of(*map(str, range(17))))
    candidates = router.fleet.candidates()
    assert len(router.compared(candidates)) == 16 and router.compared(candidates[:16]) == candidates[:16]


@pytest.mark.parametrize("name", ["prefix", "prefix-estimate"])
@pytest.mark.parametrize(("load", "why"), [(512, "prefix"), (513, "holder_busy")])
def test_a_holder_may_be_busier_by_512_tokens_unless_another_threshold_is_given(name, load, why):
    for new in (new_router, lambda name, fleet: ROUTERS[name](fleet)):
        fleet = fleet_of("a", "b")
        router = new(name, fleet)
        fleet.prefixes.publish(fleet.replicas["b"].index, (1, 2, 3))
        fleet.report("b", Load(load))
        assert router.choose(request(0, (1, 2, 3)), fleet.candidates()).why == why


def test_only_the_router_that_knows_what_is_cached_reads_events():
    assert [name for name, router in ROUTERS.items() if router.needs_events] == ["prefix"]


def test_without_a_replica_the_error_says_so():
    with pytest.raises(NoReplica, match="no replica runs"):
        new_router("prefix", Fleet()).route(request(0))


def test_an_unknown_router_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="unknown router 'fastest'; there are round-robin, p2c"):
        new_router("fastest", Fleet())
