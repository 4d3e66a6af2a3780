"""Small parts of a cluster: the handshake, pulses, the breaker, scaling, and batches of events."""

import socket
import threading
from types import SimpleNamespace

import pytest

from forge.cluster.events import CacheEvents
from forge.cluster.fleet import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Breaker
from forge.cluster.launch import default_name
from forge.cluster.options import _NAME
from forge.cluster.replica import scale_by_sequences, wanted_replicas
from forge.cluster.wire import Pulse, Unreachable, admit, connect, listen, pulses


def admitted(secret: bytes, theirs: bytes, purpose: str = "front"):
    """What both ends make of a connection whose ends know these secrets."""
    with listen("127.0.0.1") as listening:
        found = []

        def engine() -> None:
            connection, _ = listening.accept()
            with connection:
                found.append(admit(connection, secret))

        thread = threading.Thread(target=engine)
        thread.start()
        try:
            connect(listening.getsockname()[:2], theirs, purpose).close()
            return found
        finally:
            thread.join()


@pytest.mark.parametrize("purpose", ["front", "pulse"])
def test_who_knows_the_secret_is_admitted_and_says_what_for(purpose: str):
    assert admitted(b"secret", b"secret", purpose) == [purpose]


def test_who_does_not_know_the_secret_is_refused():
    with pytest.raises(Unreachable, match="it closed the connection"):
        admitted(b"secret", b"guess")


def test_an_engine_that_does_not_know_the_secret_is_not_believed():
    """One that takes every proof, and sends one of its own."""
    with listen("127.0.0.1") as listening:

        def impostor() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(1000)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(Unreachable, match="does not know the secret"):
            connect(listening.getsockname()[:2], b"secret", "front")
        thread.join()


def test_a_port_without_an_engine_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()[:2]
    with pytest.raises(Unreachable, match="cannot be reached"):
        connect(address, b"secret", "front")


def test_pulses_come_whole_however_they_are_cut():
    sent = [Pulse(1, 0.0, 0, 2), Pulse(2, 1.5, 3, 4)]
    data, found = b"".join(pulse.packed() for pulse in sent), []
    for cut in range(len(data)):
        whole, rest = pulses(data[:cut])
        found, _ = pulses(rest + data[cut:])
        assert whole + found == sent


def test_a_breaker_opens_after_failures_in_a_row_and_its_pause_doubles():
    breaker = Breaker()
    assert [breaker.failed() for _ in range(FAILURES)] == [*[None] * (FAILURES - 1), FIRST_PAUSE]
    assert breaker.failed() == 2 * FIRST_PAUSE, "a trial that fails opens it at once"
    for _ in range(20):
        pause = breaker.failed()
    assert pause == LONGEST_PAUSE
    breaker.succeeded()
    assert breaker.failed() is None
    assert breaker.failed(is_gone=True) == FIRST_PAUSE, "what cannot be reached needs no second failure"


def test_a_success_in_between_keeps_a_breaker_closed():
    breaker = Breaker()
    for _ in range(10):
        assert breaker.failed() is None
        breaker.succeeded()


@pytest.mark.parametrize(("sequences", "replicas"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_as_many_engines_as_the_sequences_need(sequences: int, replicas: int):
    assert wanted_replicas(sequences, 8.0) == replicas


def test_scaling_adds_up_what_the_engines_tell():
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 2.0)
    context = SimpleNamespace(config=config, aggregated_metrics={"sequences": {"a": 3.0, "b": 4.0}})
    assert scale_by_sequences(context) == (4, {})
    assert scale_by_sequences(SimpleNamespace(config=config, aggregated_metrics=None)) == (1, {})


def test_two_batches_of_events_are_one_batch_with_what_holds_at_the_end():
    first, later = CacheEvents((1, 2), (3, 4)), CacheEvents((4, 5), (1,))
    both = first.then(later)
    assert set(both.published) == {2, 4, 5} and set(both.evicted) == {3, 1}
    assert CacheEvents().then(later) is later and first.then(CacheEvents()) is first


@pytest.mark.parametrize("model", ["tales", "Qwen/Qwen3-0.6B-GGUF:Q8_0", "/models/a b.gguf", "日本", "x" * 99])
def test_every_server_has_a_name_of_its_own_that_may_be_given(model: str):
    names = {default_name(model) for _ in range(4)}
    assert len(names) > 1 and all(_NAME.fullmatch(name) for name in names), names
