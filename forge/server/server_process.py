"""`forge serve` in a process of its own, on a port that is free: started, asked, told to end, and never left behind."""

import ctypes
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from forge.errors import ForgeError

PATIENCE = 600.0
"""Seconds until a server must be ready: the first time on a machine its kernels are compiled."""
GRACE = 60.0
"""Seconds that it has to end before it is killed."""
ANSWER_SECONDS = 120.0
"""Seconds without a byte after which no more of an answer is expected."""
_READY = re.compile(r"served at (http://\S+)")

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG."""


class ServerProcess:
    """A `forge serve` in a process of its own, as a context manager; once it is ready, it answers at `url`."""

    def __init__(self, options: Sequence[str]):
        """`options` of `forge serve`, in its own spelling."""
        self._command = [sys.executable, "-m", "forge", "serve", "--port", "0", "--log-interval", "0", *options]
        self._lines: deque[str] = deque(maxlen=20)
        self._heard = threading.Event()
        self.url = ""
        self.ready_seconds = 0.0

    def __enter__(self) -> "ServerProcess":
        self._began = time.perf_counter()
        # In this process's group: what ends all of that (Ctrl-C, a terminal that closes) ends the server too.
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,  # which may be killed
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reading.join(1)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def wait_until_ready(self) -> None:
        """Wait until the server answers. Raises `ForgeError` with its last line if it never does."""
        self._heard.wait(PATIENCE)
        if not self.url:
            last = self._lines[-1].strip().removeprefix("forge: ") if self._lines else "it said nothing"
            raise ForgeError(f"the server did not start: {last}")
        self.ready_seconds = time.perf_counter() - self._began

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM: the server finishes what has begun, and ends."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the server's end; return its exit status. Raises `ForgeError` if it does not come."""
        try:
            return self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            raise ForgeError(f"the server did not end within {GRACE:.0f} s of SIGTERM") from None

    def _read(self) -> None:
        assert self._process.stderr is not None, "it is a pipe"
        for line in self._process.stderr:
            self._lines.append(line)
            if match := _READY.search(line):
                self.url = match[1]
                self._heard.set()
        self._heard.set()


@contextmanager
def asked(url: str, path: str, body: dict[str, Any] | None = None) -> Iterator[tuple[float, http.client.HTTPResponse]]:
    """Send one request to a server on this machine, with JSON or, without a body, a GET; yield when it was sent, and
    the answer to read. No proxy is asked: its 127.0.0.1 is another machine. Raises `ForgeError` for any but a good
    answer."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=ANSWER_SECONDS)
    try:
        connection.connect()
        sent = time.perf_counter()
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ForgeError(f"the server answers {answer.status}: {answer.read(200).decode(errors='replace')}")
        yield sent, answer
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ForgeError(f"{url}{path}: {error}") from None
    finally:
        connection.close()


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """Return the whole answer to a request that `asked` sends."""
    with asked(url, path, body) as (_, answer):
        return answer.read()


def metric_sum(text: str, metric: str) -> float:
    """Sum a metric of Prometheus' text over its labels: `name`, or `name{label="value"}` over the others."""
    name, _, label = metric.partition("{")
    lines = (line for line in text.splitlines() if line.startswith(f"{name}{{") and label.rstrip("}") in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def end_with_parent() -> None:
    """Make a new process end with its parent, which may be killed: no other process knows of it."""
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
    except AttributeError:  # not on this system
        pass
