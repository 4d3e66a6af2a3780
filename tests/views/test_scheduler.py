"""The picture of a step: who runs, who waits, and why; in 80 columns, without colour, and on one line in a pipe."""

import io
from dataclasses import replace

import pytest
from rich.text import Text

from forge.reasons import Deferred, MaxNumSeqs, NoBlocks, NoBudget, PoolExhausted
from forge.trace.explain import explain
from forge.trace.records import (
    Execution,
    FinishRecord,
    ItemRecord,
    RejectRecord,
    SpecCycle,
    StepRecord,
    TokenVerdict,
    WaitRecord,
)
from forge.views.history import History
from forge.views.picture import save_serving
from forge.views.run_summary import serving_object, serving_screen
from forge.views.scheduler import (
    prefill_text,
    reason_lines,
    scheduler_lines,
    step_line,
)
from forge.views.screen import draw
from forge.views.terminal import open_console
from forge.views.traffic import ServingView
from tests.trace.runs import crowded
from tests.views.records import LABEL, piped, step, terminal, written

RUN = crowded()


def history(steps: tuple[StepRecord, ...] = RUN.steps) -> History:
    found = History(LABEL, 3)
    for record in steps:
        found.feed(record)
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
    assert f"victim of seq {record.victim_of}: needed {record.needed}, free {record.free}; lifo" in line
    assert any(line.startswith("pool     ") and "8" in line for line in lines)
    assert lines[-1].startswith("tok/s ")


def test_a_wait_that_was_counted_before_a_preemption_says_so():
    index = index_of("preempted")
    record = replace(RUN.steps[index], waiting=(WaitRecord(9, NoBlocks(8, 2)), WaitRecord(10, MaxNumSeqs(3))))
    lines = [line.plain for line in reason_lines(record, 200)]
    assert lines[0].endswith("no_blocks: needs 8, free 2, counted before the preemption")
    assert lines[1].endswith("max_num_seqs: 3 run")
    calm = replace(record, preempted=())
    assert not any("before the preemption" in line.plain for line in reason_lines(calm, 200))


def test_what_waits_comes_first_and_uses_the_rows_that_are_there():
    record = RUN.steps[index_of("admitted")]
    waits = tuple(WaitRecord(seq_id, NoBlocks(seq_id, 2)) for seq_id in range(20, 32))
    lines = [line.plain for line in scheduler_lines(history((replace(record, waiting=waits),)), 0, 80, 40)]
    decisions = [line for line in lines if line.startswith(("·", "+"))]
    assert len([line for line in decisions if line.startswith("· waits")]) == 12 and decisions[-1].startswith("+")
    assert not any("more" in line for line in decisions)
    low = [line.plain for line in scheduler_lines(history((replace(record, waiting=waits),)), 0, 80, 16)]
    assert len(low) == 16 and any("more" in line for line in low) and any(line.startswith("· waits") for line in low)


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


def test_a_chunk_of_a_prefill():
    assert prefill_text(ItemRecord(31, "prefill", 64, 64, 72)) == "prefill 31 [64:128] of 200"


def shown(record: StepRecord) -> tuple[str, str]:
    """A record in a pipe, and as a picture."""
    own = history((record,))
    return step_line(record), "\n".join(line.plain for line in scheduler_lines(own, 0, 120, 30))


@pytest.mark.parametrize("reason", [NoBlocks(8, 2), MaxNumSeqs(16), NoBudget(512), Deferred(4, 48)], ids=repr)
def test_a_waiting_sequence_is_shown_with_the_reason(reason):
    for text in shown(replace(RUN.steps[3], waiting=(WaitRecord(9, reason),))):
        assert explain(reason) in text and "None" not in text


def test_deferred_peers_are_shown_together_with_the_owner_of_their_prefix():
    waits = tuple(WaitRecord(seq_id, Deferred(4, 48)) for seq_id in range(5, 17))
    for text in shown(replace(RUN.steps[3], waiting=(*waits, WaitRecord(40, Deferred(4, 16))))):
        assert "5 6 7 8 … 16 (12 seqs)" in text and text.count("computes the same 48-token prefix") == 1
        assert "seq 4 computes the same 16-token prefix" in text


def test_a_step_of_prefill_only_requests_says_what_it_computed():
    items = tuple(ItemRecord(seq_id, "prefill_only", 48, 100 + seq_id) for seq_id in range(3))
    record = replace(RUN.steps[3], items=items, tokens=(), execution_class="prefill_only")
    line, picture = shown(record)
    assert "prefill-only 3 requests, 303 rows" in line and "nothing is computed" not in line
    assert "this step: prefill-only 3 requests, 303 rows" in picture and "Prefill-only" in picture
    assert "prefill_only" not in (line + picture).lower()


def test_guesses_are_shown_with_their_acceptance_and_the_rollback_in_both_caches():
    cycle = SpecCycle(
        2, "small", 10, (5, 6, 7, 8), (TokenVerdict(5, True, 5), TokenVerdict(6, False, 9)), (5, 9), 0.5, 1.0
    )
    record = replace(RUN.steps[3], items=(ItemRecord(2, "decode", 9, 1, 0, 4),), cycles=(cycle,))
    for text in shown(record):
        assert "decode 1 seq + 4 draft tokens" in text and "small 1 of 4; KV 9 > 14 > 11; 0.50 + 1.0 ms" in text
    console, own = piped(), history((*RUN.steps[:3], record))
    draw(console, serving_screen(own, own.requests()))
    assert "small drafted 1 of 4 accepted (25 %; by position 100 0 0 0), 0.50 ms" in written(console)
    found = serving_object(LABEL, own.records, own.requests())
    assert found["speculation"][0]["accepted"] == 1
    assert found["steps"][3]["cycles"][0]["target_positions"] == [
        9,
        14,
        11,
    ]


def test_a_request_that_the_pool_ends_says_so():
    for text in shown(replace(RUN.steps[3], finished=(FinishRecord(2, "length", why=PoolExhausted(32)),))):
        assert "length: the pool holds 32 tokens" in text


def test_in_a_pipe_a_step_is_one_line_without_escapes():
    console = piped()
    with ServingView(console, History(LABEL)) as view:
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
    assert "planned ahead  1 row wasted" in step_line(ahead)
    assert "planned ahead" not in step_line(RUN.steps[3])


def test_a_refused_request_is_shown_with_the_numbers():
    assert any(line.startswith("✗ refused") and "99 tokens" in line for line in picture(index_of("rejected"), 120, 40))


def test_a_refused_requests_name_cannot_write_escapes():
    refusal = RejectRecord("\x1b[2J", "it is\ntoo long")
    for text in shown(replace(RUN.steps[3], rejected=(refusal,))):
        assert "\x1b" not in text and "␛[2J" in text and "it is too long" in text


def test_a_live_view_draws_and_leaves_nothing():
    console = terminal()
    own = History(LABEL, 3)
    with ServingView(console, own) as view:
        for step in RUN.steps[:3]:
            view.step(step)
    assert "Who runs" in written(console) and own.records == list(RUN.steps[:3])


def test_the_closing_table_says_what_the_run_came_to():
    console = piped()
    own = history()
    draw(console, serving_screen(own, own.requests()))
    text = written(console)
    for part in ("steps", "throughput", "time to first token", "p99", "preemptions", "fragmentation", "longest waits"):
        assert part in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_no_step_is_no_trouble():
    console = piped()
    draw(console, serving_screen(History(LABEL), ()))
    assert "No step ran" in written(console)
    assert serving_object(LABEL, (), ())["totals"] is None


def test_facts_hold_every_sequence_with_its_reasons():
    own = history()
    facts = serving_object(LABEL, own.records, own.requests())
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


def test_fragmentation_and_sharing_are_in_step_lines_the_closing_table_and_json():
    cache = replace(RUN.steps[3].cache, used_blocks=6, block_size=4, tokens_held=18, blocks_saved=2)
    own = history((*RUN.steps[:3], replace(RUN.steps[3], cache=cache)))
    assert "fragmentation 25 %  shared 25 %" in step_line(own.records[3])
    console = piped()
    draw(console, serving_screen(own, own.requests()))
    assert "shared 6 % on average, 25 % at most" in written(console)
    found = serving_object(LABEL, own.records, own.requests())
    assert found["steps"][3]["sharing"] == 0.25 and found["totals"]["sharing_max"] == 0.25


@pytest.mark.parametrize("width", [40, 80])
def test_a_cycle_is_shown_whole_on_a_narrow_screen(width):
    verdict = TokenVerdict(5, False, 6, 0.1)
    cycle = SpecCycle(7, "tales-draft-q8_0", 9, (5, 6, 7, 8), (verdict,), (6,), 65.5, 22.2, draft_cached=(0, 15))
    record = replace(step(2, 1, 0.3), cycles=(cycle,))
    lines = reason_lines(record, width)
    assert max(line.cell_len for line in lines) <= width
    told = " ".join(" ".join(line.plain for line in lines).split())
    assert told == "? drafted 7 tales-draft-q8_0 0 of 4; KV 8 > 13 > 9, draft's 0 > 15 > 9; 65.5 + 22.2 ms"
