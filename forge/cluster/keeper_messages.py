"""What a front and its keeper tell each other. The keeper is the one process of a front that knows Ray."""

from typing import Any, NamedTuple

from forge.cluster.options import ClusterOptions
from forge.cluster.wire import Address
from forge.server.messages import Ready


class Deployment(NamedTuple):
    """To the keeper: what is to run on Ray, from now on."""

    name: str
    model: str
    options: dict[str, Any]
    """As for `LLM`."""
    cluster: ClusterOptions
    address: str | None = None
    """Of Ray; None for one that is to be started in the server's private folder."""
    again: bool = False
    """Whether a keeper before this one has started it: what still runs is taken over."""


class Running(NamedTuple):
    """From the keeper: the first engines run."""

    ready: Ready
    secret: bytes
    kinds: tuple[str, ...]


class Joined(NamedTuple):
    """From the keeper: a replica runs, and its engine listens."""

    name: str
    kind: str
    address: Address
    version: str
    """Of its model."""


class Left(NamedTuple):
    """From the keeper: a replica has ended, or begins to."""

    name: str


class Changed(NamedTuple):
    """From the keeper: what runs on Ray is what was asked for last."""

    failure: str | None = None
    """Why it is still what it was before."""


class Notice(NamedTuple):
    """From the keeper: a line for the log."""

    text: str
