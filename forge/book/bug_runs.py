"""The three runs of a bug: the same requests in the sound engine, with the bug and every invariant checked, and with
the bug unchecked. And how they are drawn: the rule, the mistake, what caught it, and what a user would have read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.book.bugs import Bug, BugRequest
from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.speculation.draft import DraftProposer
from forge.speculation.leases import lease_model
from forge.views.formatting import count, plural
from forge.views.json_output import picked
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.screen import Part, labelled, marked
from forge.views.terminal import cut
from forge.views.text import one_line

if TYPE_CHECKING:
    from forge.llm import LLM

MAX_STEPS = 1000
"""Steps at most, so that a bug that never ends its requests ends too. No other run takes so many."""


@dataclass(frozen=True)
class BugRun:
    """One run of a bug's requests: steps, outputs, and the failure if there was one."""

    steps: int
    """Steps that were made, the one that failed included."""
    token_ids: tuple[tuple[int, ...], ...]
    """The tokens of each sample of each request, as far as it came; aborted requests are left out."""
    texts: tuple[str, ...]
    failure: str | None = None
    """The invariant that did not hold, if one did not."""


@dataclass(frozen=True)
class BugRuns:
    """The three runs of a bug's requests, side by side."""

    bug: Bug
    sound: BugRun
    checked: BugRun
    """The run with the bug. Every invariant is checked as soon as a step is planned, and again when it is over."""
    unchecked: BugRun
    """The run with the bug and no checks."""

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
                for proposer in engine.proposers:
                    if isinstance(proposer, DraftProposer):
                        lease_model(proposer, "draft").revoke()
            for index, request in enumerate(requests[:arrived]):
                if request.hangs_up_after == steps:
                    engine.abort(str(index))
    except (AssertionError, ForgeError) as error:
        failure = str(error)
    stayed = [index for index, request in enumerate(requests[:arrived]) if request.hangs_up_after is None]
    samples = [sample for index in stayed for sample in engine.output(str(index)).outputs]
    texts = tuple(sample.text for sample in samples)
    return BugRun(steps, tuple(sample.token_ids for sample in samples), texts, failure)


def _check_plans(scheduler) -> None:
    """Check the invariants before the forward pass too, while slots are reserved and not yet written."""
    schedule = scheduler.schedule

    def schedule_and_check():
        plan = schedule()
        assert all(item.num_tokens for item in plan.items), "the cached length is past the next position"
        scheduler.cache.check_invariants()
        return plan

    scheduler.schedule = schedule_and_check


_NAMES = ("as it is", "with the bug", "unchecked")
_LEAD = 24
"""Characters shown of what two texts have in common before they part."""


def bug_object(runs: BugRuns) -> dict[str, Any]:
    """Return the runs as facts."""
    bug, index = runs.bug, next(iter(runs.different), None)
    return {
        "bug": bug.name,
        **picked(bug, "chapter", "rule", "mistake", "known"),
        "caught_by": runs.caught_by,
        "message": runs.checked.failure,
        "step": runs.checked.steps if runs.checked.failure is not None else None,
        "steps": runs.sound.steps,
        "sound": runs.sound.failure is None,
        "samples": len(runs.sound.token_ids),
        "different": len(runs.different),
        "unchecked_failure": runs.unchecked.failure,
        "unchecked_steps": runs.unchecked.steps,
        "said": None if index is None else runs.sound.texts[index],
        "said_with_bug": None if index is None else runs.unchecked.texts[index],
    }


def bug_screen(runs: BugRuns) -> Iterator[Part]:
    """Draw the rule and the mistake, the three runs, where the first two texts part, and what caught the bug."""
    bug = runs.bug
    yield from (Text.assemble(("What catches it? ", TITLE), (bug.name, QUIET)), None)
    yield labelled([("the rule", bug.rule), ("the bug", bug.mistake), ("known from", bug.known)])
    yield from (None, labelled(zip(_NAMES, _findings(runs), strict=True)))
    for index in runs.different[:1]:
        yield from (None, partial(_parted, runs.sound.texts[index], runs.unchecked.texts[index]))
    yield from (None, _verdict(runs))


def _findings(runs: BugRuns) -> Iterator[Text]:
    sound, checked, unchecked = runs.sound, runs.checked, runs.unchecked
    tokens = sum(map(len, sound.token_ids))
    held = f"{plural(sound.steps, 'step')}, {count(tokens)} tokens, every invariant held"
    yield marked(sound.failure is None, held if sound.failure is None else _failure(sound))
    if checked.failure is None:
        yield Text(f"{plural(checked.steps, 'step')}, and every invariant held")
    else:
        yield marked(False, _failure(checked))
    symptom = f"{len(runs.different)} of {plural(len(sound.token_ids), 'sample')} said something else"
    if unchecked.failure is not None:
        symptom = f"{_failure(unchecked)}; until then {symptom}"
    yield marked(False, symptom) if unchecked.failure or runs.different else Text("nothing to be seen")


def _failure(run: BugRun) -> str:
    return f"step {run.steps}: {one_line(run.failure or '')}"


def _parted(sound: str, unchecked: str, width: int) -> Iterator[Part]:
    """Draw two texts from shortly before the place where they part."""
    common = sum(takewhile(bool, map(eq, sound, unchecked)))
    common = sound.rfind(" ", 0, common) + 1  # where a word begins
    start = max(0, common - _LEAD)
    rows: list[tuple[str | Text, str | Text]] = []
    for name, text, style in ((_NAMES[0], sound, ACCENT), (_NAMES[2], unchecked, TROUBLE)):
        shown = Text.assemble(
            "…" if start else "", one_line(text[start:common]) + " ", (one_line(text[common:]), style)
        )
        if not text[common:]:
            shown.append("(nothing more)", QUIET)
        rows.append((name, cut(shown, max(10, width - 14))))
    yield labelled(rows, wraps=())


def _verdict(runs: BugRuns) -> Text:
    if runs.caught_by == "invariant":
        return Text.assemble(("✓ caught", GOOD), f" by an invariant, in step {runs.checked.steps}")
    if runs.caught_by == "tokens":
        return Text.assemble(("✓ caught", GOOD), " by comparing what was said: no invariant sees it")
    return Text.assemble(("✗ unnoticed", TROUBLE))
