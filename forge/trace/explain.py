"""The narrator: puts the reasons in records into words, for every screen, export and endpoint.

There are two registers. A step's line names the reason with its numbers (`no_blocks: needs 8, free 2`); the account of
a request is told afterwards, in the past tense (`waited 12 steps (31.0 ms): it needed 8 blocks and 2 were free`).
Every text is one line. Text that came with a request (a stop string, an error) is not made fit for a terminal here.

A new kind of reason is added to `Reason`; `assert_never` then makes mypy name each place that has to tell it.
"""

import math
from collections.abc import Callable
from typing import assert_never

from forge.reasons import (
    BudgetOption,
    Deferred,
    ExecutionClass,
    HostPoolFull,
    MaxNumSeqs,
    NoBlocks,
    NoBudget,
    Phase,
    PoolExhausted,
    WaitReason,
)
from forge.trace.records import (
    AdmitRecord,
    FinishRecord,
    PreemptRecord,
    RouteRecord,
    SpecCycle,
    SpecDecision,
    Undrafted,
)
from forge.trace.timeline import Cause, RequestTimeline, Wait

Reason = WaitReason | HostPoolFull | PoolExhausted
NameOf = Callable[[int], str]
"""Returns the name of a sequence, from its id."""


def _seq(seq_id: int) -> str:
    return f"seq {seq_id}"


def class_name(phase: Phase | ExecutionClass) -> str:
    """Return what screens call a phase or a class of steps."""
    return "prefill-only" if phase == "prefill_only" else phase


def plural(number: int, noun: str, several: str = "") -> str:
    """Format a count of things: `1 token`, `32 tokens`; `several` is the plural if an s will not do."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def two_digits(value: float) -> str:
    """Format with one decimal, and two significant digits below 1: `12.3`, `2.1`, `0.21`, `0.021`."""
    size = abs(value)
    decimals = 1 if size >= 0.95 or size == 0 else min(4, 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


# A step's lines


def explain(reason: Reason, name: NameOf = _seq) -> str:
    """Explain a reason: `no_blocks: needs 8, free 2`."""
    match reason:
        case NoBlocks(needed, free):
            return f"no_blocks: needs {needed}, free {free}"
        case MaxNumSeqs(limit):
            return f"max_num_seqs: {limit} run"
        case NoBudget(limit, option):
            return f"budget: too few of the step's {_budget(limit, option)} are left"
        case Deferred(owner, num_tokens):
            return f"deferred: {name(owner)} computes the same {num_tokens}-token prefix"
        case HostPoolFull(needed, free):
            return f"no swap: needs {plural(needed, 'host block')}, free {free}"
        case PoolExhausted(num_tokens):
            return f"the pool holds {plural(num_tokens, 'token')}"
        case _:
            assert_never(reason)


def explain_admission(admission: AdmitRecord) -> str:
    """Explain an admission: `6 blocks; 32 tokens from the cache`."""
    blocks, cached = plural(admission.num_blocks, "block"), plural(admission.num_cached, "token")
    match admission.how:
        case "new":
            text = blocks
        case "recompute":
            text = f"again, to be recomputed, {blocks}"
        case "swap":
            return f"again, {blocks}; {cached} back from the host's pool"
        case "handoff":
            return f"{blocks}; {cached} handed over by another engine"
        case _:
            assert_never(admission.how)
    return f"{text}; {cached} from the cache" if admission.num_cached else text


def explain_preemption(record: PreemptRecord, name: NameOf = _seq) -> str:
    """Explain a preemption: `victim of seq 12: needed 1, free 0; lifo; 37 tokens to recompute`."""
    match record.preemption:
        case "recompute":
            cost = f"{plural(record.tokens_lost, 'token')} to recompute"
        case "swap":
            cost = f"{plural(record.blocks_freed, 'block')} to the host's pool"
        case _:
            assert_never(record.preemption)
    return f"{_victim_of(record, name)}; {cost}{_fallback(record)}"


def explain_cycle(cycle: SpecCycle) -> str:
    """Explain a cycle: `tales-draft 2 of 4; KV 14 > 19 > 17, draft's 14 > 18 > 17; 0.6 + 0.9 ms`.

    The target accepted 2 of its 4 draft tokens; each cache's positions before, with the draft tokens, and after the
    rollback; the time of proposing and of the target's forward.
    """
    if cycle.error is not None:
        return f"{cycle.proposer} is left out: {cycle.error}"
    text = f"{cycle.proposer} {cycle.num_accepted} of {len(cycle.proposed)}{'' if cycle.won else ', another draft won'}"
    caches = [f"KV {' > '.join(map(str, cycle.target_positions))}"]
    if cycle.draft_positions is not None:
        caches.append(f"draft's {' > '.join(map(str, cycle.draft_positions))}")
    return f"{text}; {', '.join(caches)}; {two_digits(cycle.draft_ms)} + {two_digits(cycle.target_ms)} ms"


def explain_undrafted(undrafted: Undrafted) -> str:
    """Explain a plain decode: `7 plain steps to go, to know what one takes`, `draft tokens do not pay (predicted 0.9
    x); again in 63 …`."""
    match undrafted.reason:
        case "measures":
            return f"{plural(undrafted.left or 0, 'plain step')} to go, to know what one takes"
        case "off":
            return f"{why_off(undrafted.decision)}{_again(undrafted)}"
        case "no_proposal":
            return "no proposer had a proposal"
        case "pauses":
            return f"no proposer had a proposal for a while{_again(undrafted)}"
        case "no_room":
            return "no block, or no token of the step, is left for draft tokens"
        case "last_token":
            return "its last token"
        case "not_wanted":
            return "none wanted, or no proposer left"
        case _:
            assert_never(undrafted.reason)


def why_off(decision: SpecDecision | None) -> str:
    """Explain why speculation is off for a sequence: `draft tokens do not pay (predicted 0.90 x, acceptance 20 %)`."""
    if decision is None:
        return "draft tokens do not pay"
    rate = "" if decision.accept_rate is None else f", acceptance {decision.accept_rate * 100:.0f} %"
    pays = "even accepted draft tokens would not pay" if decision.reason == "cannot_win" else "draft tokens do not pay"
    return f"{pays} (predicted {decision.speed_up:.2f} x{rate})"


def _again(undrafted: Undrafted) -> str:
    return "" if undrafted.left is None else f"; again in {plural(undrafted.left, 'token')}"


def explain_finish(finish: FinishRecord) -> str:
    """Explain an end: `stop at 'END'`, `length: the pool holds 32 tokens`."""
    match finish.reason:
        case "stop":
            stop = f"token {finish.stop}" if isinstance(finish.stop, int) else repr(finish.stop)
            return "stop" if finish.stop is None else f"stop at {stop}"
        case "length":
            return "length" if finish.why is None else f"length: {explain(finish.why)}"
        case "abort":
            return "abort"
        case "error":
            return "error" if finish.error is None else f"error: {finish.error}"
        case _:
            assert_never(finish.reason)


# The account of a request


def explain_request(request: RequestTimeline) -> tuple[str, ...]:
    """Return a line for each wait and each preemption of a sequence, and for an end that needs a reason, in order."""
    lines = []
    for wait in request.waits:
        if wait.preemption is not None:
            lines.append(explain_preempted(wait))
        lines.append(explain_wait(wait, request.seq_id))
    if request.finish is not None and (request.finish.why is not None or request.finish.error is not None):
        lines.append(f"ended: {explain_finish(request.finish)}")
    return tuple(lines)


def explain_wait(wait: Wait, seq_id: int) -> str:
    """Explain a wait: `waited 12 steps (31.0 ms): queued behind seq 32, which needed 8 blocks and 2 were free`."""
    again = "" if wait.preemption is None else " again"
    verb = "waited" if wait.ended else "has waited"
    begin = f"{verb}{again} {plural(wait.num_steps, 'step')} ({two_digits(wait.seconds * 1e3)} ms)"
    texts = [_because(cause, seq_id) for cause in wait.causes]
    if len(texts) > 1:
        pairs = zip(wait.causes, texts, strict=True)
        texts = [f"for {plural(cause.num_steps, 'step')} {text}" for cause, text in pairs]
    return f"{begin}: {'; '.join(texts)}" if texts else begin


def explain_preempted(wait: Wait) -> str:
    """Explain the preemption that began a wait: `preempted at step 40, victim of seq 12: needed 1, free 0; lifo; 37
    tokens recomputed`."""
    record = wait.preemption
    assert record is not None, "this wait began with an arrival"
    if record.preemption == "swap":
        cost = "swapped to the host's pool, no token recomputed"
    elif record.tokens_lost == 0:
        cost = "no token had been computed"
    elif wait.tokens_recomputed == record.tokens_lost:
        cost = f"{plural(record.tokens_lost, 'token')} recomputed"
    else:
        cost = f"{plural(record.tokens_lost, 'token')} lost, {wait.tokens_recomputed} recomputed"
    return f"preempted at step {wait.first_step}, {_victim_of(record, _seq)}; {cost}{_fallback(record)}"


def _because(cause: Cause, seq_id: int) -> str:
    """Explain why a sequence waited: its own reason, or that of the sequence at the front of the queue before it."""
    is_own, front = cause.seq_id == seq_id, _seq(cause.seq_id)
    behind = "" if is_own else "queued behind other requests; " if cause.others_before else f"queued behind {front}; "
    match cause.reason:
        case NoBlocks(needed, free):
            who = f"{behind}the last, {front}," if cause.others_before else f"queued behind {front}, which"
            who = "it" if is_own else who
            return f"{who} needed {plural(needed, 'block')} and {free} {'was' if free == 1 else 'were'} free"
        case MaxNumSeqs(limit):
            return f"{behind}{plural(limit, 'sequence')} ran, the limit (--max-num-seqs)"
        case NoBudget(limit, option):
            return f"{behind}other sequences had the step's {_budget(limit, option)} (--{option.replace('_', '-')})"
        case Deferred(owner, num_tokens):
            return f"{behind}deferred while {_seq(owner)} computed the same {num_tokens}-token prefix"
        case _:
            assert_never(cause.reason)


def _budget(limit: int, option: BudgetOption) -> str:
    """Format a budget: `512 tokens`, `2048 prefill-only tokens`."""
    match option:
        case "max_num_batched_tokens":
            return plural(limit, "token")
        case "prefill_only_tokens":
            return plural(limit, "prefill-only token")
        case "prefill_only_memory":
            return f"{plural(limit, 'byte')} for prefill-only requests"
        case _:
            assert_never(option)


def _victim_of(record: PreemptRecord, name: NameOf) -> str:
    itself = record.victim_of == record.seq_id
    victim = "its own victim" if itself else f"victim of {name(record.victim_of)}"
    return f"{victim}: needed {record.needed}, free {record.free}; {record.preempt}"


def _fallback(record: PreemptRecord) -> str:
    return f" ({explain(record.fallback)})" if record.fallback is not None else ""


def explain_route(route: RouteRecord) -> str:
    """Explain a route: `has 240 tokens of it; load 80, the least busy 40`."""
    match route.why:
        case "prefix":
            held = plural(route.cached_tokens, "token")
            return f"has {held} of it; load {route.load}, the least busy {route.least_load}"
        case "holder_busy":
            return (
                f"engine {route.holder} has {plural(route.holder_tokens, 'token')}, but its load is "
                f"{route.holder_load}, here {route.load}"
            )
        case "no_prefix":
            return f"no engine has its beginning; load {route.load}, the least"
        case "fewer_tokens" | "fewer_requests":
            return f"load {route.load}, the least of {route.num_candidates}"
        case "turn":
            return f"its turn; load {route.load}"
        case why:
            return why
