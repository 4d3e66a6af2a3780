"""A server in processes of its own, started once for all tests that can share it, and clients for it."""

import asyncio
import json
import re
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from forge import LLM
from tests.cli.conftest import forge, start  # noqa: F401 (a fixture)
from tests.model.test_heads import reranker_gguf
from tests.small_models import small_tokenizer, write_small_qwen3
from tests.waiting import PATIENCE

USER_DEFINED = 4


class Server:
    """`forge serve` on a port of its own."""

    def __init__(self, *args: str, script: Path | None = None, **options: Any):
        """`script` runs in place of `forge`. `options` are those of `Popen`."""
        options = {"stdout": subprocess.DEVNULL, "text": True} | options
        self.process = start("serve", "--port", "0", "--log-interval", "0", *args, script=script, **options)
        self.log: list[str] = []
        self._has_begun = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        assert self._has_begun.wait(PATIENCE) and self.url, "".join(self.log)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"served at (https?://\S+)", line):
                self.url = found[1]
                self._has_begun.set()
        self._has_begun.set()

    def request(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON (or text) of one request; `body` may be bytes to be sent as they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"} | (headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def metric(self, name: str, headers: dict[str, str] | None = None) -> float:
        """The sum of a metric over its labels."""
        _, text = self.request("/metrics", headers=headers)
        found = [line.rsplit(" ", 1)[1] for line in text.splitlines() if re.match(rf"{name}(\{{|_total\{{| )", line)]
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def is_idle(self) -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped")
        return not any(map(self.metric, (*names, "vllm:kv_cache_usage_perc")))

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0} | options)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def engine_pid(self) -> int:
        """The process id of the engine: the child that runs Python's spawn, and not its resource tracker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        command = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        return next(child for child, line in command.items() if b"spawn_main" in line)


async def post(port: int, path: str, body: Any) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own. Costs a fraction of what a client library takes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(path, body))
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    data = await reader.readexactly(int(length[1])) if length else await reader.read()
    writer.close()
    return int(head.split()[1]), data


def request_bytes(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    )
    return head.encode() + b"connection: close\r\n\r\n" + data


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> str:
    """A small model whose tokens are bytes, with random weights: what it says is often no whole character."""
    path = write_small_qwen3(tmp_path_factory.mktemp("served") / "small.gguf")
    return str(path)


@pytest.fixture(scope="session")
def alone(model_path) -> LLM:
    """The same model without a server, a cache or company."""
    return LLM(model_path, kv="basic", max_num_seqs=1)


@pytest.fixture(scope="session")
def server(model_path, alone) -> Iterator[Server]:
    """One server on a pool of 40 blocks, whose kernels are compiled by then."""
    one = Server("-m", model_path, "--num-blocks", "40", "--max-num-seqs", "16", "--served-model-name", "small")
    yield one
    one.stop()


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""In the vocabulary of the model with room for tools, from `FIRST_TAG` on."""
FIRST_TAG = 269


@pytest.fixture(scope="session")
def roomy_server(tmp_path_factory) -> Iterator[Server]:
    """A small model that has Qwen3's tags and a context in which tools are listed, in tokens that are bytes."""
    tokenizer = small_tokenizer(288)
    tokens, types = list(tokenizer["tokenizer.ggml.tokens"]), list(tokenizer["tokenizer.ggml.token_type"].value)
    for index, tag in enumerate(TAGS, FIRST_TAG):
        tokens[index], types[index] = tag, USER_DEFINED
    changed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": replace(tokenizer["tokenizer.ggml.token_type"], value=types),
    }
    folder = tmp_path_factory.mktemp("roomy")
    path = write_small_qwen3(folder / "roomy.gguf", metadata=changed, max_position_embeddings=4096)
    one = Server("-m", str(path), "--kv", "prefix", "--num-blocks", "1024", "--served-model-name", "small")
    yield one
    one.stop()


@pytest.fixture(scope="session")
def reranker(tmp_path_factory) -> Iterator[tuple[Path, Server]]:
    """A model with a classification head, and its server."""
    path, _ = reranker_gguf(tmp_path_factory.mktemp("reranker") / "rerank.gguf")
    one = Server("-m", str(path))
    yield path, one
    one.stop()


@pytest.fixture
def roomy_client(roomy_server) -> openai.OpenAI:
    return roomy_server.openai()


@pytest.fixture
def client(server) -> openai.OpenAI:
    return server.openai()
