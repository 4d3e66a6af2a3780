"""`forge cluster --part measured`: two engines against one, and the simulator against what was measured (Ray Serve).

The requests are stories that end where the model ends them: what they allow says nothing of their length. The first
turn of the two engines tells what a step and the transport cost; the simulator replays the requests of the later turns
with these costs.
"""

import asyncio
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean, median
from typing import Any

from forge.bench.http_client import HttpClient, Timed
from forge.cluster.simulation import SimulationOptions, SimulationResult, StepTime, Transport, fit_step_time, replay
from forge.errors import ForgeError
from forge.experiments.cluster.failure import metric, ray_is_installed, wait_until, without_ray
from forge.server.server_process import ANSWER_SECONDS, ServerProcess, ask, asked
from forge.trace.totals import percentile
from forge.views.progress import progress_line
from forge.views.screen import Part, Report, Table, check, fill, question, report, sentences
from forge.workload.conversations import KnownRequest

MODEL, CLIENTS, LONE = "tales", 8, 2
"""LONE: requests without another one beside them, per turn."""
REQUESTS, TURNS = 32, 3
"""Requests per turn, and turns of each server. The first of the two engines' turns tells the costs."""
BEGINNINGS, SHARED_WORDS, OWN_WORDS = 4, 50, 20
"""Beginnings of prompts, and their words; each prompt has words of its own behind one."""
MAX_TOKENS = 1500
BLOCKS, BATCHED_TOKENS, SEQUENCES = 1024, 512, 16
WITHIN = 0.25
"""How far a simulated time may be from the measured one, as a share of that."""
QUESTION = "What do two engines serve, against one with as many threads?"
_WORDS = ("fox", "hen", "owl", "mill", "boy", "girl", "king", "bird", "cat", "dog", "tree", "river", "the", "a", "old")
_BUSY_MS = 20.0
"""An engine that begins its next step within so many milliseconds has not waited for a request."""


def measure_replicas() -> Report:
    if not ray_is_installed():
        return without_ray(QUESTION, {"ray": False}, "nothing was measured")
    sizes = {"num-blocks": BLOCKS, "max-num-seqs": SEQUENCES, "max-num-batched-tokens": BATCHED_TOKENS}
    common = ["--model", MODEL, "--kv", "prefix", *[f"--{name}={size}" for name, size in sizes.items()]]
    two_options = ("--replicas", "2", "--threads", "1", "--ray-address", "local")
    with (
        ServerProcess((*common, "--threads", "2")) as one,
        ServerProcess((*common, *two_options)) as two,
        progress_line() as progress,
    ):
        progress("starting one engine, and two")
        one.wait_until_ready()
        two.wait_until_ready()
        wait_until(lambda: metric(two.url, "forge:replicas_reachable") == 2)
        prompts = prompts_of(two.url)
        turns: dict[str, list[list[Timed]]] = {"one": [], "two": []}
        lone: dict[str, list[Timed]] = {"one": [], "two": []}
        costs = StepTime(), Transport()
        for number in range(TURNS):
            part = prompts[number * REQUESTS : (number + 1) * REQUESTS]
            for name, server in (("one", one), ("two", two)):
                progress(f"{name} engine{'s' * (name == 'two')}, turn {number + 1} of {TURNS}")
                if name == "two" and number == 0:
                    with steps_of(server.url) as steps:
                        answers = asyncio.run(ask_all(server.url, part, CLIENTS))
                    costs = fit_costs(steps, answers)
                    turns[name].append(answers)
                else:
                    turns[name].append(asyncio.run(ask_all(server.url, part, CLIENTS)))
                lone[name] += asyncio.run(ask_all(server.url, part[:LONE], 1))
    facts = measured_object(prompts, turns, lone, *costs)
    return report(facts, lambda: screen(facts))


def prompts_of(url: str) -> list[list[int]]:
    """Return the prompts of all turns in tokens, of which a few begin alike."""
    draw, prompts = random.Random(5), []
    begun = ["Once upon a time " + " ".join(draw.choices(_WORDS, k=SHARED_WORDS)) for _ in range(BEGINNINGS)]
    for _ in range(TURNS * REQUESTS):
        text = f"{draw.choice(begun)} {' '.join(draw.choices(_WORDS, k=OWN_WORDS))}."
        prompts.append(json.loads(ask(url, "/tokenize", {"prompt": text}))["tokens"])
    return prompts


async def ask_all(url: str, prompts: Sequence[list[int]], clients: int) -> list[Timed]:
    """Let clients share the requests, each sending its next one when its last is answered; return them in order."""
    client, waiting, answers = HttpClient(url), iter(enumerate(prompts)), dict[int, Timed]()
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.8, "stream": True, "stream_options": {"include_usage": True}}

    async def ask() -> None:
        for number, prompt in waiting:
            body = {"prompt": prompt, "seed": number} | options
            answers[number] = await client.stream("/v1/completions", body)

    await asyncio.gather(*[ask() for _ in range(clients)])
    client.close()
    return [answers[number] for number in sorted(answers)]


@contextmanager
def steps_of(url: str) -> Iterator[list[dict[str, Any]]]:
    """Collect the steps of all engines meanwhile."""
    steps, is_open = list[dict[str, Any]](), threading.Event()

    def read() -> None:
        with suppress(ForgeError), asked(url, "/debug/steps") as (_, answer):  # until the server ends
            is_open.set()
            steps.extend(json.loads(line[6:]) for line in answer if line.startswith(b"data: {"))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    is_open.wait(ANSWER_SECONDS)
    try:
        yield steps
    finally:
        reading.join(0.5)  # the last steps are on their way


def fit_costs(steps: Sequence[dict[str, Any]], answers: Sequence[Timed]) -> tuple[StepTime, Transport]:
    """Return what a step costs, and what lies between a client and an engine: all processes of a machine have one
    monotonic clock."""
    rows, arrived, first_token = list[tuple[int, int, float]](), dict[str, float](), dict[str, float]()
    for name in {step["replica"] for step in steps}:
        of_replica = sorted((step for step in steps if step["replica"] == name), key=lambda step: step["started"])
        request_of: dict[int, str] = {}
        for step, following in zip(of_replica, [*of_replica[1:], None], strict=True):
            for request in step.get("arrived", ()):
                arrived[request["request_id"]] = request["arrived"]
                request_of[request["seq_ids"][0]] = request["request_id"]
            for token in step["tokens"]:
                if token["seq_id"] in request_of:
                    first_token.setdefault(request_of.pop(token["seq_id"]), step["ended"])
            seconds = step["ended"] - step["started"]
            if following is not None and (following["started"] - step["ended"]) * 1e3 < _BUSY_MS:
                seconds = following["started"] - step["started"]
            decoded = sum(item["phase"] == "decode" for item in step["items"])
            prefilled = sum(item["num_tokens"] for item in step["items"]) - decoded
            rows.append((prefilled, decoded, seconds * 1e3))
    to_engine = [arrived[one.request_id] - one.started for one in answers if one.request_id in arrived]
    to_front = [one.chunks[0] - first_token[one.request_id] for one in answers if one.request_id in first_token]
    return fit_step_time(rows), Transport(median(to_engine), median(to_front))


def simulate_turns(
    costs: dict[str, float], turns: Sequence[Sequence[dict[str, Any]]], clients: int
) -> list[SimulationResult]:
    """Replay measured turns on two engines as the measured ones are, with measured costs in milliseconds: of each
    request the tokens of its prompt, and the number of those of its answer."""
    options = SimulationOptions(
        replicas=2,
        num_blocks=BLOCKS,
        block_size=16,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_tokens=MAX_TOKENS,
        step_time=StepTime(costs["step_ms"], costs["prefill_token_ms"], costs["decode_token_ms"]),
        transport=Transport(costs["to_engine_ms"] / 1e3, costs["to_front_ms"] / 1e3),
    )
    return [
        replay(options, [KnownRequest(request["prompt"], request["answer_tokens"]) for request in turn], clients)
        for turn in turns
    ]


def deviations(measured: dict[str, float], results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Return the simulated times, and how far each is from the measured one, as a share of that."""
    simulated = {
        "ttft_ms": percentile([value for result in results for value in result.ttft], 0.5),
        "tpot_ms": percentile([value for result in results for value in result.tpot], 0.5),
        "requests_per_second": sum(result.num_requests for result in results)
        / sum(result.seconds for result in results),
    }
    return simulated | {"deviation": {name: value / measured[name] - 1 for name, value in simulated.items()}}


def measured_object(
    prompts: Sequence[list[int]],
    turns: dict[str, list[list[Timed]]],
    lone: dict[str, list[Timed]],
    step_time: StepTime,
    transport: Transport,
) -> dict[str, Any]:
    """Return the facts of a run. The measured figures of two engines are those of the turns that are simulated."""
    costs = {
        "step_ms": step_time.fixed,
        "prefill_token_ms": step_time.prefill_token,
        "decode_token_ms": step_time.decode_token,
        "to_engine_ms": transport.to_engine * 1e3,
        "to_front_ms": transport.to_front * 1e3,
    }
    one, two = (_speeds(turns[name][1:], lone[name]) for name in ("one", "two"))
    parts = [prompts[start : start + REQUESTS] for start in range(REQUESTS, TURNS * REQUESTS, REQUESTS)]
    replayed = [
        [{"prompt": prompt, "answer_tokens": answer.num_tokens} for prompt, answer in zip(part, turn, strict=True)]
        for part, turn in zip(parts, turns["two"][1:], strict=True)
    ]
    ratios = [_rate(two_turn) / _rate(one_turn) for one_turn, two_turn in zip(turns["one"], turns["two"], strict=True)]
    lengths = sorted(answer.num_tokens for turn in turns["two"] for answer in turn)
    same = all(
        a.text == b.text and a.error is b.error is None
        for one_turn, two_turn in zip(turns["one"], turns["two"], strict=True)
        for a, b in zip(one_turn, two_turn, strict=True)
    )
    return {
        "ray": True,
        "model": MODEL,
        "clients": CLIENTS,
        "requests": TURNS * REQUESTS,
        "allowed_tokens": MAX_TOKENS,
        "answer_tokens": {"least": lengths[0], "median": lengths[len(lengths) // 2], "most": lengths[-1]},
        "one": one,
        "two": two,
        "ratio": median(ratios[1:]),
        "lone_ratio": two["lone_tpot_ms"] / one["lone_tpot_ms"],
        "identical": same,
        "costs": costs,
        "simulated": deviations(two, simulate_turns(costs, replayed, CLIENTS)),
        "turns": replayed,
    }


def _rate(turn: Sequence[Timed]) -> float:
    """Return requests per second."""
    return len(turn) / (max(answer.ended or 0.0 for answer in turn) - min(answer.started for answer in turn))


def _speeds(turns: Sequence[Sequence[Timed]], lone: Sequence[Timed]) -> dict[str, float]:
    """Return what the clients of one server saw, over all of its turns."""
    answers = [answer for turn in turns for answer in turn]
    return {
        "requests_per_second": fmean(_rate(turn) for turn in turns),
        "ttft_ms": percentile([answer.ttft_ms for answer in answers if answer.ttft_ms is not None], 0.5),
        "tpot_ms": percentile([answer.tpot_ms for answer in answers if answer.tpot_ms is not None], 0.5),
        "lone_tpot_ms": median(answer.tpot_ms for answer in lone if answer.tpot_ms is not None),
    }


def screen(facts: dict[str, Any]) -> Iterator[Part]:
    about = (
        "{clients} clients; answers of {answer_tokens.least} to {answer_tokens.most} tokens, {allowed_tokens} allowed"
    )
    yield from question(QUESTION, fill(about, facts))
    rows = [facts["one"] | {"name": "one engine, 2 threads"}, facts["two"] | {"name": "two engines, 1 each"}]
    rows.append(facts["simulated"] | {"name": "two, simulated", "lone_tpot_ms": None})
    columns = ["server: {name}", "requests/s: {requests_per_second:.1f}", "TTFT p50: {ttft_ms:ms}"]
    yield Table.of(rows, *columns, "TPOT p50: {tpot_ms:.1f}")
    lines = (
        "a step's milliseconds                            {step_ms:>6.2f}",
        "of each prompt token, of each decoding sequence  {prefill_token_ms:>6.3f} {decode_token_ms:>6.2f}",
        "from a client to an engine, and back             {to_engine_ms:>6.2f} {to_front_ms:>6.2f}",
    )
    yield from (None, "Costs that the first turn tells, in milliseconds")
    yield from sentences(fill(line, facts["costs"]) for line in lines)
    far = {name: f"{share:+.0%}" for name, share in facts["simulated"]["deviation"].items()}
    off = fill("simulated against measured: TTFT {ttft_ms}, TPOT {tpot_ms}, requests/s {requests_per_second}", far)
    yield from (None, off, None, check(facts["identical"], "both servers give the same answers", "the answers differ"))
