"""Bugs as lessons: each puts one mistake that a real engine has made back into the engine.

A bug replaces a method for the length of a `with`; outside of it the engine is as it was. The same requests run in the
sound engine, with the bug and every invariant checked, and with the bug unchecked. The screen says the rule, the
mistake, what caught it, and what a user would have read.

A bug is caught in one of two ways: an invariant does not hold (`invariant`), or only the output differs (`tokens`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import numpy as np
from rich.text import Text

from forge.backends.reference import ReferenceOperations
from forge.cache.block_pool import BlockTable
from forge.cache.kv_storage import BlockCopy
from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache, PrefixTable
from forge.engine import sampling
from forge.engine.sampler import Sampler
from forge.engine.sampling_params import SamplingParams
from forge.engine.sequence import Sequence as TokenSequence
from forge.engine.structured_output import StructuredOutput
from forge.errors import ForgeError, UsageError
from forge.grammar.matcher import GrammarMatcher
from forge.model.model import ModelUnavailable
from forge.speculation.draft import DraftProposer
from forge.speculation.leases import lease_model
from forge.speculation.speculator import Speculator
from forge.views.formatting import count, plural
from forge.views.json_output import picked
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE
from forge.views.screen import Part, labelled, marked
from forge.views.terminal import cut
from forge.views.text import one_line

if TYPE_CHECKING:
    from forge.llm import LLM

CaughtBy = Literal["invariant", "tokens"]
Switch = AbstractContextManager[Any]
"""While it is entered, the engine has the bug."""
MAX_STEPS = 1000
"""Steps at most, so that a bug that never ends its requests ends too. No other run takes so many."""


@dataclass(frozen=True)
class BugRequest:
    """One of the requests that show a bug."""

    prompt: str
    params: Mapping[str, Any]
    step: int = 0
    """It comes when this many steps have been made."""
    hangs_up_after: int | None = None
    """Its client goes away after this step."""


@dataclass(frozen=True)
class Bug:
    """A bug, the engine (`loading`) and the `requests` that show it."""

    name: str
    chapter: str
    """The command that has it."""
    rule: str
    """What holds without it."""
    mistake: str
    known: str
    """Where it was real."""
    caught_by: CaughtBy
    switch: Callable[[], Switch]
    loading: Mapping[str, Any]
    requests: Sequence[BugRequest]
    revokes_draft_after: int | None = None
    """The owner of the draft takes it back after this step."""


def find_bug(name: str, chapter: str) -> Bug:
    """Return the bug of a chapter by its name. Raises `UsageError` if the chapter has none of this name."""
    names = bugs_of(chapter)
    if name not in names:
        raise UsageError(f"forge {chapter} has no bug {name!r}; there are {', '.join(names)}")
    return BUGS[name]


def bugs_of(chapter: str) -> list[str]:
    return [bug.name for bug in BUGS.values() if bug.chapter == chapter]


_SMALL = {"kv": "paged", "block_size": 16, "num_blocks": 32}
_DRAFTED: dict[str, Any] = {"speculate": "draft", "k": 4, "speculate_fixed": True}
_STORY = (
    "The fox lived in a den under an old oak, and every evening a little turtle came to visit. One day the turtle lent "
    "the fox a lantern. The fox took it to the bridge to show it to the birds, but a storm came, and"
)
_OTHER = "Once upon a time, when the first snow fell, a little girl named Hazel woke up early and went to the old mill,"
_SHORT = "Once upon a time"
_FOUND = StructuredOutput(regex=r" she (met|saw|found) a [a-z]{3,9} [a-z]{3,9} (in|by|under|behind) the [a-z]{3,9}\.")


def _greedy(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "ignore_eos": True}


def _drawn(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0.9, "seed": 1, "n": 3, **more}


BUGS: dict[str, Bug] = {}
"""Every bug by its name, in the order of the chapters."""


def _bug(
    chapter: str,
    rule: str,
    known: str,
    caught_by: CaughtBy,
    *requests: BugRequest,
    revokes_draft_after: int | None = None,
    **loading: Any,
) -> Callable[[Callable[[], Switch]], Callable[[], Switch]]:
    """Enter a switch as a bug: its name is the bug's, and its docstring says the mistake. loading: what the engine has
    beside `_SMALL`."""

    def enter(switch: Callable[[], Switch]) -> Callable[[], Switch]:
        name, mistake = switch.__name__.strip("_").replace("_", "-"), " ".join((switch.__doc__ or "").split())
        engine = _SMALL | loading
        BUGS[name] = Bug(name, chapter, rule, mistake, known, caught_by, switch, engine, requests, revokes_draft_after)
        return switch

    return enter


@_bug(
    "paged",
    "A block is free when the last table that has it releases it.",
    "vLLM: shared blocks that were given back once too often (issue 1556, 'Double free!')",
    "invariant",
    BugRequest(_STORY, _drawn(40, stop=".", seed=10)),
    BugRequest(_OTHER, _greedy(24), step=8),
    BugRequest(_STORY, _greedy(24), step=10),
)
def _freed_block() -> Switch:
    """The first table that releases a block frees it, while it is still in other tables."""

    def free(cache: PagedKvCache, table: BlockTable) -> None:
        pool = cache.pool
        for block in reversed(table.blocks):
            references = pool.reference_counts[block]
            if references:
                pool.num_references, pool.reference_counts[block] = pool.num_references - references, 0
                pool.free.append(block)

    return patch.object(PagedKvCache, "release_table", free)


@_bug(
    "paged",
    "Copy, then release the old block, then enter the new one.",
    "vLLM: a block that was given up for a copy, and once more at the end (pull request 3347)",
    "invariant",
    BugRequest(_STORY, _drawn(24, ignore_eos=True)),
)
def _decref_first() -> Switch:
    """The writer releases its reference first. Then the block seems to be its own, and is not copied."""
    grow = PagedKvCache.grow

    def decref_and_grow(cache: PagedKvCache, seq_id: int, table, num_tokens: int) -> tuple[BlockCopy, ...]:
        if table.reserved % cache.block_size and cache.pool.reference_counts[table.blocks[-1]] > 1:
            cache.pool.decref(table.blocks[-1])
        return grow(cache, seq_id, table, num_tokens)

    return patch.object(PagedKvCache, "grow", decref_and_grow)


@_bug(
    "prefix",
    "What a step is still computing is not yet a hit.",
    "nano-vllm (issue 208, pull request 209); vLLM for Mamba layers (pull request 29387)",
    "invariant",
    BugRequest(_STORY, _greedy(24), hangs_up_after=1),
    BugRequest(_STORY, _greedy(24), step=1),
    kv="prefix",
    max_num_seqs=4,
    max_num_batched_tokens=24,
)
@contextmanager
def _in_flight_hit() -> Iterator[None]:
    """Blocks are indexed when they are reserved. A client hangs up halfway through its prompt, and the next one with
    the same prompt finds blocks that were never written."""
    add, grow = PrefixKvCache.add, PrefixKvCache.grow
    texts: dict[int, tuple[int, ...]] = {}

    def remember(cache: PrefixKvCache, seq_id: int, token_ids, salt: str = "", max_cached: int | None = None) -> int:
        texts[seq_id] = tuple(token_ids)
        return add(cache, seq_id, token_ids, salt, max_cached)

    def grow_and_index(cache: PrefixKvCache, seq_id: int, table: PrefixTable, num_tokens: int):
        copies, computed = grow(cache, seq_id, table, num_tokens), table.computed
        table.token_ids[computed:] = texts[seq_id][computed : table.reserved]
        table.computed = computed + len(table.token_ids[computed:])
        cache.index_table(table)
        table.computed = computed
        return copies

    with patch.object(PrefixKvCache, "add", remember), patch.object(PrefixKvCache, "grow", grow_and_index):
        yield


@_bug(
    "prefix",
    "The last token of a prompt is computed in any case, for its logits.",
    "LMCache beside vLLM: the scheduler's own assertion failed (pull request 3322)",
    "invariant",
    BugRequest(_STORY, _greedy(24)),
    BugRequest(_STORY, _greedy(24), step=4),
    kv="prefix",
)
def _full_hit() -> Switch:
    """A prompt that is wholly cached has nothing left to compute: no row and no logits. It gets the token of the row
    before, which is another request's."""
    return patch.object(TokenSequence, "max_cacheable_tokens", property(lambda sequence: len(sequence.token_ids)))


@_bug(
    "batching",
    "A preempted sequence begins again with what the cache has of it, which may be nothing.",
    "vLLM: a stale count of cached tokens gave wrong outputs (pull request 18957)",
    "tokens",
    BugRequest(_SHORT, _greedy(60)),
    BugRequest(_OTHER, _greedy(40)),
    BugRequest(_STORY, _greedy(48)),
    num_blocks=10,
)
@contextmanager
def _stale_count() -> Iterator[None]:
    """A preempted sequence keeps its count of computed tokens. The blocks behind that count are others now."""
    add, remove = PagedKvCache.add, PagedKvCache.remove
    counts: dict[int, int] = {}

    def count_and_remove(cache: PagedKvCache, seq_id: int) -> None:
        counts[seq_id] = cache.computed_length(seq_id)
        remove(cache, seq_id)

    def add_as_it_was(cache: PagedKvCache, seq_id: int, token_ids, salt: str = "", max_cached=None) -> int:
        num_cached = add(cache, seq_id, token_ids, salt, max_cached)
        if seq_id not in counts:
            return num_cached
        cache.reserve(seq_id, counts[seq_id])
        cache.commit(seq_id, [0] * counts[seq_id])  # as if they had been computed
        return counts[seq_id]

    with patch.object(PagedKvCache, "remove", count_and_remove), patch.object(PagedKvCache, "add", add_as_it_was):
        yield


@_bug(
    "batching",
    "A row at position p sees the keys 0 to p, in whatever chunk it is computed.",
    "sparkinfer's prefill kernel (issue 3); a chunk's rows aligned with key 0",
    "tokens",
    BugRequest(_OTHER, _greedy(12)),
    device="reference",
    max_num_seqs=4,
    max_num_batched_tokens=24,
)
def _query_start() -> Switch:
    """The causal mask forgets where the chunk starts: its rows see the beginning of the text and nothing else."""
    attention = ReferenceOperations.attention

    def attend_from_zero(operations, q, storage, layer: int, batch):
        positions = batch.positions.copy()
        for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            if stop - start > 1:  # single rows have a kernel of their own, which is right
                positions[start:stop] -= positions[start]
        return attention(operations, q, storage, layer, replace(batch, positions=positions))

    return patch.object(ReferenceOperations, "attention", attend_from_zero)


@_bug(
    "speculation",
    "After a verification the cache holds the known tokens and the accepted draft tokens.",
    "mlx-vlm: rejected draft tokens left in the cache of a batch (issue 1144)",
    "invariant",
    BugRequest(_OTHER, _greedy(32)),
    **_DRAFTED,
)
def _rollback() -> Switch:
    """The target's own token counts as accepted too: the slot of a rejected guess stays, as if it were right."""
    verify = Sampler.verify

    def one_more(sampler: Sampler, *arguments):
        outcome = verify(sampler, *arguments)
        return outcome._replace(num_accepted=outcome.num_accepted + 1)

    return patch.object(Sampler, "verify", one_more)


@_bug(
    "speculation",
    "A draft that is taken back is asked no more, and the target goes on alone.",
    "vLLM: a draft past its own context crashed the engine (pull request 24662)",
    "tokens",
    BugRequest(_OTHER, _greedy(32)),
    BugRequest(_SHORT, _greedy(32), step=2),
    revokes_draft_after=4,
    **_DRAFTED,
)
def _lease() -> Switch:
    """The revoked draft is still asked. Its error is taken for the target's, and every sequence ends with it."""
    ask = Speculator.ask

    def ask_unguarded(speculator: Speculator, source, items, drafts) -> None:
        ask(speculator, source, items, drafts)
        for failure in drafts.failures.values():
            raise ModelUnavailable(failure.message)

    return patch.object(Speculator, "ask", ask_unguarded)


@_bug(
    "constrained",
    "The matcher stands where the output ends: what draft tokens were rejected, it takes back.",
    "vLLM: the grammar's state and rejected draft tokens went apart (pull request 44993)",
    "tokens",
    BugRequest(_OTHER, {"max_tokens": 40, "structured": _FOUND}),
    **_DRAFTED,
)
@contextmanager
def _matcher_ahead() -> Iterator[None]:
    """The matcher walks over the draft tokens to check them, and stays behind the last even where they are rejected.
    The next mask is that of another place."""
    num_allowed = GrammarMatcher.num_allowed

    def check_and_stay(matcher: GrammarMatcher, output, token_ids) -> int:
        allowed = num_allowed(matcher, output, token_ids)
        matcher.move_to([*output, *token_ids[:allowed]])
        return allowed

    with (
        patch.object(GrammarMatcher, "num_allowed", check_and_stay),
        patch.object(GrammarMatcher, "roll_back", lambda matcher, known, output: len(known)),
    ):
        yield


@_bug(
    "constrained",
    "What the grammar refuses becomes impossible before a token is chosen.",
    "guidance with llama.cpp: a top-k of 1 before the mask left nothing to choose from (issue 1325)",
    "tokens",
    BugRequest(_OTHER, {"max_tokens": 40, "structured": _FOUND}),
)
def _mask_after() -> Switch:
    """A token is chosen first, and one that is refused is replaced by any that is allowed. The output has its form, and
    the model has no say in it."""

    def mask_afterwards(logits: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        choice = int(logits.argmax())
        allowed = np.array([choice]) if mask[choice] else np.flatnonzero(mask)[:1]
        return allowed, logits[allowed]

    return patch.object(sampling, "allowed_tokens", mask_afterwards)


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
