"""Who runs, who waits, and why? One step of the engine as a picture: the queues, the running batch, the pool, what the
step computes, a line for each decision with its reason, and how the run has gone so far.

Drawn from records alone, so the same picture shows a step that has just ended and one of a recorded run.
"""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from forge.reasons import NoBlocks, WaitReason
from forge.trace.explain import (
    class_name,
    explain,
    explain_admission,
    explain_cycle,
    explain_finish,
    explain_preemption,
    explain_undrafted,
)
from forge.trace.records import FinishRecord, ItemRecord, StepRecord
from forge.trace.totals import percentile
from forge.views.charts import bar, sparkline
from forge.views.formatting import count, ms, percent, plural
from forge.views.history import History, Moment
from forge.views.palette import ACCENT, GOOD, QUIET, TITLE, TROUBLE, sequence_style
from forge.views.terminal import cut, heading
from forge.views.text import one_line, quoted

_REASON_INDENT = 19
"""Columns before the words of a reason: its sign and name, and the sequence."""
QUESTION = "Who runs, who waits, and why?"
CHART_STEPS = 400
"""Steps that the small charts look back on, at most."""
_BAR = 22
_MOST_REASONS = 8
_MOST_PEERS = 6


def scheduler_lines(history: History, index: int, width: int, height: int) -> list[Text]:
    """Return the picture after step `index` of a history, in at most `height` lines of at most `width` columns."""
    record, moment = history.records[index], history.moments[index]
    head = [*title_lines(record, width), Text(""), *queue_lines(history, record, moment, width), Text("")]
    charts = [Text(""), chart_line(history, index, width)]
    reasons = reason_lines(record, width)
    room = max(1, height - len(head) - len(charts) - 1)
    items = item_rows(record, width)
    if len(items) + min(len(reasons), _MOST_REASONS) > room:
        items = []
    reasons = shortened(reasons, room - len(items))
    lines = [*head, items_line(record), *items, *reasons, *charts]
    return [cut(line, width) for line in lines[:height]]


def title_lines(record: StepRecord, width: int) -> list[Text]:
    """Return the question, and on the right what kind of step this was and how long it took."""
    kind = class_name(record.execution_class).capitalize()
    total = record.schedule_ms + record.forward_ms + record.sample_ms
    parts = f"schedule {ms(record.schedule_ms)}, forward {ms(record.forward_ms)}"
    short = f"step {count(record.step)} · {kind} · {ms(total)} ms"
    line = heading(QUESTION, TITLE, (f"{short} ({parts})", short), width)
    return [line] if short in line.plain else [line, Text(short, QUIET)]


def queue_lines(history: History, record: StepRecord, moment: Moment, width: int) -> list[Text]:
    """Return how many wait and run, who, and how full the pool is."""
    queues, cache = record.queues, record.cache
    limit = history.max_num_seqs or max(len(moment.running), 1)
    running = Text("running  ", QUIET)
    running.append(f"{len(moment.running)}/{limit} ")
    for seq_id in moment.running[:limit]:
        running.append("█", sequence_style(seq_id))
    running.append("░" * max(0, limit - len(moment.running)), QUIET)
    first = Text.assemble(("waiting  ", QUIET), f"{queues.waiting:<4} ", running)
    rest = [("swapped", queues.swapped), ("finished", queues.finished), ("preempted", moment.preemptions)]
    for name, value in rest:
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


def items_line(record: StepRecord) -> Text:
    """Format a plan: `this step: decode 11 seqs · prefill 31 [0:64] of 200`, and on a GPU how and when it was
    launched."""
    line = Text.assemble(("this step: ", TITLE), " · ".join(work_texts(record)))
    return line.append("".join([f" · {text}" for text in launch_texts(record)]), QUIET)


def work_texts(record: StepRecord) -> list[str]:
    """Return what the step computes: `decode 11 seqs + 9 draft tokens`, each prefill, `prefill-only 8 requests, 367
    rows`."""
    decodes = sum(item.phase == "decode" for item in record.items)
    num_draft_tokens = sum(len(cycle.proposed) for cycle in record.cycles)
    verified = f" + {plural(num_draft_tokens, 'draft token')}" if num_draft_tokens else ""
    texts = [f"decode {plural(decodes, 'seq')}{verified}"] if decodes else []
    texts += [prefill_text(item) for item in record.items if item.phase == "prefill"]
    alone = [item.num_tokens for item in record.items if item.phase == "prefill_only"]
    if alone:
        texts.append(f"{class_name('prefill_only')} {plural(len(alone), 'request')}, {plural(sum(alone), 'row')}")
    return texts or ["nothing is computed"]


def launch_texts(record: StepRecord) -> list[str]:
    """Return how the step was launched on a device that works asynchronously, such as `graph (captured for 4 rows)`;
    nothing on a CPU."""
    execution = record.execution
    texts = [f"{execution.mode} ({execution.reason})"] if execution is not None else []
    texts += ["planned ahead"] if record.planned_ahead else []
    return texts + ([f"{plural(record.discarded, 'row')} wasted"] if record.discarded else [])


def prefill_text(item: ItemRecord) -> str:
    """Format a chunk of a prompt, or of what a preemption dropped: `prefill 31 [64:128] of 200`."""
    end = item.start + item.num_tokens
    rest = f" of {end + item.remaining}" if item.remaining else ""
    return f"prefill {item.seq_id} [{item.start}:{end}]{rest}"


def item_rows(record: StepRecord, width: int) -> list[Text]:
    """Return each sequence of the step with what it computed and the token that came of it, two to a line."""
    tokens: dict[int, str] = {}
    for token in record.tokens:
        tokens[token.seq_id] = tokens.get(token.seq_id, "") + token.text
    half = max(30, (width - 2) // 2)
    cells = []
    for item in record.items:
        span = f"[{item.start}:{item.start + item.num_tokens}]"
        cell = Text(no_wrap=True)
        cell.append(f" {item.seq_id:>4} ", sequence_style(item.seq_id))
        cell.append(f"{class_name(item.phase):<7} {span:<11}", QUIET)
        if item.seq_id in tokens:
            cell.append(quoted(tokens[item.seq_id]))
        elif item.remaining:
            cell.append(f"{item.remaining} to come")
        cells.append(cut(cell, half))
    rows = []
    for left, right in zip(cells[::2], [*cells[1::2], Text("")], strict=False):
        rows.append(Text.assemble(left, " " * (half + 1 - left.cell_len), right))
        rows[-1].rstrip()
    return rows


def reason_lines(record: StepRecord, width: int) -> list[Text]:
    """Return a line for every decision of this step, with its reason; first what waits, which a long list would
    hide."""
    lines = [_reason("·", "waits", who, text, QUIET) for who, text in wait_texts(record)]
    lines += [
        _reason("−", "preempted", victim.seq_id, explain_preemption(victim), TROUBLE) for victim in record.preempted
    ]
    lines += [
        _reason("+", "admitted", admission.seq_id, explain_admission(admission), GOOD) for admission in record.admitted
    ]
    lines += [_reason("?", "drafted", cycle.seq_id, one_line(explain_cycle(cycle)), QUIET) for cycle in record.cycles]
    lines += [_reason("·", "plain", who, text, QUIET) for who, text in undrafted_texts(record)]
    lines += [_reason("✓", "finished", finish.seq_id, finish_text(finish), ACCENT) for finish in record.finished]
    lines += [
        _reason("✗", "refused", one_line(refusal.request_id), one_line(refusal.message), TROUBLE)
        for refusal in record.rejected
    ]
    return [part for line in lines for part in _wrapped(line, width)]


def wait_texts(record: StepRecord) -> list[tuple[int | str, str]]:
    """Return which sequences wait, and why; those with the same reason together, as the peers of one prefix owner
    are."""
    return _together((wait.seq_id, explain(wait.reason) + _judged(wait.reason, record)) for wait in record.waiting)


def undrafted_texts(record: StepRecord) -> list[tuple[int | str, str]]:
    """Return which sequences were decoded without draft tokens, and why; those with the same reason together."""
    return _together((undrafted.seq_id, explain_undrafted(undrafted)) for undrafted in record.undrafted)


def _together(texts: Iterable[tuple[int, str]]) -> list[tuple[int | str, str]]:
    """Join the sequences that have the same text."""
    by_text: dict[str, list[int]] = {}
    for seq_id, text in texts:
        by_text.setdefault(text, []).append(seq_id)
    return [(seq_ids[0] if len(seq_ids) == 1 else _several(seq_ids), text) for text, seq_ids in by_text.items()]


def _judged(reason: WaitReason, record: StepRecord) -> str:
    """Say when blocks were counted: before a step preempts. A step that preempts admits no generation."""
    return ", counted before the preemption" if record.preempted and isinstance(reason, NoBlocks) else ""


def _several(seq_ids: Sequence[int]) -> str:
    """Format sequences: `33 34 35`, `33 34 35 … 63 (31 seqs)`."""
    if len(seq_ids) <= _MOST_PEERS:
        return " ".join(map(str, seq_ids))
    shown = " ".join(map(str, seq_ids[: _MOST_PEERS - 2]))
    return f"{shown} … {seq_ids[-1]} ({plural(len(seq_ids), 'seq')})"


def finish_text(finish: FinishRecord) -> str:
    """Return how a sequence ended, fit for a terminal."""
    return one_line(explain_finish(finish))


def shortened(lines: list[Text], most: int) -> list[Text]:
    """Return at most `most` lines; if some are left out, the last says how many."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], Text(f"… {len(lines) - most + 1} more", QUIET)]


def chart_line(history: History, index: int, width: int) -> Text:
    """Draw throughput, pool, queue and fragmentation up to this step, each as a strip of its own scale."""
    series = chart_series(history, index)
    strip = max(4, (width - sum(len(name) + 4 for name, _, _ in series)) // len(series))
    line = Text(no_wrap=True)
    for name, values, scale in series:
        line.append("   " if line else "").append(f"{name} ", QUIET)
        line.append(sparkline(values, scale, strip), ACCENT)
    return line


def chart_series(history: History, index: int, steps: int = CHART_STEPS) -> list[tuple[str, list[float], float]]:
    """Return (name, values, the value at the upper edge) of each chart over the last `steps` steps up to this one."""
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
    """Return a step on one line, for a pipe: what it computes, the queues, and each decision with its reason."""
    queues, cache = record.queues, record.cache
    where = f"waiting {queues.waiting}  running {queues.running}  swapped {queues.swapped}  finished {queues.finished}"
    total = record.schedule_ms + record.forward_ms + record.sample_ms
    parts = [
        f"step {record.step:>4}  {class_name(record.execution_class):<7} {ms(total):>6} ms",
        where,
        f"pool {cache.used_blocks}/{cache.num_blocks}",
        f"fragmentation {percent(cache.internal_fragmentation)}  shared {percent(cache.sharing)}",
        ", ".join(work_texts(record)),
        *launch_texts(record),
        *(f"+{admission.seq_id} {explain_admission(admission)}" for admission in record.admitted),
        *(f"-{victim.seq_id} {explain_preemption(victim)}" for victim in record.preempted),
        *(f"{who} {'waits' if isinstance(who, int) else 'wait'} {text}" for who, text in wait_texts(record)),
        *(f"{cycle.seq_id} drafted: {one_line(explain_cycle(cycle))}" for cycle in record.cycles),
        *(f"{who} plain: {text}" for who, text in undrafted_texts(record)),
        *(f"{finish.seq_id} finished {finish_text(finish)}" for finish in record.finished),
        *(f"{one_line(refusal.request_id)} refused: {one_line(refusal.message)}" for refusal in record.rejected),
    ]
    return "  ".join(parts)


def print_step_line(console: Console, record: StepRecord) -> None:
    console.print(Text(step_line(record)), soft_wrap=True)


def _reason(sign: str, name: str, who: int | str, text: str, style: str) -> Text:
    owner = sequence_style(who) if isinstance(who, int) else ""
    return Text.assemble((f"{sign} {name:<10} ", style), (f"{who!s:>4}", owner), f"  {text}", no_wrap=True)


def _wrapped(line: Text, width: int) -> list[Text]:
    """Return a line of a reason, broken at spaces; what does not fit stands below the reason's beginning."""
    parts: list[Text] = []
    while line.cell_len > width:
        at = line.plain.rfind(" ", _REASON_INDENT + 1, width)
        if at < 0:
            break
        parts.append(line[:at])
        line = Text.assemble(" " * _REASON_INDENT, line[at + 1 :], no_wrap=True)
    return [*parts, cut(line, width)]
