"""Chapter 12's exercises: each answer holds for what its command measures."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from forge.bench.http_client import Timed
from forge.cli.main import main
from forge.cluster.simulation import StepTime, Transport
from forge.experiments.cluster import measured as measured_part
from forge.experiments.cluster.failure import _stream, metric, num_identical
from forge.experiments.cluster.measured import fit_costs, measured_object, screen

COMMAND = ("cluster", "--only", "run", "--json")


@pytest.fixture
def measured(capfd):
    def run(*options: str) -> dict:
        assert main((*COMMAND, *options)) == 0
        return json.loads(capfd.readouterr().out)

    return run


def test_exercise_1_without_a_threshold_the_prefix_router_is_round_robin(measured):
    prefix = measured("--router", "prefix", "--threshold", "0")["routers"]["prefix"]
    turns = measured("--router", "round-robin")["routers"]["round_robin"]
    assert 0.8 < prefix["tokens_computed"] / turns["tokens_computed"] < 1.1
    assert prefix["reasons"]["holder_busy"] > 16


def test_exercise_2_the_estimate_believes_in_blocks_that_are_gone(measured):
    found = measured("--num-blocks", "64")["routers"]
    events, estimate = (found[name]["believed_wrongly"] for name in ("prefix", "prefix_estimate"))
    assert estimate > 24 and events < estimate / 2


def test_exercise_3_with_four_engines_round_robin_computes_more_and_the_prefix_router_does_not(measured):
    two, four = (
        measured("--replicas", number, "--router", "round-robin", "--router", "prefix")["routers"] for number in "24"
    )
    assert four["round_robin"]["over_one_engine"] > two["round_robin"]["over_one_engine"] + 0.3
    assert four["prefix"]["over_one_engine"] < 1.1


def test_too_few_requests_are_refused(capfd):
    assert main(("cluster", "--only", "run", "--requests", "2")) == 2
    assert "--requests is at least 4" in capfd.readouterr().err


def test_an_unknown_router_is_refused(capfd):
    assert main(("cluster", "--only", "run", "--router", "best")) == 2
    assert "unknown router 'best'" in capfd.readouterr().err


def test_requests_that_fail_both_times_are_not_identical():
    assert num_identical(["a", "b", "c", ""], ["a", "x", "", ""]) == 1


def test_a_stream_that_is_refused_is_lost_and_ends_no_other():
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_error(503)

        def log_message(self, *arguments):
            pass

    began = []
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        text, _, _ = _stream(url, 0, lambda: began.append(1), lambda text: None)
    assert (text, began) == ("", [1])


def test_a_proxy_is_not_asked_for_a_server_on_this_machine(monkeypatch):
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'reachable{engine="a"} 1\nreachable{engine="b"} 2\nreachable_since{engine="a"} 9\n')

        def log_message(self, *arguments):
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.handle_request, daemon=True).start()
        assert metric(f"http://127.0.0.1:{server.server_port}", "reachable") == 3


@pytest.mark.parametrize("part", ["failure", "measured"])
def test_without_ray_serve_a_part_that_needs_it_says_so(capfd, monkeypatch, part: str):
    monkeypatch.setattr("forge.experiments.cluster.failure.find_spec", lambda name: None)
    assert main(("cluster", "--only", "run", "--part", part)) == 0
    assert "Ray Serve is not installed" in capfd.readouterr().out


def test_costs_are_read_from_steps_and_from_what_clients_saw():
    """An engine computes 10 tokens in 20 ms, then decodes twice in 5 ms, 1 ms of which lies between the steps."""
    item = {"phase": "prefill", "num_tokens": 10}
    arrived = {"request_id": "cmpl-1", "seq_ids": [0], "arrived": 100.003}
    decode = {"phase": "decode", "num_tokens": 1}
    token = {"tokens": [{"seq_id": 0}], "replica": "a"}
    steps = [
        token | {"started": 100.004, "ended": 100.023, "items": [item], "arrived": [arrived]},
        token | {"started": 100.024, "ended": 100.028, "items": [decode]},
        token | {"started": 100.029, "ended": 100.034, "items": [decode]},
    ]
    answer = Timed(100.0, chunks=[100.025, 100.031], ended=100.04, request_id="cmpl-1")
    step_time, transport = fit_costs(steps, [answer])
    assert step_time.fixed + 10 * step_time.prefill_token == pytest.approx(20)
    assert step_time.fixed + step_time.decode_token == pytest.approx(5)
    assert (transport.to_engine, transport.to_front) == pytest.approx((0.003, 0.002))


def test_a_measured_run_is_drawn_with_its_simulation_beside_it(monkeypatch):
    monkeypatch.setattr(measured_part, "REQUESTS", 2)
    prompts = [[number] * 40 for number in range(measured_part.TURNS * 2)]

    def turn(seconds: float) -> list[Timed]:
        return [Timed(0.0, [0.05, seconds], seconds, 40, 11, "once") for _ in range(2)]

    turns = {"one": [turn(0.2)] * measured_part.TURNS, "two": [turn(0.1)] * measured_part.TURNS}
    lone = {"one": turn(0.2), "two": turn(0.1)}
    facts = measured_object(prompts, turns, lone, StepTime(), Transport())
    assert facts["ratio"] == pytest.approx(2) and facts["identical"]
    assert facts["two"]["tpot_ms"] == pytest.approx(5) and facts["lone_ratio"] == pytest.approx(1 / 3)
    drawn = "\n".join(map(str, screen(facts)))
    assert "answers of 11 to 11 tokens" in drawn and "simulated against measured: TTFT -" in drawn
