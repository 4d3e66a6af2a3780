"""Our side of the conversation with a contender: a process that is started, asked, and surely gone in the end.

The caller that starts one closes it (it is a context manager); should this process die before that, the worker sees
its input close and ends itself. See `worker.py` for the conversation.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from forge.errors import ForgeError, UsageError

_FOLDER = Path(__file__).parent


class ContenderError(ForgeError):
    """A contender's process answered that something went wrong, or died."""


class ContenderMissing(ContenderError):
    """What would be measured is not installed, or cannot take the model: a reason to go on without it."""


@dataclass(frozen=True)
class Launch:
    """How a kind of contender is started."""

    name: str
    module: str
    """Its worker, a module of this package."""
    python: str = sys.executable

    def command(self) -> list[str]:
        """Another interpreter has no forge, perhaps, so there the worker is run as the file that it is."""
        if self.python == sys.executable:
            return [self.python, "-m", f"{__package__}.{self.module}"]
        return [self.python, str(_FOLDER / f"{self.module}.py")]

    def environment(self) -> dict[str, str]:
        """This process's, with this forge to be found by our own interpreter wherever it was started from."""
        if self.python != sys.executable:
            return dict(os.environ)
        paths = [str(_FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Contender:
    """A running worker process."""

    def __init__(self, launch: Launch):
        """Raises `UsageError` if the interpreter cannot be started."""
        self.name = launch.name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        try:
            self._process = subprocess.Popen(
                launch.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=launch.environment(),
                text=True,
                encoding="utf-8",
                start_new_session=True,  # a Ctrl-C in the terminal is for us alone
            )
        except OSError as error:
            self._errors.close()
            problem = error.strerror or error
            raise UsageError(f"{launch.python}: {problem}; --peer-python is a Python interpreter") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """The answer to one request. Raises `ContenderMissing` or `ContenderError`."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            stdin.write(json.dumps({"do": do, **fields}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ContenderError(f"{self.name} ended during {do!r}: {self._last_words()}")
        answer = json.loads(line)
        if "missing" in answer:
            raise ContenderMissing(answer["missing"])
        if "error" in answer:
            raise ContenderError(f"{self.name}, {do}: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> "Contender":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{last} (exit status {status})"
