"""One line per engine step: the plainest picture of real traffic."""

from rich.console import Console
from rich.text import Text

from forge.trace.records import StepRecord
from forge.views.figures import ms


def step_text(record: StepRecord) -> str:
    """What a step did, and where everybody is after it."""
    decodes = sum(item.phase == "decode" for item in record.items)
    prefills = [item for item in record.items if item.phase == "prefill"]
    work = [f"decode {decodes}"] if decodes else []
    work += [f"prefill {item.seq_id} ({item.num_tokens} tok)" for item in prefills]
    queues, cache = record.queues, record.cache
    parts = [
        f"step {record.step:>5}  {ms((record.ended - record.started) * 1e3):>6} ms",
        f"waiting {queues.waiting}  running {queues.running}  swapped {queues.swapped}",
        f"blocks {cache.used_blocks}/{cache.num_blocks}",
        ", ".join(work) or "nothing is computed",
        *(f"-{one.seq_id} preempted for {one.victim_of}" for one in record.preempted),
        *(f"{one.seq_id} {one.reason}" for one in record.finished),
    ]
    return "  ".join(parts)


def print_step(console: Console, record: StepRecord) -> None:
    console.print(Text(step_text(record)), soft_wrap=True)
