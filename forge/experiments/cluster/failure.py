"""`forge cluster --part failure`: kills an engine of a running server while it answers."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.text import Text

from forge.errors import ForgeError
from forge.server.server_process import ServerProcess, ask, asked, metric_sum
from forge.views.palette import QUIET
from forge.views.progress import progress_line
from forge.views.screen import Part, Report, check, fill, question, report, sentences, title

STREAMS = WHOLE = 6
MAX_TOKENS = 400
MODEL = "tales"
_PATH = "/v1/completions"
SHOWN = 60
"""Characters of a stream that are shown before the kill, and after it."""
QUESTION = "What do clients notice when an engine dies?"


@dataclass(frozen=True)
class Failure:
    """The outcome of the requests that ran when an engine was killed."""

    ray: bool
    """Whether Ray Serve is installed: otherwise nothing was measured, and all else is 0."""
    streams: int = 0
    whole: int = 0
    """Requests without a stream."""
    resumed: int = 0
    """Requests of both kinds that the engine had, and that went on at another."""
    identical: int = 0
    """Requests whose text is, to the last character, the one of a run in which no engine died."""
    lost: int = 0
    """The others."""
    gap_ms: float = 0.0
    """The median over the streams of the longest time between two events, without a kill."""
    pause_ms: float = 0.0
    """The longest such time of any stream in the run with the kill."""
    back_seconds: float = 0.0
    """Seconds until as many engines as before answered again."""
    before: str = ""
    """The end of what the stream that paused longest had said until then."""
    after: str = ""
    """The beginning of what it said from then on."""


def ray_is_installed() -> bool:
    return find_spec("ray") is not None


def without_ray(question: str, facts: Mapping[str, Any], missing: str) -> Report:
    """Report that nothing could be measured. missing: what was not done."""
    told = f"Ray Serve is not installed, so {missing}: pip install 'ray[serve]'"
    return report(facts, lambda: (title(question), None, told))


def measure_failure(replicas: int) -> Report:
    if not ray_is_installed():
        return without_ray(QUESTION, asdict(Failure(ray=False)), "no engine was killed")
    options = ("--model", MODEL, "--ray-address", "local", "--threads", "1", "--replicas", str(replicas))
    with ServerProcess(options) as server, progress_line() as progress:
        progress(f"starting {replicas} engines")
        server.wait_until_ready()
        wait_until(lambda: metric(server.url, "forge:replicas_reachable") == replicas)
        progress("answers while no engine dies")
        before, gaps, _ = _ask_all(server, progress, kill=False)
        progress("the same while one is killed")
        after, pauses, (said, said_next) = _ask_all(server, progress, kill=True)
        began = time.perf_counter()
        wait_until(lambda: metric(server.url, "forge:replicas_reachable") == replicas)
        identical = num_identical(before, after)
        resumed, lost = int(metric(server.url, "forge:requests_resumed_total")), STREAMS + WHOLE - identical
        gap_ms, pause_ms, seconds = sorted(gaps)[len(gaps) // 2], max(pauses), time.perf_counter() - began
        counts = STREAMS, WHOLE, resumed, identical, lost
        failure = Failure(True, *counts, gap_ms, pause_ms, seconds, said, said_next)
    return report(asdict(failure), lambda: screen(failure), 1 if failure.lost else 0)


def num_identical(before: list[str], after: list[str]) -> int:
    """Count the requests with the same text both times; one that failed, which has none, is not among them."""
    return sum(text != "" and text == later for text, later in zip(before, after, strict=True))


def _ask_all(
    server: ServerProcess, watch: Callable[[str], None], kill: bool
) -> tuple[list[str], list[float], tuple[str, str]]:
    """Return the texts of all requests, each stream's longest time between two events in milliseconds, and what the
    stream that paused longest said before and after. watch: is called with the end of the first stream's text."""
    with ThreadPoolExecutor(STREAMS + WHOLE) as pool:
        engines = (pid for pid in _below(server.pid) if b"forge.cluster.replica_engine" in _command(pid))
        victim, has_begun = next(engines), threading.Semaphore(0)
        whole = [pool.submit(_whole, server.url, number) for number in range(WHOLE)]
        streams = [
            pool.submit(_stream, server.url, number, has_begun.release, watch if number == 0 else lambda text: None)
            for number in range(STREAMS)
        ]
        if kill:
            for _ in range(STREAMS):
                has_begun.acquire()
            os.kill(victim, signal.SIGKILL)
        streamed = [request.result() for request in streams]
        text, _, paused_at = max(streamed, key=lambda stream: stream[1])
        around = text[:paused_at][-SHOWN:], text[paused_at:][:SHOWN]
        texts = [text for text, _, _ in streamed] + [request.result() for request in whole]
        return texts, [gap for _, gap, _ in streamed], around


def _body(number: int, stream: bool) -> dict[str, Any]:
    prompt = f"Once upon a time there were {number} hens"
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}


def _stream(
    url: str, number: int, on_begin: Callable[[], None], watch: Callable[[str], None]
) -> tuple[str, float, int]:
    """Read a stream. Returns its text, empty if it did not end well, the longest time between two events in
    milliseconds, and the characters that came before that. on_begin: is called at its first event. watch: is called
    with the end of the text at every event."""
    text, last, longest, paused_at, is_well = "", 0.0, 0.0, 0, False
    with suppress(ForgeError), asked(url, _PATH, _body(number, True)) as (_, answer):
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if last == 0.0:
                on_begin()
            elif now - last > longest:
                longest, paused_at = now - last, len(text)
            last, is_well = now, line.startswith(b"data: [DONE]")
            if not is_well:
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                watch(text[-SHOWN:].replace("\n", " "))
    if last == 0.0:
        on_begin()  # it has failed, and nothing waits for it
    return (text if is_well else ""), longest * 1e3, paused_at


def _whole(url: str, number: int) -> str:
    try:
        return json.loads(ask(url, _PATH, _body(STREAMS + number, False)))["choices"][0]["text"]
    except ForgeError:
        return ""


def metric(url: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    return metric_sum(ask(url, "/metrics").decode(), name)


def _below(pid: int) -> Iterator[int]:
    """Yield the processes below this one."""
    try:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in (int(child) for text in texts for child in text.split()):
        yield child
        yield from _below(child)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ForgeError("the engines did not come to where they should be: is this machine busy?")
        time.sleep(0.02)


def screen(failure: Failure) -> Iterator[Part]:
    ran = "{streams:plural stream} and {whole:plural request} without one ran when it was killed"
    yield from question(QUESTION, fill(ran, failure))
    lines = (
        "requests that went on at another engine          {resumed:>6}",
        "longest time between two events, milliseconds    {pause_ms:>6.0f}",
        "the same while no engine dies, median            {gap_ms:>6.0f}",
        "seconds until the engine was back                {back_seconds:>6.1f}",
    )
    yield from sentences(fill(line, failure) for line in lines)
    if failure.before:
        around = f"… {failure.before} ‖ {failure.after} …".replace("\n", " ")
        yield from (None, "The stream that stood still longest, before and after", Text(around, QUIET))
    same = "every request has the text of a run in which no engine died"
    yield from (None, check(not failure.lost, same, fill("{lost:plural request} ended otherwise", failure)))
