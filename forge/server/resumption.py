"""Event ids: what a client sends as `Last-Event-ID` to go on with a stream whose connection is gone.

An id says everything that another server needs: the request's id, the seed of its draws, how many tokens of each choice
the client has, and a checksum of prompt and parameters. The client sends the same body again; the tokens follow from it
and the seed, and those that it has are left out. A client that has only the request's id sends that, and gets the same
tokens from the first on, if an engine still knows the seed. (The header is that of server-sent events in the HTML
standard.)
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from forge.engine.sampling_params import SamplingParams
from forge.errors import UsageError

_REQUEST_ID = re.compile(r"(?:chat)?cmpl-[A-Za-z0-9_.~-]{1,200}")
_ID = re.compile(r"([A-Za-z0-9_.~-]{1,200}):([0-9a-f]{1,16}):([0-9a-f]{8}):([0-9]+e?(?:,[0-9]+e?)*)")


_DECIDING = [field.name for field in fields(SamplingParams) if field.name != "seed"]
"""The parameters from which the tokens follow, beside the seed."""


class Part(Protocol):
    """A new part of one choice."""

    choice: int
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True)
class SeenStream:
    """The part of a stream that a client already has."""

    request_id: str
    seed: int
    checksum: int
    tokens: tuple[int, ...]
    """The number of tokens of each choice; empty if the client knows only the request's id."""
    ended: tuple[bool, ...]
    """Whether the client knows that the choice has ended, for each choice."""


def parse_event_id(text: str) -> SeenStream:
    """Return what the client has, from the id of an event or of a request. Raises `UsageError` for what is neither."""
    if _REQUEST_ID.fullmatch(text):
        return SeenStream(text, 0, 0, (), ())
    match = _ID.fullmatch(text)
    if match is None:
        raise UsageError("Last-Event-ID is no id of an event or a request of this server: leave it out")
    counts = match[4].split(",")
    return SeenStream(
        match[1],
        int(match[2], 16),
        int(match[3], 16),
        tuple([int(count.rstrip("e")) for count in counts]),
        tuple([count.endswith("e") for count in counts]),
    )


def shown_id(request_id: str) -> str:
    """Return a request's id as its client knows it: of a resumed stream, the one that it began with."""
    return request_id.partition("~")[0]


def checksum_of(prompts: Iterable[Sequence[int]], params: SamplingParams) -> int:
    """Compute a checksum of everything from which the tokens follow, beside the seed."""
    value = crc32(repr([getattr(params, name) for name in _DECIDING]).encode())
    for token_ids in prompts:
        value = crc32(np.asarray(token_ids, np.int32).tobytes(), value)
    return value


def _with_model(checksum: int, model: str) -> int:
    return checksum ^ crc32(model.encode())


class StreamPosition:
    """Counts the tokens that a stream has sent, and marks its events with them."""

    def __init__(
        self,
        request_id: str,
        seed: int,
        checksum: int,
        num_choices: int,
        seen: SeenStream | None = None,
        models: Iterable[str] = ("",),
    ):
        """seen: what the client has already. models: the versions that can be gone on with. Raises `UsageError` if it
        is of another request, or of none of these models."""
        self._head, self._checksum = f"{request_id}:{seed:x}:", checksum
        self.model = ""
        """The version of the model that computes the stream."""
        self._tokens, self._ended = [0] * num_choices, [False] * num_choices
        self.seen = seen
        if seen is not None:
            begun = [model for model in models if _with_model(checksum, model) == seen.checksum]
            if not begun or len(seen.tokens) != num_choices:
                raise UsageError(
                    "Last-Event-ID is of another request, or of a model that was replaced: send the body that the "
                    "stream began with, or begin again without the header"
                )
            (self.model, *_) = begun

    def splits_before(self, choice: int, num_tokens: int) -> bool:
        """Return whether the client has exactly the first `num_tokens` of a choice: what follows is sent apart."""
        return self.seen is not None and num_tokens == self.seen.tokens[choice]

    def is_new(self, part: Part) -> bool:
        """Count a part of the stream; return whether the client does not have it yet."""
        choice = part.choice
        self._tokens[choice] += len(part.token_ids)
        self._ended[choice] = self._ended[choice] or part.finish_reason is not None
        if self.seen is None or self._tokens[choice] > self.seen.tokens[choice]:
            return True
        return self._ended[choice] and not self.seen.ended[choice]

    def new_chunks(self, part: Part, chunks: Iterable[Any]) -> list[Any]:
        """Return the chunks of a part, or none if the client has them."""
        written = list(chunks)  # what makes them counts on
        return written if self.is_new(part) else []

    def mark(self, events: bytes) -> bytes:
        """Return events with an id after the last of them."""
        counts = ",".join(
            [f"{count}e" if end else str(count) for count, end in zip(self._tokens, self._ended, strict=True)]
        )
        checksum = _with_model(self._checksum, self.model)
        return events[:-1] + f"id: {self._head}{checksum:08x}:{counts}\n\n".encode() if events else events
