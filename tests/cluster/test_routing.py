"""A deployment's router in this process: its decisions are kept, and a replica that failed is avoided."""

from forge.cluster.fleet import RouteRequest
from forge.cluster.routing import MAX_DECISIONS, Routing, forget_routings, routing_of


def routing(router: str = "round-robin") -> Routing:
    made = Routing()
    made.begin(router)
    made.set_replicas(["a", "b"])
    return made


def test_a_request_for_one_replica_goes_there_and_counts_for_none():
    one = routing()
    assert one.route(RouteRequest("f", target="b"), ["a", "b"]) == "b"
    assert not one.decisions and not one.fleet.replicas["b"].requests


def test_a_replica_that_failed_is_avoided_if_there_is_another():
    one = routing("least-tokens")
    assert {one.route(RouteRequest("r", avoid="a"), ["a", "b"]) for _ in range(3)} == {"b"}
    assert one.route(RouteRequest("r", avoid="a"), ["a"]) == "a"


def test_the_last_decisions_are_kept():
    one = routing()
    for number in range(MAX_DECISIONS + 5):
        one.route(RouteRequest(f"r{number}"), ["a", "b"])
        one.fleet.end(f"r{number}")
    assert len(one.decisions) == MAX_DECISIONS and "r4" not in one.decisions


def test_it_is_told_when_other_replicas_run():
    one, told = routing(), []
    one.on_change = lambda: told.append(set(one.fleet.replicas))
    one.set_replicas(["b", "a"])
    one.set_replicas(["b", "c"])
    assert told == [{"b", "c"}]


def test_the_routing_of_a_deployment_is_one_until_it_is_forgotten():
    found = routing_of("engines")
    assert routing_of("engines") is found
    forget_routings()
    assert routing_of("engines") is not found
    forget_routings()
