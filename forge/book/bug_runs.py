"""The three runs of a bug: the same requests in the sound engine, with the bug and every invariant checked, and with
the bug unchecked."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.book.bugs import Bug, BugRequest
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.speculation.draft import DraftProposer
from forge.speculation.leases import lease_model

if TYPE_CHECKING:
    from forge.llm import LLM

MAX_STEPS = 1000
"""More than any run takes, so that a bug that goes round in circles ends too."""


@dataclass(frozen=True)
class BugRun:
    """One run of a bug's requests: steps, outputs, and the failure if there was one."""

    steps: int
    """Steps that were made, the one that failed included."""
    token_ids: tuple[tuple[int, ...], ...]
    """Of each sample of each request, as far as it came; those who hung up left out."""
    texts: tuple[str, ...]
    failure: str | None = None
    """What did not hold, where something did not."""


@dataclass(frozen=True)
class BugRuns:
    """The three runs of a bug's requests, side by side."""

    bug: Bug
    sound: BugRun
    checked: BugRun
    """With the bug. Every invariant is checked as soon as a step is planned, and again when it is over."""
    unchecked: BugRun
    """With the bug and no checks."""

    @property
    def different(self) -> tuple[int, ...]:
        """The samples whose tokens differ between the unchecked run and the sound one."""
        pairs = zip(self.sound.token_ids, self.unchecked.token_ids, strict=False)
        return tuple(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)

    @property
    def caught_by(self) -> str | None:
        """`invariant`, or `tokens` if no invariant fired and tokens differ; None if the bug went unnoticed."""
        if self.checked.failure is not None:
            return "invariant"
        return "tokens" if self.different else None


def run_with_and_without(bug: Bug, load: "Callable[[], LLM]") -> BugRuns:
    """Run the requests three times. `load` creates a new engine for each run."""
    revoked = bug.revokes_draft_after
    sound = run_requests(load(), bug.requests, checked=True, revokes_draft_after=revoked)
    with bug.switch():
        checked = run_requests(load(), bug.requests, checked=True, revokes_draft_after=revoked)
    with bug.switch():
        unchecked = run_requests(load(), bug.requests, checked=False, revokes_draft_after=revoked)
    return BugRuns(bug, sound, checked, unchecked)


def run_requests(
    llm: "LLM", requests: Sequence[BugRequest], *, checked: bool, revokes_draft_after: int | None = None
) -> BugRun:
    """Run the requests to their ends, or to the first invariant that does not hold."""
    engine, steps, arrived = llm.engine, 0, 0
    check = engine.scheduler.check_invariants if checked else nullcontext
    if checked:
        _check_plans(engine.scheduler)
    failure = None
    try:
        while steps < MAX_STEPS and (arrived < len(requests) or engine.has_unfinished()):
            while arrived < len(requests) and (requests[arrived].step <= steps or not engine.has_unfinished()):
                request = requests[arrived]
                token_ids = llm.tokenizer.encode(request.prompt)
                engine.add_request(str(arrived), token_ids, SamplingParams(**request.params))
                arrived += 1
            steps += 1
            engine.step()
            check()
            if steps == revokes_draft_after:
                for proposer in engine.speculation.proposers:
                    if isinstance(proposer, DraftProposer):
                        lease_model(proposer, "draft").revoke()
            for index, request in enumerate(requests[:arrived]):
                if request.hangs_up_after == steps:
                    engine.abort(str(index))
    except (AssertionError, ForgeError) as error:
        failure = str(error)
    outputs = [
        engine.output(str(index)) for index, request in enumerate(requests[:arrived]) if request.hangs_up_after is None
    ]
    samples = [sample for output in outputs for sample in output.outputs]
    return BugRun(
        steps, tuple(sample.token_ids for sample in samples), tuple(sample.text for sample in samples), failure
    )


def _check_plans(scheduler) -> None:
    """Check the invariants before the forward pass too, while slots are reserved and not yet written."""
    schedule = scheduler.schedule

    def schedule_and_check():
        plan = schedule()
        assert all(item.num_tokens for item in plan.items), "the cached length is past the next position"
        scheduler.cache.check_invariants()
        return plan

    scheduler.schedule = schedule_and_check
