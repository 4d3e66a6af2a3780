"""`forge cluster --part failure`: an engine of a running server is killed while it answers."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge.errors import ForgeError
from forge.server.server_process import ServerProcess
from forge.views.progress import progress_line
from forge.views.report import Report
from forge.views.screen import Part, check, fill, question, report, sentences, title

STREAMS = WHOLE = 6
MAX_TOKENS = 1500
QUESTION = "What do clients notice when an engine dies?"
MISSING = "Ray Serve is not installed, so no engine was killed: pip install 'ray[serve]'"


@dataclass(frozen=True)
class Failure:
    """What became of the requests that ran when an engine was killed."""

    ray: bool
    """Whether Ray Serve is installed: otherwise nothing was measured, and all else is 0."""
    streams: int = 0
    told: int = 0
    """Streams that ended with an error that says which replica died."""
    whole: int = 0
    """Requests of which nothing had been sent."""
    answered: int = 0
    """Of those, the ones that got their answer, from whichever engine."""
    lost: int = 0
    """Requests that ended in no way, or in two."""
    back_seconds: float = 0.0
    """Until as many engines as before answered again."""


def measure_failure(replicas: int) -> Report:
    if find_spec("ray") is None:
        found = Failure(ray=False)
    else:
        options = ("--model", "hash", "--ray-address", "local", "--threads", "1", "--replicas", str(replicas))
        with ServerProcess(options) as server, progress_line() as progress:
            progress(f"starting {replicas} engines")
            server.wait_until_ready()
            progress("killing one")
            found = _kill_one(server, replicas)
    return report(asdict(found), lambda: screen(found), 1 if found.lost else 0)


def _kill_one(server: ServerProcess, replicas: int) -> Failure:
    with ThreadPoolExecutor(STREAMS + WHOLE) as pool:
        streams = [pool.submit(_stream, server.url, number) for number in range(STREAMS)]
        whole = [pool.submit(_whole, server.url, number) for number in range(WHOLE)]
        _wait(lambda: _running(server.url) >= STREAMS + WHOLE - 2)
        os.kill(_engines(server.pid)[0], signal.SIGKILL)
        began = time.perf_counter()
        ends = [one.result() for one in streams]
        answers = [one.result() for one in whole]
    _wait(lambda: len(_engines(server.pid)) == replicas)
    told, lost = sum(end == "told" for end in ends), sum(end == "lost" for end in [*ends, *answers])
    return Failure(
        True, STREAMS, told, WHOLE, sum(one == "answered" for one in answers), lost, time.perf_counter() - began
    )


def _post(url: str, number: int, stream: bool) -> Any:
    body = {"prompt": f"{number} story", "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": stream}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def _stream(url: str, number: int) -> str:
    with _post(url, number, True) as answer:
        events = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
    errors = [event for event in events if event.startswith(b'{"error"')]
    if events[-1:] != [b"[DONE]"] or len(errors) > 1:
        return "lost"
    return "told" if errors else "answered"


def _whole(url: str, number: int) -> str:
    try:
        with _post(url, STREAMS + number, False) as answer:
            return "answered" if json.load(answer)["choices"] else "lost"
    except OSError:
        return "lost"


def _running(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def _engines(pid: int) -> list[int]:
    """The processes below this one that run an engine: Ray names them."""
    return [one for one in _below(pid) if _command(one).startswith(b"ray::ServeReplica")]


def _below(pid: int) -> Iterator[int]:
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


def _wait(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ForgeError("the engines did not come to where they should be: is this machine busy?")
        time.sleep(0.02)


def screen(found: Failure) -> Iterator[Part]:
    if not found.ray:
        yield from (title(QUESTION), None, MISSING)
        return
    ran = "{streams:plural stream} and {whole:plural request} without one ran when it was killed"
    yield from question(QUESTION, fill(ran, found))
    said = (
        "streams that were told why they ended  {told:>3} of {streams}",
        "others that got their answer           {answered:>3} of {whole}",
        "seconds until the engine was back      {back_seconds:5.1f}",
    )
    yield from sentences(fill(line, found) for line in said)
    yield from (
        None,
        check(not found.lost, "every request ended once", fill("{lost:plural request} ended in no way", found)),
    )
