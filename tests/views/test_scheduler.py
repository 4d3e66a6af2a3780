"""The picture of a step: who runs, who waits, and why; in 80 columns, without colour, and on one line in a pipe."""

import io
from dataclasses import replace

import pytest
from rich.text import Text

from forge.trace.records import (
    AdmitRecord,
    Deferred,
    Execution,
    HostPoolFull,
    ItemRecord,
    MaxNumSeqs,
    NoBlocks,
    NoBudget,
    PreemptRecord,
    StepRecord,
)
from forge.views.history import History
from forge.views.picture import save_serving
from forge.views.scheduler import (
    admission_text,
    preemption_text,
    prefill_text,
    scheduler_lines,
    step_line,
    wait_text,
)
from forge.views.serving import print_serving, serving_object
from forge.views.serving_live import serving_view
from forge.views.terminal import open_console
from tests.trace.runs import crowded
from tests.views.records import LABEL, piped, terminal, written

RUN = crowded()


def history(steps: tuple[StepRecord, ...] = RUN.steps) -> History:
    found = History(LABEL, 3)
    for step in steps:
        found.feed(step)
    found.end(RUN.ends)
    return found


def picture(index: int, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in scheduler_lines(history(), index, width, height)]


def index_of(event: str) -> int:
    return next(index for index, step in enumerate(RUN.steps) if getattr(step, event))


def test_a_step_with_a_preemption_shows_victim_requester_and_numbers():
    index = index_of("preempted")
    record = RUN.steps[index].preempted[0]
    lines = picture(index)
    assert lines[0].startswith("Who runs, who waits, and why?") and f"step {index + 1} · " in lines[0]
    (line,) = [line for line in lines if line.startswith("− preempted") and f" {record.seq_id} " in line][:1]
    assert f"victim of {record.victim_of}: needed {record.needed}, free {record.free}; lifo" in line
    assert any(line.startswith("pool     ") and "8" in line for line in lines)
    assert lines[-1].startswith("tok/s ")


@pytest.mark.parametrize("width", [30, 60, 80, 120])
@pytest.mark.parametrize("height", [8, 24, 60])
def test_every_step_fits_its_terminal(width, height):
    own = history()
    for index in range(len(RUN.steps)):
        lines = scheduler_lines(own, index, width, height)
        assert len(lines) <= height and all(line.cell_len <= width for line in lines)


def test_a_picture_of_the_past_does_not_know_the_future():
    whole, part = history(), history(RUN.steps[:5])
    assert [line.plain for line in scheduler_lines(whole, 4, 80, 24)] == [
        line.plain for line in scheduler_lines(part, 4, 80, 24)
    ]


def test_reasons_in_words():
    assert wait_text(NoBlocks(8, 2)) == "no_blocks: needs 8, free 2"
    assert wait_text(MaxNumSeqs(16)) == "max_num_seqs: 16 run"
    assert wait_text(NoBudget(512)) == "budget: the step's 512 tokens are given"
    assert wait_text(Deferred(4, 48)) == "deferred: leader 4 computes the same 48 tokens"
    assert admission_text(AdmitRecord(1, "new", 32, 6)) == "6 blocks; 32 tokens from the cache"
    assert admission_text(AdmitRecord(1, "swap", 9, 1)) == "again, 1 block; 9 tokens back from the host's pool"
    lost = PreemptRecord(1, 12, 1, 0, "lifo", "recompute", 37, 3, HostPoolFull(3, 1))
    assert preemption_text(lost) == (
        "victim of 12: needed 1, free 0; lifo; 37 tokens to recompute (no swap: needs 3 host blocks, 1 free)"
    )
    assert prefill_text(ItemRecord(31, "prefill", 64, 64, 72)) == "prefill 31 [64:128] of 200"


def test_in_a_pipe_a_step_is_one_line_without_escapes():
    console = piped()
    with serving_view(console, History(LABEL)) as view:
        for step in RUN.steps:
            view.step(step)
    lines = written(console).splitlines()
    assert len(lines) == len(RUN.steps) and "\x1b" not in written(console)
    assert all(line.startswith("step ") for line in lines)
    first = step_line(RUN.steps[index_of("preempted")])
    assert "victim of" in first and "free" in first


def test_a_step_of_a_gpu_says_how_it_was_launched_and_why():
    launched = replace(RUN.steps[3], execution=Execution("eager", "the first step of this shape", 4))
    assert "eager (the first step of this shape)" in step_line(launched)
    pictured = "\n".join(line.plain for line in scheduler_lines(history((*RUN.steps[:3], launched)), 3, 120, 30))
    assert "eager (the first step of this shape)" in pictured
    assert "eager" not in step_line(RUN.steps[3])


def test_a_step_that_was_planned_ahead_says_so_and_what_it_cost():
    ahead = replace(RUN.steps[3], planned_ahead=True, discarded=1)
    assert "planned ahead  1 row in vain" in step_line(ahead)
    assert "planned ahead" not in step_line(RUN.steps[3])


def test_a_refused_request_is_shown_with_the_numbers():
    assert any(line.startswith("✗ refused") and "99 tokens" in line for line in picture(index_of("rejected"), 120, 40))


def test_a_live_view_draws_and_leaves_nothing():
    console = terminal()
    own = History(LABEL, 3)
    with serving_view(console, own) as view:
        for step in RUN.steps[:3]:
            own.feed(step)
            view.step(step)
    assert "Who runs" in written(console)


def test_the_closing_table_says_what_the_run_came_to():
    console = piped()
    own = history()
    print_serving(console, own, own.lives())
    text = written(console)
    for part in ("steps", "throughput", "time to first token", "p99", "preemptions", "fragmentation", "longest waits"):
        assert part in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_no_step_is_no_trouble():
    console = piped()
    print_serving(console, History(LABEL), ())
    assert "No step ran" in written(console)
    assert serving_object(LABEL, (), ())["totals"] is None


def test_facts_hold_every_sequence_with_its_reasons():
    own = history()
    facts = serving_object(LABEL, own.records, own.lives())
    assert len(facts["steps"]) == len(RUN.steps) and len(facts["sequences"]) == 7
    assert any("preempted at step" in line for one in facts["sequences"] for line in one["why"])
    assert facts["totals"]["preemptions"] > 0 and facts["totals"]["end_to_end_ms"]["count"] == 6


def test_the_picture_is_saved_as_svg(tmp_path):
    save_serving(tmp_path / "run.svg", history())
    text = (tmp_path / "run.svg").read_text(encoding="utf-8")
    assert text.startswith("<svg") and "preempted" in text


def test_text_of_a_model_cannot_paint_on_the_screen():
    step = RUN.steps[-1]
    token = step.tokens[0]._replace(text="\x1b[2Jgone")
    own = history((*RUN.steps[:-1], replace(step, tokens=(token,))))
    console = open_console(io.StringIO(), width=80)
    for line in scheduler_lines(own, len(own) - 1, 80, 24):
        console.print(Text(line.plain))
    assert "\x1b" not in console.file.getvalue()
