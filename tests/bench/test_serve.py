"""`forge bench serve`: what is measured, in whose keys, against servers that behave and servers that do not."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from forge.bench.http_client import ServerProblem, Timed
from forge.bench.process import ProcessFailed
from forge.bench.serve import (
    ServeBenchmark,
    ServePlan,
    engine_turns,
    goodput,
    latency_over_throughput,
    parse_goodput,
    percentiles,
    run,
    screen,
    serve_object,
)
from forge.cli.main import main
from forge.errors import UsageError
from forge.views.screen import draw
from forge.views.terminal import open_console
from forge.workload.requests import RecordedRequest

EVENT = b"data: "


@pytest.fixture
def forge(capfd):
    """Run a command line in this process."""

    def run_line(*args: str):
        status = main(args)
        captured = capfd.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return run_line


@contextmanager
def server(answer):
    """A server on a thread. `answer(body)` gives the pieces of an answer to a POST, each written by itself."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), []

    async def handle(reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [
                    int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l")
                ]
                body = json.loads(await reader.readexactly(length[0])) if length else None
                if body is None:
                    text = json.dumps({"data": [{"id": "stub"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
                    continue
                for piece in answer(body):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except asyncio.IncompleteReadError:
            writer.close()

    async def start():
        one = await asyncio.start_server(handle, "127.0.0.1", 0)
        address.append(one.sockets[0].getsockname()[1])
        ready.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(start()), loop.run_forever()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{address[0]}"
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        loop.call_soon_threadsafe(lambda: loop.call_later(0.05, loop.stop))
        thread.join()


def chunk(value) -> bytes:
    data = EVENT + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def polite(body):
    """Streams as many tokens as are asked for, two in an event, and says how many they were."""
    yield HEAD
    for _ in range(body["max_tokens"] // 2):
        yield chunk({"choices": [{"index": 0, "text": "ab"}]})
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    yield chunk({"choices": [], "usage": usage})
    yield chunk(b"[DONE]") + b"0\r\n\r\n"


def test_tokens_are_the_servers_count_and_connections_are_kept():
    with server(polite) as url:
        result = run(ServePlan(url, input_tokens=5, output_tokens=8, num_prompts=12, concurrency=3, probe_health=True))
    found = serve_object(result)
    assert result.model == "stub" and found["completed"] == 12 and found["failed"] == 0
    assert found["total_input_tokens"] == 60 and found["total_output_tokens"] == 96
    assert found["output_lens"] == [8] * 12 and [len(itl) for itl in found["itls"]] == [3] * 12
    assert found["output_throughput"] == pytest.approx(96 / found["duration"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert found[f"p50_{metric}_ms"] <= found[f"p99_{metric}_ms"]
        assert {f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms"} <= set(found)
    assert json.loads(json.dumps(found)) == found


def test_server_and_engine_take_turns_on_the_same_prompts():
    asked, turns = [], []

    def answer(body):
        asked.append(body["prompt"])
        yield from polite(body)

    def turn(prompts):
        assert asked[-len(prompts) :] == prompts
        turns.append(prompts)
        return 100.0

    with server(answer) as url:
        plan = ServePlan(url, input_tokens=3, output_tokens=4, num_prompts=10, concurrency=1)
        result = run(plan, engine_turn=turn)
    assert sorted(prompt for part in turns for prompt in part) == sorted(plan.prompts())
    assert len(result.turns) == 7 and serve_object(result)["engine_output_throughput"] == 100


def test_a_peer_that_answers_nothing_is_said_to_fail_and_compared_with_nothing(capfd):
    def rude(body):
        yield b"HTTP/1.1 500 no\r\ncontent-length: 2\r\n\r\nno"

    with server(polite) as url, server(rude) as other:
        plan = ServePlan(url, input_tokens=3, output_tokens=4, num_prompts=4, concurrency=1, turns=2)
        found = serve_object(run(plan, peer=replace(plan, url=other)))
    assert "peer_share" not in found and found["peer"]["failed"] == 4 and found["completed"] == 4
    draw(open_console(), screen(found))
    assert "times the peer" not in capfd.readouterr().out


def test_a_recorded_request_keeps_its_length_in_every_turn():
    recorded = tuple(RecordedRequest(0.0, 3 + number, 2 * (1 + number), 0) for number in range(9))
    asked = []

    def answer(body):
        asked.append((len(body["prompt"]), body["max_tokens"]))
        yield from polite(body)

    with server(answer) as url:
        plan = ServePlan(url, num_prompts=9, concurrency=1, turns=4, recorded=recorded)
        run(plan, peer=plan)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in recorded]
    assert sorted(asked[2:]) == sorted(lengths * 2), "after one request to each that is not timed"


def test_a_peer_is_asked_the_same_in_turns_by_the_same_client():
    asked: dict[str, list] = {"one": [], "other": []}

    def noting(name):
        def answer(body):
            asked[name].append(body["prompt"])
            yield from polite(body)

        return answer

    with server(noting("one")) as url, server(noting("other")) as peer:
        plan = ServePlan(url, input_tokens=3, output_tokens=4, num_prompts=10, concurrency=1, turns=5)
        result = run(plan, peer=replace(plan, url=peer))
    assert asked["one"] == asked["other"] and len(asked["one"]) == 10 + 1
    assert len(result.turns) == 5 and len(result.peer.good) == 10
    found = serve_object(result)
    assert found["peer_shares"] == sorted(found["peer_shares"]) and found["peer"]["completed"] == 10
    assert json.loads(json.dumps(found)) == found


def test_a_kept_connection_that_the_server_closes_is_no_failure():
    def abrupt(body):
        yield from polite(body)
        raise asyncio.IncompleteReadError(b"", 1)  # the stub hangs up, having said that the connection stays

    with server(abrupt) as url:
        result = run(ServePlan(url, input_tokens=3, output_tokens=4, num_prompts=20, concurrency=3))
    assert len(result.good) == 20


def test_errors_are_counted_and_kept_apart():
    def rude(body):
        if body["prompt"][0] % 2:
            yield from polite(body)
        else:
            text = b'{"error": {"message": "no"}}'
            yield b"HTTP/1.1 500 Oops\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)

    plan = ServePlan("", input_tokens=3, output_tokens=4, num_prompts=20, concurrency=2)
    failing = [prompt for prompt in plan.prompts() if prompt[0] % 2 == 0]
    with server(rude) as url:
        found = serve_object(run(ServePlan(url, input_tokens=3, output_tokens=4, num_prompts=20, concurrency=2)))
    assert found["failed"] == len(failing) > 0
    assert all(error.startswith("500") for error in found["errors"] if error)


def test_a_server_that_is_not_there_is_one_line():
    with pytest.raises(ServerProblem, match="does not answer"):
        run(ServePlan("http://127.0.0.1:1"), patience=0.1)


def test_the_same_seed_asks_the_same():
    assert ServePlan("x").prompts() == ServePlan("y").prompts() != ServePlan("x", seed=1).prompts()


def test_words_are_text():
    (prompt,) = ServePlan("x", dataset="words", input_tokens=7, num_prompts=1).prompts()
    assert len(prompt.split()) == 7


def timed(started, chunks, ended, tokens) -> Timed:
    return Timed(started, chunks, ended, 3, tokens)


def test_latencies_are_the_fields():
    one = timed(10.0, [10.1, 10.2, 10.5], 10.5, 5)
    assert one.ttft_ms == pytest.approx(100)
    assert one.tpot_ms == pytest.approx(100)
    assert one.e2el_ms == pytest.approx(500)
    assert one.itls_ms == pytest.approx([100, 300])
    assert timed(0, [1], 1, 1).tpot_ms is None


def test_percentiles_are_numpys():
    values = np.random.default_rng(0).exponential(size=77).tolist()
    for share in (50, 90, 95, 99):
        assert percentiles("ttft", values)[f"p{share}_ttft_ms"] == pytest.approx(np.percentile(values, share))


def test_goodput_counts_requests_that_meet_every_goal():
    requests = (timed(0, [0.1, 0.3], 0.3, 3), timed(0, [0.5, 0.6], 0.6, 3), timed(0, [0.1, 9.0], 9.0, 3))
    plan = ServePlan("", goodput=["ttft:200", "tpot:1000"])
    assert goodput(ServeBenchmark(plan, "m", requests, 2.0, 0.1, 0.0)) == 0.5
    for text in ("ttft", "ttft:x", "what:1", "ttft:-1"):
        with pytest.raises(UsageError, match="--goodput"):
            parse_goodput([text])


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"num_prompts": 0}, {"request_rate": 0.0}, {"dataset": "x"}, {"output_tokens": 0}]
)
def test_a_plan_without_a_meaning_is_refused(wrong):
    with pytest.raises(UsageError):
        ServePlan("x", **wrong)


def test_the_screen_names_the_clients_share_and_the_engines_own(capsys):
    requests = (timed(0, [0.1, 0.3], 0.3, 3),)
    result = ServeBenchmark(ServePlan(""), "m", requests, 2.0, 0.5, 0.0, (1.0, 2.0), turns=((1.5, 3.0), (1.0, 4.0)))
    draw(open_console(), screen(serve_object(result)))
    out = capsys.readouterr().out
    assert "25 % of one CPU" in out and "38 % (25 % to 50 %)" in out and "TTFT" in out and "p99" in out


def test_the_screen_shows_a_peer_beside_the_server(capsys):
    requests = (timed(0, [0.1, 0.3], 0.3, 3),)
    peer = ServeBenchmark(ServePlan(""), "p", requests, 2.0, 0.5, 0.0)
    result = replace(peer, turns=((3.0, 1.0), (8.0, 2.0)), peer=peer)
    draw(open_console(), screen(serve_object(result)))
    assert "3.50 (3.00 to 4.00)" in capsys.readouterr().out


def test_the_engines_turns_run_in_a_process_of_its_own():
    plan = ServePlan("x", input_tokens=3, output_tokens=4, num_prompts=4, concurrency=2, token_range=(1, 200))
    with engine_turns("hash", {"num_blocks": 64}, plan) as turn:
        assert turn(plan.prompts()) > 0
        with pytest.raises(ProcessFailed, match="the engine, answer: UsageError"):
            turn([[1] * 5000])


def begin_alike(prompts, tokens) -> int:
    """How many begin with the same tokens as another."""
    heads = [tuple(prompt[:tokens]) for prompt in prompts]
    return sum(heads.count(head) > 1 for head in heads)


def test_prompts_begin_alike_as_their_reuse_says():
    plan = ServePlan("x", input_tokens=20, num_prompts=200)
    assert begin_alike(plan.prompts(), 10) == 0
    half = replace(plan, prefix_reuse="0.5").prompts()
    assert begin_alike(half, 10) == 200 and begin_alike(half, 11) < 20 and {len(one) for one in half} == {20}
    mixed = replace(plan, prefix_reuse="0:1,0.5:1").prompts()
    assert 60 < begin_alike(mixed, 10) < 140 and mixed == replace(plan, prefix_reuse="0:1,0.5:1").prompts()
    texts = replace(plan, dataset="words", prefix_reuse="1").prompts()
    assert len(set(texts)) == 4 and {len(text.split()) for text in texts} == {20}


@pytest.mark.parametrize("text", ["", "2", "0.5:0", "half", "0.5:1:2", "nan"])
def test_a_reuse_without_a_meaning_is_refused(text):
    with pytest.raises(UsageError, match="--prefix-reuse is a share"):
        ServePlan("x", prefix_reuse=text)


def test_a_sweep_has_a_row_per_level_a_picture_and_logs(forge, tmp_path):
    logs, svg = tmp_path / "logs", tmp_path / "sweep.svg"
    line = ("bench", "serve", "--concurrency", "1,2,4", "--input-tokens", "5", "--output-tokens", "8")
    line += ("--num-prompts", "12")
    with server(polite) as url:
        found = forge(*line, "--url", url, "--svg", str(svg), "--log-dir", str(logs), "--chart")
        facts = json.loads(forge(*line, "--url", url, "--json").out)
    assert found.status == 0 and "by how many are under way" in found.out and "over output tokens/s" in found.out
    assert found.out.count("Throughput over time") == 3 and "TTFT, ms" in found.out and "4 at once" in found.out
    assert [level["max_concurrency"] for level in facts["levels"]] == [1, 2, 4]
    assert sorted(path.name.rpartition("-")[2] for path in logs.iterdir()) == ["1.json", "2.json", "4.json"]
    assert all(json.loads(path.read_text())["completed"] == 12 for path in logs.iterdir())
    assert svg.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize("width", [40, 80])
def test_the_picture_of_a_sweep_is_as_wide_as_the_terminal_at_most(width):
    speeds = ((1, 300.0, 1000.0), (16, 900.0, 4321.0))
    levels = [
        {"max_concurrency": number, "output_throughput": speed, "p50_e2el_ms": ms} for number, speed, ms in speeds
    ]
    lines = latency_over_throughput(levels, width)
    assert max(line.cell_len for line in lines) <= width and lines[0].plain.endswith("16")


def test_levels_that_are_none_are_refused(forge):
    for text in ("0", "1,two", ""):
        found = forge("bench", "serve", "--concurrency", text)
        assert found.status == 2 and "--concurrency takes numbers" in found.err


def test_unique_prompts_begin_with_tokens_of_their_own():
    plan = ServePlan("x", dataset="unique", input_tokens=4, num_prompts=50, token_range=(0, 60))
    assert begin_alike(plan.prompts(), 1) == 0 and {len(one) for one in plan.prompts()} == {4}
