"""The pieces that an engine is put together from, by name, so that a lesson can put its own in the place of one.

`LLM(..., pieces=Pieces(scheduler=MyScheduler))` makes one engine so; inside `with standing_in(scheduler=MyScheduler):`
every engine that is made is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from forge.cache.factory import create_kv_cache
from forge.cache.kv_cache import KvCache
from forge.engine.preemption import Preemption
from forge.engine.proposer import Proposer
from forge.engine.scheduler import Scheduler
from forge.speculation.lookup import NgramProposer


@dataclass(frozen=True)
class Pieces:
    """What makes each piece; called with the arguments of the engine's own, which is the default."""

    kv_cache: Callable[..., KvCache] = create_kv_cache
    scheduler: Callable[..., Scheduler] = Scheduler
    preemption: Callable[..., Preemption] = Preemption
    ngram: Callable[[], Proposer] = NgramProposer


_standing = [Pieces()]
"""The pieces of engines that are made now, last."""


def current_pieces() -> Pieces:
    """Return the pieces of an engine that is given none of its own."""
    return _standing[-1]


@contextmanager
def standing_in(**pieces: Any) -> Iterator[None]:
    """Make new engines with these pieces instead of those of the same names while the context is open. Not
    thread-safe."""
    _standing.append(replace(_standing[-1], **pieces))
    try:
        yield
    finally:
        _standing.pop()
