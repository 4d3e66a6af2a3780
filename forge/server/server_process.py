"""`forge serve` in a process of its own, on a port that is free: started, told to end, and never left behind."""

import ctypes
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from forge.errors import ForgeError

PATIENCE = 600.0
"""Seconds until a server must be ready: the first time on a machine its kernels are compiled."""
GRACE = 60.0
"""Seconds that it has to end before it is killed."""
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


def end_with_parent() -> None:
    """Make a new process end with its parent, which may be killed: no other process knows of it."""
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
    except AttributeError:  # not on this system
        pass
