"""Who runs, who waits, and why? One step of the engine as a picture: the queues, the running batch, the pool, what the
step computes, a line for each decision with its reason, and how the run has gone so far.

Drawn from records alone, so the same picture shows a step that has just ended and one of a recorded run.
"""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from forge.trace.lives import percentile
from forge.trace.records import (
    AdmitRecord,
    Deferred,
    Execution,
    FinishRecord,
    ItemRecord,
    MaxNumSeqs,
    NoBlocks,
    NoBudget,
    PreemptRecord,
    StepRecord,
    WaitReason,
)
from forge.views.charts import bar, sparkline
from forge.views.figures import count, ms, percent, plural
from forge.views.history import History, Moment
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE, sequence_style
from forge.views.text import one_line, quoted

QUESTION = "Who runs, who waits, and why?"
CHART_STEPS = 400
"""Steps that the small charts look back on, at most."""
_BAR = 22
_MOST_REASONS = 8


def scheduler_lines(history: History, index: int, width: int, height: int) -> list[Text]:
    """The picture after step `index` of a history, in at most `height` lines of at most `width` columns."""
    record, moment = history.records[index], history.moments[index]
    head = [*title_lines(record, width), Text(""), *queue_lines(history, record, moment, width), Text("")]
    charts = [Text(""), chart_line(history, index, width)]
    reasons = reason_lines(record, width)
    room = height - len(head) - len(charts) - 1
    reasons = shortened(reasons, max(1, min(_MOST_REASONS, room - 1)))
    items = item_rows(record, width)
    items = items if len(items) <= room - len(reasons) else []
    lines = [*head, items_line(record, width), *items, *reasons, *charts]
    return [_cut(line, width) for line in lines[:height]]


def title_lines(record: StepRecord, width: int) -> list[Text]:
    """The question, and on the right what kind of step this was and how long it took."""
    kind = record.execution_class.capitalize() if record.execution_class != "oneshot" else "OneShot"
    total = record.schedule_ms + record.forward_ms + record.sample_ms
    parts = f"schedule {ms(record.schedule_ms)}, forward {ms(record.forward_ms)}"
    short = f"step {count(record.step)} · {kind} · {ms(total)} ms"
    for facts in (f"{short} ({parts})", short):
        room = width - len(QUESTION) - len(facts)
        if room >= 2:
            return [Text.assemble((QUESTION, TITLE), " " * room, (facts, QUIET))]
    return [Text(QUESTION, TITLE), Text(short, QUIET)]


def queue_lines(history: History, record: StepRecord, moment: Moment, width: int) -> list[Text]:
    """How many wait and run, who, and how full the pool is."""
    queues, cache = record.queues, record.cache
    limit = history.max_num_seqs or max(len(moment.running), 1)
    running = Text("running  ", QUIET)
    running.append(f"{len(moment.running)}/{limit} ")
    for seq_id in moment.running[:limit]:
        running.append("█", sequence_style(seq_id))
    running.append("░" * max(0, limit - len(moment.running)), QUIET)
    first = Text.assemble(("waiting  ", QUIET), f"{queues.waiting:<4} ", running)
    others = [("swapped", queues.swapped), ("finished", queues.finished), ("preempted", moment.preemptions)]
    for name, value in others:
        if value or name != "swapped":
            first.append(f"   {name} ", QUIET).append(count(value))
    lines = [first]
    if moment.waiting:
        line = Text.assemble(("queue    ", QUIET))
        for place, seq_id in enumerate(moment.waiting):
            if line.cell_len + 12 > width:
                line.append(f"… {queues.waiting + queues.swapped - place} more", QUIET)
                break
            line.append(f"{seq_id} ", sequence_style(seq_id))
        lines.append(line)
    if cache.num_blocks:
        pool = Text.assemble(("pool     ", QUIET), f"{cache.used_blocks}/{cache.num_blocks} ")
        filled = bar(cache.used_blocks, cache.num_blocks, _BAR)
        pool.append(filled, ACCENT).append("░" * (_BAR - len(filled)), QUIET).append(f" {percent(cache.utilization)}")
        if cache.cached_blocks:
            pool.append("   cached ", QUIET).append(count(cache.cached_blocks))
        pool.append("   fragmentation ", QUIET).append(percent(cache.internal_fragmentation))
        pool.append("   shared ", QUIET).append(percent(cache.sharing))
        lines.append(pool)
    return lines


def items_line(record: StepRecord, width: int) -> Text:
    """`this step: decode 11 seqs · prefill 31 [0:64] of 200`, and on a GPU how and when it was launched."""
    decodes = [item for item in record.items if item.phase == "decode"]
    parts = [f"decode {plural(len(decodes), 'seq')}"] if decodes else []
    parts += [prefill_text(item) for item in record.items if item.phase == "prefill"]
    line = Text.assemble(("this step: ", TITLE), " · ".join(parts) or "nothing is computed")
    return line.append("".join([f" · {text}" for text in launch_texts(record)]), QUIET)


def launch_texts(record: StepRecord) -> list[str]:
    """How a device that works by itself was given the step; nothing on a CPU."""
    texts = [execution_text(record.execution)] if record.execution is not None else []
    texts += ["planned ahead"] if record.planned_ahead else []
    return texts + ([f"{plural(record.discarded, 'row')} in vain"] if record.discarded else [])


def execution_text(execution: Execution) -> str:
    """`graph (captured for 4 rows)`."""
    return f"{execution.mode} ({execution.reason})"


def prefill_text(item: ItemRecord) -> str:
    """`prefill 31 [64:128] of 200`, a chunk of a prompt, or of what a preemption dropped."""
    end = item.start + item.num_tokens
    rest = f" of {end + item.remaining}" if item.remaining else ""
    return f"prefill {item.seq_id} [{item.start}:{end}]{rest}"


def item_rows(record: StepRecord, width: int) -> list[Text]:
    """Each sequence of the step with what it computed and the token that came of it, two to a line."""
    tokens: dict[int, str] = {}
    for token in record.tokens:
        tokens[token.seq_id] = tokens.get(token.seq_id, "") + token.text
    half = max(30, (width - 2) // 2)
    cells = []
    for item in record.items:
        span = f"[{item.start}:{item.start + item.num_tokens}]"
        cell = Text(no_wrap=True)
        cell.append(f" {item.seq_id:>4} ", sequence_style(item.seq_id)).append(f"{item.phase:<7} {span:<11}", QUIET)
        cell.append(quoted(tokens[item.seq_id]) if item.seq_id in tokens else f"{item.remaining} to come")
        cells.append(_cut(cell, half))
    rows = []
    for left, right in zip(cells[::2], [*cells[1::2], Text("")], strict=False):
        rows.append(Text.assemble(left, " " * (half + 1 - left.cell_len), right))
        rows[-1].rstrip()
    return rows


def reason_lines(record: StepRecord, width: int) -> list[Text]:
    """A line for everything that was decided in this step, with its reason."""
    groups: tuple[tuple[Sequence, str, str, str, Callable], ...] = (
        (record.admitted, "+", "admitted", GOOD, admission_text),
        (record.preempted, "−", "preempted", TROUBLE, preemption_text),
        (record.waiting, "·", "waits", QUIET, lambda wait: wait_text(wait.reason)),
        (record.finished, "✓", "finished", ACCENT, finish_text),
    )
    lines = [
        _reason(sign, name, one.seq_id, text(one), style) for ones, sign, name, style, text in groups for one in ones
    ]
    lines += [_reason("✗", "refused", one.request_id, one_line(one.message), TROUBLE) for one in record.rejected]
    return [_cut(line, width) for line in lines]


def shortened(lines: list[Text], most: int) -> list[Text]:
    """At most `most` lines; the last then says how many are left out."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], Text(f"… {len(lines) - most + 1} more", QUIET)]


def admission_text(admission: AdmitRecord) -> str:
    """`again, 2 blocks; 32 tokens from the cache`."""
    blocks = plural(admission.num_blocks, "block")
    if admission.how == "swap":
        return f"again, {blocks}; {plural(admission.num_cached, 'token')} back from the host's pool"
    again = "again, its tokens to be computed, " if admission.how == "recompute" else ""
    cached = f"; {plural(admission.num_cached, 'token')} from the cache" if admission.num_cached else ""
    return f"{again}{blocks}{cached}"


def preemption_text(preemption: PreemptRecord) -> str:
    """`victim of 12: needed 1, free 0; lifo; 37 tokens to recompute`."""
    itself = preemption.victim_of == preemption.seq_id
    who = "gives way itself" if itself else f"victim of {preemption.victim_of}"
    if preemption.mode == "swap":
        cost = f"{plural(preemption.blocks_freed, 'block')} to the host's pool"
    else:
        cost = f"{plural(preemption.tokens_lost, 'token')} to recompute"
    full = preemption.fallback
    fallback = f" (no swap: needs {full.needed} host blocks, {full.free} free)" if full else ""
    return f"{who}: needed {preemption.needed}, free {preemption.free}; {preemption.policy}; {cost}{fallback}"


def wait_text(reason: WaitReason) -> str:
    match reason:
        case NoBlocks(needed, free):
            return f"no_blocks: needs {needed}, free {free}"
        case MaxNumSeqs(limit):
            return f"max_num_seqs: {limit} run"
        case NoBudget(limit):
            return f"budget: the step's {limit} tokens are given"
        case Deferred(leader, num_tokens):
            return f"deferred: leader {leader} computes the same {plural(num_tokens, 'token')}"


def finish_text(finish: FinishRecord) -> str:
    if finish.stop is None:
        return finish.reason
    what = quoted(finish.stop) if isinstance(finish.stop, str) else f"token {finish.stop}"
    return f"{finish.reason} at {what}"


def chart_line(history: History, index: int, width: int) -> Text:
    """Throughput, pool, queue and fragmentation up to this step, each as a strip of its own scale."""
    series = chart_series(history, index)
    strip = max(4, (width - sum(len(name) + 4 for name, _, _ in series)) // len(series))
    line = Text(no_wrap=True)
    for name, values, scale in series:
        line.append("   " if line else "").append(f"{name} ", QUIET)
        line.append(sparkline(values, scale, strip), ACCENT)
    return line


def chart_series(history: History, index: int, steps: int = CHART_STEPS) -> list[tuple[str, list[float], float]]:
    """(name, values, the value at the upper edge) of each chart over the last `steps` steps up to this one."""
    first = max(0, index + 1 - steps)
    records, moments = history.records[first : index + 1], history.moments[first : index + 1]
    speeds = [moment.tokens_per_second for moment in moments]
    waiting = [float(record.queues.waiting + record.queues.swapped) for record in records]
    return [
        ("tok/s", speeds, percentile(speeds, 0.95) or 0.0),  # a single fast step does not flatten the others
        ("pool", [record.cache.utilization for record in records], 1.0),
        ("queue", waiting, max(waiting)),
        ("frag", [record.cache.internal_fragmentation for record in records], 1.0),
    ]


def step_line(record: StepRecord) -> str:
    """A step on one line, for a pipe: what it did, where everybody is, and each decision with its reason."""
    decodes = sum(item.phase == "decode" for item in record.items)
    work = [f"decode {decodes}"] if decodes else []
    work += [prefill_text(item) for item in record.items if item.phase == "prefill"]
    queues, cache = record.queues, record.cache
    where = f"waiting {queues.waiting}  running {queues.running}  swapped {queues.swapped}  finished {queues.finished}"
    total = record.schedule_ms + record.forward_ms + record.sample_ms
    parts = [
        f"step {record.step:>4}  {record.execution_class:<7} {ms(total):>6} ms",
        where,
        f"pool {cache.used_blocks}/{cache.num_blocks}",
        ", ".join(work) or "nothing is computed",
        *launch_texts(record),
        *(f"+{one.seq_id} {admission_text(one)}" for one in record.admitted),
        *(f"-{one.seq_id} {preemption_text(one)}" for one in record.preempted),
        *(f"{one.seq_id} waits {wait_text(one.reason)}" for one in record.waiting),
        *(f"{one.seq_id} finished {finish_text(one)}" for one in record.finished),
        *(f"{one_line(one.request_id)} refused: {one_line(one.message)}" for one in record.rejected),
    ]
    return "  ".join(parts)


def print_step_line(console: Console, record: StepRecord) -> None:
    console.print(Text(step_line(record)), soft_wrap=True)


def _reason(sign: str, name: str, who: int | str, text: str, style: str) -> Text:
    owner = sequence_style(who) if isinstance(who, int) else ""
    return Text.assemble((f"{sign} {name:<10} ", style), (f"{who!s:>4}", owner), f"  {text}", no_wrap=True)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line
