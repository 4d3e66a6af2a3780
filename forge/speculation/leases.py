"""Leases: an engine's weights are lent, and whoever lent them may take them back at any moment.

`Lease` holds the only reference to what it lends. A holder gets it for the length of one `with`, which spans one
forward pass and no more:

    with lease.use() as model:
        logits = model.forward(batch, storage)

`revoke()` may come from any thread. From then on every `use()` raises `LeaseRevoked`; a forward that is under way is
not disturbed, and when it ends the weights are let go. So the time from revocation to release is bounded by one
forward, and measured.
"""

import time
from collections.abc import Callable
from threading import Event, RLock, get_ident
from typing import Generic, TypeVar

from forge.errors import ForgeError

T = TypeVar("T")


class LeaseRevoked(ForgeError):
    """What was lent has been taken back."""

    def __init__(self, name: str):
        super().__init__(f"the lease of the {name} model was revoked: it can no longer be used")
        self.name = name


class Lease(Generic[T]):
    """The right to use `lent`, until it is revoked.

    Several threads may use it at once, each for one `with` at a time.
    """

    def __init__(self, name: str, lent: T, clock: Callable[[], float] = time.perf_counter):
        """name: whose weights these are, `draft` or `target`. clock: seconds."""
        self.name = name
        self._lent: T | None = lent
        self._clock = clock
        self._lock = RLock()
        self._users: set[int] = set()
        """Threads that are inside a `with`."""
        self._revoked_at: float | None = None
        self._released_at: float | None = None
        self._released = Event()

    @property
    def revoked(self) -> bool:
        return self._revoked_at is not None

    @property
    def lent(self) -> T:
        """What is lent, to ask it about itself: work with it goes by `use`. Raises `LeaseRevoked`."""
        self.check()
        return self._lent

    @property
    def release_ms(self) -> float | None:
        """Milliseconds from revocation to release; None until it is released."""
        if self._revoked_at is None or self._released_at is None:
            return None
        return (self._released_at - self._revoked_at) * 1e3

    def use(self) -> "_Use[T]":
        """Use what is lent, for the length of one `with`. Raises `LeaseRevoked` if it has been taken back."""
        return _Use(self)

    def check(self) -> None:
        """Raise `LeaseRevoked` if it has been taken back."""
        if self.revoked:
            raise LeaseRevoked(self.name)

    def revoke(self) -> None:
        """Take it back. Returns at once; `wait_released` waits. Revoking again does nothing."""
        with self._lock:
            if self._revoked_at is None:
                self._revoked_at = self._clock()
            self._release_if_unused()

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait until nobody uses it any more, `timeout` seconds at most; whether that is so."""
        return self._released.wait(timeout)

    def _enter(self) -> T:
        with self._lock:
            self.check()
            self._users.add(get_ident())
            return self._lent

    def _leave(self) -> None:
        """An exception may have cut short an earlier leave of this thread (Ctrl-C): then this one makes up for it."""
        with self._lock:
            self._users.discard(get_ident())
            self._release_if_unused()

    def _release_if_unused(self) -> None:
        if self._revoked_at is not None and not self._users and self._released_at is None:
            self._lent = None
            self._released_at = self._clock()
            self._released.set()


class _Use(Generic[T]):
    """One `with`. Written out, because a generator would take as long as a guess's bookkeeping."""

    __slots__ = ("_lease",)

    def __init__(self, lease: Lease[T]):
        self._lease = lease

    def __enter__(self) -> T:
        try:
            return self._lease._enter()
        except BaseException:
            self._lease._leave()
            raise

    def __exit__(self, *exception) -> None:
        self._lease._leave()
