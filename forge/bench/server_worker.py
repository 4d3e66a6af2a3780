"""forge's server as a process that is measured: `forge serve`, asked by the client of `forge bench serve` from this
process. What it adds to the engine is HTTP, JSON, and a process between.

Loading is from the command's start until the server answers, libraries and all.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge import __version__
from forge.bench.cases import Load, answered
from forge.bench.serve import ServePlan, run
from forge.bench.worker import Missing, Worker, one_line
from forge.model.loader import open_weights
from forge.server.server_process import ServerProcess


class ServerWorker(Worker):
    """A running server."""

    server: ServerProcess | None = None

    def load(self, model: str, **options: Any) -> Mapping[str, Any]:
        """Start the server. options: those of `forge serve`, as `LLM` spells them."""
        missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
        if missing:
            raise Missing(f"serving needs {' and '.join(missing)}")
        with open_weights(Path(model)) as weights:
            self._vocab_size = weights.config.vocab_size
        loading = {"model": model, **options}
        self.server = ServerProcess([f"--{name.replace('_', '-')}={value}" for name, value in loading.items()])
        self.server.__enter__()
        self.server.wait_until_ready()
        description = f"forge {__version__}, forge serve, KV {options['kv']}"
        return {"description": description, "seconds": self.server.ready_seconds}

    def requests(self, load: Any) -> Mapping[str, Any]:
        """Run a closed loop of streamed requests over HTTP, after one that is not timed. load: a `Load`'s fields."""
        assert self.server is not None, "it was loaded"
        load = Load(**load)
        tokens = {"input_tokens": load.prompt_tokens, "output_tokens": load.output_tokens}
        plan = ServePlan(self.server.url, dataset="unique", token_range=(0, self._vocab_size), **tokens)
        for count, seed in load.rounds:
            result = run(replace(plan, concurrency=load.concurrency, num_prompts=count, seed=seed))
        failed = [answer.error for answer in result.requests if answer.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {load.requests} requests failed: {one_line(failed[0])}")
        # Half a character is no text: then the first token is seen with the end.
        moments = [
            ((answer.ttft_ms or answer.e2el_ms or 0.0) / 1e3, (answer.e2el_ms or 0.0) / 1e3)
            for answer in result.requests
        ]
        setting = f"HTTP, streamed, greedy; the client took {result.client_cpu_share:.0%} of a CPU"
        return answered(setting, moments, result.duration)

    def close(self) -> None:
        """End the server, and wait until it has ended."""
        if self.server is not None:
            self.server.__exit__()
