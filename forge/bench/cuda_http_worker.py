"""forge's server on the GPU as a contender: `forge serve` in a process of its own, asked by the client of `forge bench
serve` from this one. What it adds to the engine is HTTP, JSON, and a process between.

Loading is from the command's start until the server answers, libraries and all.
"""

import asyncio
import ctypes
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.bench.cuda_load import unique_prompts
from forge.bench.forge_worker import BLOCK_SIZE
from forge.bench.http_client import HttpClient
from forge.bench.serve import Prompt, ServeBenchmark, ServePlan, run
from forge.bench.worker import Missing, one_line, peak_memory, serve

WARM_ROUNDS = 3
PATIENCE = 300
"""Seconds that the server may take to start: compiled kernels are kept, but the first start on a machine has none."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG."""


@dataclass(frozen=True)
class UniquePrompts(ServePlan):
    """The same, with prompts of which no two begin alike."""

    vocab_size: int = 1 << 15

    def prompts(self) -> list[Prompt]:
        return [*unique_prompts(self.num_prompts, self.input_tokens, self.vocab_size, self.seed)]


class CudaHttpContender:
    """A running server."""

    def __init__(self, device: str = "cuda"):
        self._device = device
        self._server: subprocess.Popen | None = None
        self._url, self._vocab_size = "", 0

    def load(self, model: str, max_context: int, max_sequences: int, kv: str) -> Mapping[str, Any]:
        from importlib.util import find_spec

        from forge import __version__
        from forge.model.weight_source import open_weights

        missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
        if missing:
            raise Missing(f"serving needs {' and '.join(missing)}")
        with open_weights(Path(model)) as weights:
            self._vocab_size = weights.config.vocab_size
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        blocks = max_sequences * -(-max_context // BLOCK_SIZE)
        options = {
            "model": model,
            "device": self._device,
            "kv": kv,
            "max-model-len": max_context,
            "max-num-seqs": max_sequences,
            "block-size": BLOCK_SIZE,
            "num-blocks": blocks,
            "port": port,
            "served-model-name": "bench",
            "log-interval": 0,
        }
        seconds = self._start([f"--{name}={value}" for name, value in options.items()])
        return {"description": f"forge {__version__}, forge serve, KV {kv}", "seconds": seconds}

    def requests(
        self, prompt_tokens: int, output_tokens: int, concurrency: int, requests: int, seed: int
    ) -> Mapping[str, Any]:
        """A closed loop of streamed requests over HTTP, after a warm-up of its own."""

        def measure(count: int, seed: int) -> ServeBenchmark:
            plan = UniquePrompts(
                self._url,
                "bench",
                input_tokens=prompt_tokens,
                output_tokens=output_tokens,
                num_prompts=count,
                concurrency=concurrency,
                seed=seed,
                vocab_size=self._vocab_size,
            )
            return run(plan)

        measure(WARM_ROUNDS * concurrency, seed + 1)
        found = measure(requests, seed)
        failed = [one.error for one in found.requests if one.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {requests} requests failed: {one_line(failed[0])}")
        ended = [(one, one.ended) for one in found.requests if one.ended is not None]
        return {
            "setting": f"HTTP, streamed, greedy; the client took {found.client_cpu_share:.0%} of a CPU",
            "seconds": found.duration,
            # Half a character is no text: then the first token is seen with the end.
            "first_token": [(one.chunks or [end])[0] - one.started for one, end in ended],
            "end": [end - one.started for one, end in ended],
        }

    def close(self) -> None:
        """End the server, and wait until it has ended."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._server = None

    def _start(self, options: list[str]) -> float:
        """Start the server; the seconds until it answers. Raises `RuntimeError` with its last line if it does not."""
        began = time.perf_counter()
        said = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the server)
        command = [sys.executable, "-m", "forge", "serve", *options]
        self._server = subprocess.Popen(command, stdout=said, stderr=said, preexec_fn=_end_with_parent)
        while time.perf_counter() - began < PATIENCE:
            if self._server.poll() is not None:
                break
            if asyncio.run(_answers(self._url)):
                return time.perf_counter() - began
            time.sleep(0.01)
        self.close()
        said.seek(0)
        raise RuntimeError(f"the server did not start: {one_line(said.read().decode(errors='replace')[-300:])}")


async def _answers(url: str) -> bool:
    client = HttpClient(url)
    try:
        status, _ = await client.get("/v1/models")
        return status == 200
    except (OSError, EOFError):
        return False
    finally:
        client.close()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def _end_with_parent() -> None:
    """In the server, before it begins: this process may be killed, and no other process knows of the server."""
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
    except AttributeError:  # not on this system
        pass


if __name__ == "__main__":
    contender = CudaHttpContender()
    serve({"load": contender.load, "requests": contender.requests, "memory": peak_memory})
