"""A run whose models are revoked and returned while it runs, to show leases at work."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge.cache.kv_storage import KvStorage
from forge.engine.outputs import RequestOutput
from forge.errors import UsageError
from forge.llm import LLM
from forge.model.forward_batch import ForwardBatch
from forge.model.model import Logits, Model
from forge.option import option
from forge.run import Run
from forge.speculation.draft import DraftProposer
from forge.speculation.leases import Lease, LeaseRevoked, lease_model
from forge.trace.records import StepRecord
from forge.views.formatting import ms

_SPECULATION = "Speculation"
_AWAY_SECONDS = 0.005
"""Seconds for which the owner keeps the target."""
_PATIENCE_SECONDS = 1.0
"""Seconds to wait for a forward to revoke a model in."""


@dataclass(frozen=True)
class Revocation:
    """After how many output tokens each model is revoked and returned; None for never. Raises `UsageError` for a number
    that makes no sense."""

    revoke_draft_at: int | None = option(
        None, "Take the draft back after this many output tokens: the experiment alone.", _SPECULATION
    )
    return_draft_at: int | None = option(None, "Load the draft again after this many output tokens.", _SPECULATION)
    revoke_target_at: int | None = option(
        None,
        "Take the target back after this many output tokens, and give it back: the sequence waits.",
        _SPECULATION,
    )

    def __post_init__(self) -> None:
        draft, again, target = self.revoke_draft_at, self.return_draft_at, self.revoke_target_at
        if again is not None and (draft is None or again <= draft):
            raise UsageError("--return-draft-at is a number of output tokens above --revoke-draft-at, which it needs")
        if target is not None and target < 1:
            raise UsageError(f"--revoke-target-at is a number of output tokens, at least 1, and not {target}")

    @property
    def is_asked_for(self) -> bool:
        return self.revoke_draft_at is not None or self.revoke_target_at is not None


class BorrowedRun:
    """Wraps a `Run` and revokes its models while it is iterated."""

    def __init__(self, llm: LLM, run: Run, revocation: Revocation, drafts: Sequence[str | Path] = ()):
        """drafts: the drafts to load again, as `--draft` names them."""
        self._llm, self._run, self._plan, self._drafts = llm, run, revocation, drafts
        self._tokens = 0
        self._draft_leases = _draft_leases(llm) if revocation.revoke_draft_at is not None else []
        self._target_lease = llm.lease() if revocation.revoke_target_at is not None else None
        self._draft_is_revoked = False
        self._target: Model | None = None
        """The target while its owner has it."""
        self._revoking: threading.Thread | None = None
        self.told: list[str] = []
        """What happened, a sentence each."""

    @property
    def outputs(self) -> list[RequestOutput]:
        return self._run.outputs

    @property
    def draft_release_ms(self) -> float | None:
        """The longest time from a draft's revocation to its release."""
        return max((lease.release_ms for lease in self._draft_leases if lease.release_ms is not None), default=None)

    def abort(self) -> None:
        self._run.abort()

    def __iter__(self) -> Iterator[StepRecord]:
        engine = self._llm.engine
        engine.waits_for_model = self._target_lease is not None
        try:
            while True:
                try:
                    for record in self._run:
                        self._tokens += len(record.tokens)
                        self._act()
                        yield record
                    return
                except LeaseRevoked:
                    if self._target is None:
                        raise
                    self._give_target_back()
        finally:
            engine.waits_for_model = False
            if self._revoking is not None:
                self._revoking.join()
                if self._target_lease is not None and self._target_lease.revoked:  # in the run's last forward
                    self._give_target_back()

    def _act(self) -> None:
        plan = self._plan
        if plan.revoke_draft_at is not None and self._tokens >= plan.revoke_draft_at and not self._draft_is_revoked:
            for lease in self._draft_leases:
                _revoke_in_the_next_forward(lease)
            self._draft_is_revoked = True
        if plan.return_draft_at is not None and self._tokens >= plan.return_draft_at and not self._is_returned():
            started = time.perf_counter()
            self._llm.speculate_with("draft", self._drafts)
            load_ms = (time.perf_counter() - started) * 1e3
            self.told.append(
                f"after {self._tokens} tokens the draft was loaded again in {ms(load_ms)} ms, with an empty cache"
            )
        if plan.revoke_target_at is not None and self._tokens >= plan.revoke_target_at and self._target is None:
            assert self._target_lease is not None
            self._target = self._target_lease.model()
            self._revoking = threading.Thread(target=_revoke_in_a_forward, args=(self._target_lease,), daemon=True)
            self._revoking.start()

    def _is_returned(self) -> bool:
        return any("the draft was loaded again" in text for text in self.told)

    def _give_target_back(self) -> None:
        lease, target = self._target_lease, self._target
        assert lease is not None and target is not None
        lease.wait_released()
        release_ms = lease.release_ms
        time.sleep(_AWAY_SECONDS)
        lease.grant(target)
        self.told.append(
            f"after {self._tokens} tokens the target was taken back, and released {ms(release_ms)} ms later, when the "
            f"forward under way had ended. The sequence waited {_AWAY_SECONDS * 1e3:.0f} ms and went on from its tokens"
        )


def _draft_leases(llm: LLM) -> list[Lease]:
    proposers = llm.engine.proposers
    return [lease_model(proposer, "draft") for proposer in proposers if isinstance(proposer, DraftProposer)]


def _revoke_in_the_next_forward(lease: Lease) -> None:
    """Revoke as the next forward begins: the case in which a release takes longest."""
    model = lease.model()
    forward = model.forward

    def revoked_meanwhile(batch: ForwardBatch, storage: KvStorage) -> Logits:
        lease.revoke()
        return forward(batch, storage)

    model.forward = revoked_meanwhile  # type: ignore[method-assign]


def _revoke_in_a_forward(lease: Lease) -> None:
    """Revoke during a forward, as an owner does who does not wait for the engine."""
    end = time.perf_counter() + _PATIENCE_SECONDS
    while not lease.in_use and time.perf_counter() < end:
        time.sleep(0)
    lease.revoke()
