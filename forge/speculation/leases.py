"""Leases: a model that its owner can take back at any moment, to free its memory.

`LeasedModel` wraps a model and is used like it. Its `Lease` holds the only reference to the wrapped one. `revoke()` may
come from any thread. From then on every forward raises `LeaseRevoked`; a forward under way ends undisturbed, and then
the model is released. So the time from revocation to release is bounded by one forward, and measured.
"""

import time
from collections.abc import Callable
from threading import Event, RLock, get_ident
from typing import Protocol

import numpy as np

from forge.cache.kv_storage import KvLayout, KvStorage
from forge.model.forward_batch import ForwardBatch
from forge.model.model import Logits, Model, ModelUnavailable
from forge.model.operation_time import OperationTime


class LeaseRevoked(ModelUnavailable):
    """The model was taken back. `release_ms`: how long its release took, None while a forward still runs."""

    def __init__(self, name: str, release_ms: float | None = None):
        super().__init__(f"the lease of the {name} model was revoked: it can no longer be used")
        self.name = name
        self.release_ms = release_ms


class Lease:
    """The right to use a model until it is revoked. Several threads may use it at once."""

    def __init__(self, name: str, model: Model, clock: Callable[[], float] = time.perf_counter):
        """name: which model this is, `draft` or `target`. clock: seconds."""
        self.name = name
        self._model: Model | None = model
        self._clock = clock
        self._lock = RLock()
        self._users: set[int] = set()
        """Threads inside a forward."""
        self._revoked_at: float | None = None
        self._released = Event()
        self.release_ms: float | None = None
        """Milliseconds from revocation to release; None until it is released."""

    @property
    def revoked(self) -> bool:
        """True from `revoke()` on."""
        return self._revoked_at is not None

    @property
    def in_use(self) -> bool:
        """True while a forward uses the model."""
        return bool(self._users)

    def grant(self, model: Model) -> None:
        """Give a model of the same sizes, after the revoked one was released. Raises ValueError before that."""
        with self._lock:
            if self.release_ms is None:
                raise ValueError(f"the {self.name} model was not released: there is nothing to give back")
            self._model, self._revoked_at, self.release_ms = model, None, None
            self._released.clear()

    def revoke(self) -> None:
        """Take the model back. Returns at once; `wait_released` waits. Revoking again does nothing."""
        with self._lock:
            if self._revoked_at is None:
                self._revoked_at = self._clock()
            self._release_if_unused()

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait until no forward uses the model, `timeout` seconds at most; True if it is released."""
        return self._released.wait(timeout)

    def model(self) -> Model:
        """Return the model. Raises `LeaseRevoked`."""
        model = self._model
        if model is None or self.revoked:
            raise LeaseRevoked(self.name, self.release_ms)
        return model

    def enter(self) -> Model:
        """Return the model for a forward of this thread that ends with `leave`. Raises `LeaseRevoked`."""
        with self._lock:
            model = self.model()
            self._users.add(get_ident())
            return model

    def leave(self) -> None:
        """End this thread's forward. Leaving again does nothing, so that an interrupted call can be repeated."""
        with self._lock:
            self._users.discard(get_ident())
            self._release_if_unused()

    def _release_if_unused(self) -> None:
        if self._revoked_at is not None and not self._users and self.release_ms is None:
            self._model = None
            self.release_ms = (self._clock() - self._revoked_at) * 1e3
            self._released.set()


class LeasedModel(Model):
    """A model that can be taken back. Its sizes stay known after that; everything else raises `LeaseRevoked`."""

    def __init__(self, model: Model, name: str, clock: Callable[[], float] = time.perf_counter):
        """name: which model this is, `draft` or `target`. clock: seconds."""
        self.lease = Lease(name, model, clock)
        self.vocab_size, self.num_layers = model.vocab_size, model.num_layers
        self.max_position_embeddings = model.max_position_embeddings
        self.generates, self.embeds, self.labels = model.generates, model.embeds, model.labels
        self.runs_ahead = model.runs_ahead

    def check_available(self) -> None:
        self.lease.model().check_available()

    def forward(self, batch: ForwardBatch, storage: KvStorage) -> Logits:
        try:
            return self.lease.enter().forward(batch, storage)
        finally:
            self.lease.leave()

    def hidden(self, batch: ForwardBatch, storage: KvStorage) -> np.ndarray:
        try:
            return self.lease.enter().hidden(batch, storage)
        finally:
            self.lease.leave()

    def kv_layout(self, num_blocks: int, block_size: int, kv_dtype: str = "float32") -> KvLayout:
        return self.lease.model().kv_layout(num_blocks, block_size, kv_dtype)

    def new_storage(self, layout: KvLayout) -> KvStorage:
        return self.lease.model().new_storage(layout)

    def prepare(self, layout: KvLayout) -> None:
        self.lease.model().prepare(layout)

    def time_operations(self) -> None:
        self.lease.model().time_operations()

    def operation_times(self) -> tuple[OperationTime, ...]:
        return self.lease.model().operation_times()

    def temporary_bytes(self, num_rows: int, num_logit_rows: int) -> int:
        """Return the model's answer, or 0 once it is revoked: nothing is computed any more."""
        return 0 if self.lease.revoked else self.lease.model().temporary_bytes(num_rows, num_logit_rows)


class HoldsModel(Protocol):
    """An engine or a draft proposer, which computes with its `model`."""

    model: Model


def lease_model(holder: HoldsModel, name: str) -> Lease:
    """Return the lease of a holder's model. The first call wraps the model; the holder must not be inside a forward."""
    if not isinstance(holder.model, LeasedModel):
        holder.model = LeasedModel(holder.model, name)
    return holder.model.lease
