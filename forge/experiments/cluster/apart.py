"""`forge cluster --part apart`: what sequences that decode notice of long prompts, with prefill beside them and apart.

The two engines take turns in this process, and a gap is the time of the decoding engine's own steps: what it would be
with a machine for each. `forge serve --prefill-replicas 1 --decode-replicas 1` runs them at once.
"""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forge.cluster.wire import listen, prefill_params
from forge.engine.engine import Engine
from forge.engine.handoff import KvHandoff, add_handed_over, hand_off
from forge.engine.sampling_params import SamplingParams
from forge.llm import LLM
from forge.server.messages import Answer, Inbox, frame
from forge.trace.totals import percentile
from forge.views.formatting import count
from forge.views.metrics import verdict
from forge.views.progress import progress_line
from forge.views.screen import Part, Report, Table, question, report

DECODING, DECODED = 4, 120
"""Sequences that decode, and the tokens of each."""
PROMPT, ARRIVALS, EVERY = 1900, 4, 24
"""Tokens of the prompts that arrive, how many, and the steps between two of them."""
LENGTHS = (64, 512, 1900)
"""Lengths of the prompts that are handed over and timed."""
CHUNK = 128
QUESTION = "What do decoding sequences notice of long prompts?"
WAYS = ("whole", "chunked", "apart")


@dataclass
class Way:
    """One way to compute the arriving prompts."""

    name: str
    gaps_ms: list[float] = field(default_factory=list)
    """Milliseconds between two tokens of a sequence that decodes."""
    first_ms: list[float] = field(default_factory=list)
    """Milliseconds from each prompt's arrival to its first token."""
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    """The tokens of all requests, in order."""


def measure_apart(model: str) -> Report:
    llm = LLM(model, kv="prefix", threads=1, max_num_seqs=DECODING + 4, max_num_batched_tokens=2048)
    with progress_line() as progress:
        progress("warming up")
        run_way(llm, "whole", DECODED // 4)
        ways = []
        for name in WAYS:
            progress(name)
            ways.append(run_way(llm, name, DECODED))
        handed = []
        for length in LENGTHS:
            progress(f"a hand-over of {length} tokens")
            handed.append(hand_over(llm, length))
    facts = apart_object(llm, ways, handed)
    return report(facts, lambda: screen(facts), 0 if facts["identical"] else 1)


def run_way(llm: LLM, name: str, decoded: int) -> Way:
    """Run sequences that decode, and long prompts that arrive meanwhile."""
    way, params = Way(name), SamplingParams(max_tokens=decoded, temperature=0.0, ignore_eos=True)
    chunks = {"chunked_prefill": True, "max_num_batched_tokens": CHUNK + DECODING}
    options = chunks if name == "chunked" else {"chunked_prefill": False}
    engine, prefills = llm.new_engine(**options), llm.new_engine()
    last: dict[int, float] = {}
    arrived: dict[int, float] = {}
    num_arrivals = min(ARRIVALS, decoded // EVERY)
    seq_ids = [engine.add_request(f"d{number}", _prompt(8, number), params)[0] for number in range(DECODING)]
    names = [f"d{number}" for number in range(DECODING)]
    clock, steps = 0.0, 0
    while engine.has_unfinished():
        if steps and steps % EVERY == 0 and steps <= EVERY * num_arrivals:
            prompt, request_id, waited, handoff = _prompt(PROMPT, 100 + steps), f"p{steps}", 0.0, None
            if name == "apart":
                handoff, *spent = _prefilled(prefills, prompt)
                waited = sum(spent)
            (seq_id,) = _add(engine, handoff, request_id, prompt, SamplingParams(max_tokens=2))
            arrived[seq_id] = clock - waited
            names.append(request_id)
        record = engine.step()
        clock, steps = clock + (record.ended - record.started) * 1e3, steps + 1
        for token in record.tokens:
            if token.seq_id in arrived:
                way.first_ms.append(clock - arrived.pop(token.seq_id))
            elif token.seq_id in seq_ids:
                if token.seq_id in last:
                    way.gaps_ms.append(clock - last[token.seq_id])
                last[token.seq_id] = clock
        for finish in record.finished:
            last.pop(finish.seq_id, None)
    way.tokens = [engine.output(request_id).outputs[0].token_ids for request_id in names]
    return way


def _prompt(length: int, number: int) -> list[int]:
    return [97 + (number * 7 + place * place) % 26 for place in range(length)]


def _prefilled(engine: Engine, prompt: list[int]) -> tuple[KvHandoff, float, float]:
    """Prefill on this engine. Returns the hand-over, and the milliseconds to compute its blocks and to read them."""
    (seq_id,) = engine.add_request("prefill", prompt[:-1], prefill_params(), retain_cache=True)
    began = time.perf_counter()
    while engine.has_unfinished():
        engine.step()
    computed = time.perf_counter()
    handoff = hand_off(engine, seq_id)
    exported = time.perf_counter()
    engine.release(seq_id)
    engine.forget("prefill")
    return handoff, (computed - began) * 1e3, (exported - computed) * 1e3


def _add(engine: Engine, handoff: KvHandoff | None, *arguments: Any) -> tuple[int, ...]:
    return engine.add_request(*arguments) if handoff is None else add_handed_over(engine, handoff, *arguments)


def hand_over(llm: LLM, length: int) -> dict[str, Any]:
    """Time a hand-over alone, and compare its logits with those of one engine, to the last bit. export: reading the
    blocks out of the one pool. import: the step that writes them into the other and computes the last token, less a
    step that only decodes. send: over this machine's loopback, as one engine sends them to another; the fastest of
    three. share: all of these over the time to compute the blocks."""
    prompt, params = _prompt(length, length), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    handoff, prefill_ms, export_ms = _prefilled(llm.new_engine(), prompt)
    logits: list[list[bytes]] = []
    first_ms = []
    for received in (handoff, None):
        engine, rows = llm.new_engine(), list[bytes]()

        def keep(seq_id: int, row: Any, rows: list[bytes] = rows) -> None:
            rows.append(row.tobytes())

        engine.on_logits.append(keep)
        _add(engine, received, "r", prompt, params)
        steps = []
        while engine.has_unfinished():
            record = engine.step()
            steps.append((record.ended - record.started) * 1e3)
        first_ms.append(steps[0] - percentile(steps[1:], 0.5))
        logits.append(rows)
    import_ms, send_ms = max(0.0, first_ms[0]), min(_send_ms(handoff) for _ in range(3))
    return {
        "prompt_tokens": length,
        "num_bytes": handoff.num_bytes,
        "prefill_ms": prefill_ms,
        "export_ms": export_ms,
        "import_ms": import_ms,
        "send_ms": send_ms,
        "identical": logits[0] == logits[1],
        "share": (export_ms + send_ms + import_ms) / prefill_ms,
        "bytes": handoff.num_bytes,
    }


def _send_ms(handoff: KvHandoff) -> float:
    """Time a hand-over through the loopback, until it is an object again at the other end. Returns milliseconds."""
    with listen("127.0.0.1") as listening, socket.create_connection(listening.getsockname()) as receiving:
        sending, _ = listening.accept()
        with sending:
            began = time.perf_counter()
            thread = threading.Thread(target=lambda: sending.sendall(frame(Answer(0, handoff, None))))
            thread.start()
            inbox = Inbox()
            while not inbox.feed(receiving.recv(1 << 20)):
                pass
            elapsed = time.perf_counter() - began
            thread.join()
    return elapsed * 1e3


def apart_object(llm: LLM, ways: list[Way], handed: list[dict[str, Any]]) -> dict[str, Any]:
    by_name = {
        way.name: {
            "gap_p50_ms": percentile(way.gaps_ms, 0.5),
            "gap_p99_ms": percentile(way.gaps_ms, 0.99),
            "first_token_ms": percentile(way.first_ms, 0.5),
            "prompts": len(way.first_ms),
        }
        for way in ways
    }
    whole, apart = by_name["whole"], by_name["apart"]
    return {
        "model": llm.model_name,
        "decoding": DECODING,
        "prompt_tokens": PROMPT,
        "chunk": CHUNK,
        "ways": by_name,
        "p99_of_whole": apart["gap_p99_ms"] / whole["gap_p99_ms"],
        "handovers": handed,
        "identical": all(transfer["identical"] for transfer in handed)
        and all(way.tokens == ways[0].tokens for way in ways),
    }


def screen(facts: dict[str, Any]) -> Iterator[Part]:
    arrive = f"prompts of {count(facts['prompt_tokens'])} tokens arrive"
    yield from question(QUESTION, f"{facts['decoding']} sequences decode; {arrive}")
    yield "Both engines take turns in this process. Each has a clock of its own, as if it had a machine of its own."
    names = {"whole": "whole, beside", "chunked": f"in chunks of {facts['chunk']}", "apart": "by another engine"}
    whole = facts["ways"]["whole"]["gap_p99_ms"]
    ways = [way | {"name": names[name], "ratio": way["gap_p99_ms"] / whole} for name, way in facts["ways"].items()]
    columns = ["prompts: {name}", "gap p50: {gap_p50_ms:ms}", "gap p99: {gap_p99_ms:ms}", "of whole: {ratio:.2f}"]
    yield Table.of(ways, *columns, "first token: {first_token_ms:ms}")
    yield from (None, "A hand-over of its blocks, in milliseconds")
    columns = ["prompt: {prompt_tokens:count} tokens", "bytes: {bytes:size}", "prefill: {prefill_ms:ms}"]
    columns += ["read: {export_ms:ms}", "sent: {send_ms:ms}", "written: {import_ms:ms}", "of prefill: {share:share}"]
    yield from (Table.of(facts["handovers"], *columns), None)
    yield verdict(facts["identical"], "tokens and logits are one engine's, to the last bit", "the tokens differ")
