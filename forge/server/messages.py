"""What the HTTP process and the engine process tell each other, and how it goes over a socket.

Commands go one way, updates the other. An update covers at least one step, and as many as have happened since the last
one was due or could be sent: where there are many streams, or the reader is slow, updates grow and no process waits. A
message is a pickle behind its length; the two processes are the same program, and no other process can write to their
socket.
"""

import pickle
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple

from forge.engine.outputs import RequestOutput
from forge.engine.sampling_params import SamplingParams
from forge.engine.task import Logprobs
from forge.errors import ForgeError
from forge.reasons import Pooling
from forge.tokenizer import Tokenizer, TokenizerSpec
from forge.trace.records import StepRecord

_LENGTH = Struct("<I")

EVENTS_PER_SECOND = 500
"""Events of all streams together, if there are several. An event costs the server and its client some 50 µs each, most
of it in the system, and an engine on the CPU wants every core for itself."""
EVENTS_BESIDE_A_GPU = 10_000


def pause_between_events(num_streams: int, device: str) -> float:
    """Return the seconds between two events of one stream of an engine on `device`. Alone it has one for every token;
    of 64 beside an engine on the CPU each has one eight times a second."""
    if num_streams <= 1:
        return 0.0
    return num_streams / (EVENTS_BESIDE_A_GPU if device == "cuda" else EVENTS_PER_SECOND)


def prompt_id(request_id: str, index: int) -> str:
    """Return the engine's name for one of the prompts of a request that has several."""
    return f"{request_id}-{index}"


class Submit(NamedTuple):
    """Queue a request. `key` names it from here on."""

    key: int
    request_id: str
    token_ids: list[int]
    params: SamplingParams
    prompt: str | None
    priority: int
    salt: str
    stream: bool
    """Whether its tokens are wanted one by one, or only its output when it has ended."""


class Abort(NamedTuple):
    """To the engine's process: end a request whose client has left."""

    key: int


class Ask(NamedTuple):
    """A question that is answered between two steps."""

    number: int
    subject: str
    arguments: tuple[Any, ...] = ()


class AskTasks(NamedTuple):
    """Prefill-only requests, each a prompt's tokens and a `Task`: answered together, when all are there."""

    number: int
    requests: list[tuple[list[int], Any]]


class Withdraw(NamedTuple):
    """The client that asked for prefill-only requests has left: drop them."""

    number: int


class Watch(NamedTuple):
    """Turn whole `StepRecord`s on or off."""

    is_on: bool


Command = Submit | Abort | Ask | AskTasks | Withdraw | Watch
"""What the HTTP process sends."""


class Ready(NamedTuple):
    """The engine process is ready: what the HTTP process has to know of the model."""

    model_name: str
    kv: str
    device: str
    device_description: str
    max_model_len: int
    vocab_size: int
    load_seconds: float
    pooling: Pooling
    """How embeddings are made of the model's hidden states."""
    default_sampling: Mapping[str, float]
    """The sampling parameters that the model's file recommends; empty where it says nothing."""
    labels: tuple[str, ...]
    """The labels of its classification head, if it has one."""
    num_blocks: int
    block_size: int
    tokenizer_type: type[Tokenizer]
    tokenizer_spec: TokenizerSpec

    def tokenizer(self) -> Tokenizer:
        if self.tokenizer_type is Tokenizer:
            return Tokenizer(self.tokenizer_spec, prefer="fast")
        return self.tokenizer_type()  # type: ignore[call-arg]  # a tokenizer that brings its spec, as the byte tokenizer


class LoadFailed(NamedTuple):
    """From the engine's process: the model could not be loaded."""

    message: str
    exit_code: int = ForgeError.exit_code

    def error(self) -> ForgeError:
        error = ForgeError(self.message)
        error.exit_code = self.exit_code
        return error


TokenDelta = tuple[int, int, int, str, Logprobs | None]
"""One token of a streamed request: its key, sample, token id, text, and logprobs where they were asked for. There are
thousands a second, so it is a plain tuple: those are pickled without a call."""


class SampleEnd(NamedTuple):
    """A sample of a streamed request has ended; `text` is what was held back."""

    key: int
    sample: int
    reason: str
    text: str
    stop: str | int | None


class RequestEnd(NamedTuple):
    """A request has ended and the engine has forgotten it."""

    key: int
    output: RequestOutput
    fault: "Fault | None"


class Fault(NamedTuple):
    """The reason why something was not done."""

    message: str
    internal: bool = False
    """Whether it is the engine's own fault, and not that of who asked."""


class Refusal(NamedTuple):
    """From the engine's process: the engine refused a request."""

    key: int
    fault: Fault


class Answer(NamedTuple):
    """From the engine's process: the answer to a question."""

    number: int
    value: Any
    fault: Fault | None


class StepSummary(NamedTuple):
    """The figures of a step for the metrics."""

    milliseconds: float
    ended: float
    """Seconds on the monotonic clock."""
    num_prefilled: int
    """Tokens computed that were not the last of their sequence."""
    num_decoding: int
    """Sequences that got their next token."""
    num_generated: int
    num_preempted: int
    cycles: tuple[tuple[str, int, int, bool], ...] = ()
    """For each cycle of speculation: the proposer, its draft tokens, those accepted, and whether they were emitted."""


class Gauges(NamedTuple):
    """The engine's present state."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    used_blocks: int = 0
    num_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass
class Update:
    """What has happened since the last update."""

    accepted: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    tokens: list[TokenDelta] = field(default_factory=list)
    sample_ends: list[SampleEnd] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    steps: list[StepSummary] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    gauges: Gauges | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether it has what a client waits for, besides the next tokens of a stream that has begun."""
        return bool(self.accepted or self.refused or self.sample_ends or self.ends or self.answers or self.records)

    @property
    def is_empty(self) -> bool:
        return not any(vars(self).values())


def frame(message: Any) -> bytes:
    """Encode `message` for the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Turns bytes into messages as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """Return the messages that `data` completes."""
        self._bytes += data
        messages, start = [], 0
        while len(self._bytes) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            end = start + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(pickle.loads(self._bytes[start + _LENGTH.size : end]))
            start = end
        del self._bytes[:start]
        return messages


def received(connection: socket.socket) -> Iterator[Any]:
    """Yield the messages that come on a blocking socket, until it closes."""
    inbox = Inbox()
    while data := connection.recv(1 << 20):
        yield from inbox.feed(data)


class Outbox:
    """The bytes that a non-blocking socket has yet to take."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._bytes = memoryview(b"")

    @property
    def is_empty(self) -> bool:
        return not self._bytes

    def put(self, message: Any) -> None:
        """Begin to send. Call it only while the outbox is empty."""
        self._bytes = memoryview(frame(message))
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes at once."""
        try:
            while self._bytes:
                self._bytes = self._bytes[self._socket.send(self._bytes) :]
        except BlockingIOError:
            pass
