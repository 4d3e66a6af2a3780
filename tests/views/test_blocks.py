"""What happened to the blocks in words, and the screens of `--show blocks`: real caches, no model."""

import re
from dataclasses import replace

import pytest

from forge.cache.paged import PagedKvCache
from forge.cache.prefix import PrefixKvCache
from forge.reasons import Deferred
from forge.trace.records import (
    AdmitRecord,
    CacheRecord,
    FinishRecord,
    ItemRecord,
    PreemptRecord,
    StepRecord,
    TokenRecord,
    WaitRecord,
)
from forge.views.block_map import SequenceNames
from forge.views.blocks import (
    BlockGeneration,
    BlockScreen,
    BlockStory,
    BlocksView,
    blocks_object,
)
from tests.views.records import flat, piped, terminal, written


class Run:
    """A cache, advanced by hand, that reports itself as an engine does."""

    def __init__(self, cache):
        self.cache, self.step = cache, 0

    def record(self, writes=(), admitted=(), finished=(), preempted=()) -> StepRecord:
        """Write so many tokens to each (sequence, number), each token its own position."""
        items, blocks = [], set()
        for seq_id, number in writes:
            start = self.cache.computed_length(seq_id)
            self.cache.reserve(seq_id, start + number - self.cache.reserved_length(seq_id))
            self.cache.commit(seq_id, list(range(start, start + number)))
            items.append(ItemRecord(seq_id, "prefill" if number > 1 else "decode", start, number))
            size = self.cache.block_size
            blocks |= set(self.cache.block_table(seq_id)[start // size : -(-(start + number) // size)])
        self.step += 1
        stats, found = self.cache.stats(), self.cache.block_map()
        cache = CacheRecord(
            self.cache.kind,
            self.cache.block_size,
            stats.num_blocks,
            stats.used_blocks,
            stats.tokens_held,
            stats.tokens_held,
            stats.used_blocks * self.cache.block_size,
            stats.cached_blocks,
        )
        return StepRecord(
            step=100 + self.step,
            items=tuple(items),
            tokens=tuple(TokenRecord(item.seq_id, item.start + 1, 5, " word", 0.5) for item in items),
            finished=tuple(FinishRecord(seq_id, "length") for seq_id in finished),
            cache=cache,
            schedule_ms=0.0,
            forward_ms=1.0,
            sample_ms=0.0,
            started=float(self.step),
            ended=self.step + 0.001,
            admitted=tuple(AdmitRecord(seq_id, "new", 0, 1) for seq_id in admitted),
            preempted=tuple(preempted),
            events=self.cache.take_events(),
            blocks=type(found)(
                found.block_size, found.tables, found.reference_counts, found.cached, tuple(sorted(blocks))
            ),
        )


def paged(*seq_ids, num_blocks=64):
    run = Run(PagedKvCache(num_blocks, 16))
    for seq_id in seq_ids:
        run.cache.add(seq_id, ())
    return run


def told(story, record):
    return [sentence.text for sentence in story.tell(record)]


def test_a_beginning_a_growth_and_an_end_are_told():
    run, story = paged(40), BlockStory(SequenceNames())
    assert told(story, run.record([(40, 16)], admitted=[40])) == [
        "seq 0 began: block 0",
        "seq 0 wrote tokens 1 to 16 into block 0",
    ]
    assert told(story, run.record([(40, 1)])) == ["seq 0 took block 1", "seq 0 wrote token 17 into block 1, slot 0"]
    assert told(story, run.record([(40, 1)], finished=[40])) == [
        "seq 0 wrote token 18 into block 1, slot 1",
        "seq 0 ended (length) and freed 2 blocks",
    ]


def test_a_copy_of_a_cached_block_is_told():
    cache = PrefixKvCache(4, 4)
    run, story, prompt = Run(cache), BlockStory(SequenceNames()), list(range(8))
    cache.add(5, prompt)
    story.tell(run.record([(5, 8)], admitted=[5]))
    cache.remove(5)
    cache.add(6, prompt, max_cached=7)
    assert "seq 1 wrote into block 1, cached for later prompts: copied to 2" in told(story, run.record([(6, 1)]))


def test_a_split_is_told_with_its_blocks_and_who_shared():
    run, story = paged(5), BlockStory(SequenceNames())
    story.tell(run.record([(5, 20)], admitted=[5]))
    run.cache.fork(5, 6)
    assert told(story, run.record()) == ["seq 1 began as a fork: 2 blocks shared, none copied"]
    sentences = told(story, run.record([(6, 1)]))
    assert sentences[0] == "seq 1 wrote into block 1, shared by 2: copied to 2"
    assert not any("took" in sentence for sentence in sentences)  # the copy is no growth


def test_a_hit_is_told_with_its_tokens_and_blocks():
    run, story = Run(PrefixKvCache(16, 16)), BlockStory(SequenceNames())
    run.cache.add(1, list(range(32)))
    story.tell(run.record([(1, 32)], admitted=[1]))
    run.cache.remove(1)
    run.cache.add(2, list(range(40)), max_cached=39)
    assert told(story, run.record([(2, 8)], admitted=[2]))[0] == "seq 1 began with 32 tokens from blocks 0 1"


def test_evictions_are_told_together():
    run, story = Run(PrefixKvCache(4, 16)), BlockStory(SequenceNames())
    run.cache.add(1, list(range(64)))
    story.tell(run.record([(1, 64)], admitted=[1]))
    run.cache.remove(1)
    run.cache.add(2, [9] * 40)
    assert "blocks 3 2 1 evicted: 48 cached tokens forgotten" in told(story, run.record([(2, 40)], admitted=[2]))


def test_a_preemption_is_told_with_what_it_costs():
    run, story = paged(1, 2), BlockStory(SequenceNames())
    story.tell(run.record([(1, 16), (2, 16)], admitted=[1, 2]))
    run.cache.remove(2)
    gone = PreemptRecord(2, 1, 1, 0, "lifo", "recompute", 16, 1)
    assert told(story, run.record([(1, 1)], preempted=[gone]))[0] == (
        "seq 1 freed 1 block, victim of seq 0: needed 1, free 0; lifo; 16 tokens to recompute"
    )


def test_a_wait_is_told_with_its_reason_in_the_steps_own_names():
    run, story = paged(7, 9), BlockStory(SequenceNames())
    story.tell(run.record([(7, 16)], admitted=[7]))
    record = replace(run.record(), waiting=(WaitRecord(9, Deferred(7, 48)),))
    assert story.tell(record)[0] == (2, "seq 1 waits: deferred: seq 0 computes the same 48-token prefix", True)


def test_many_that_do_the_same_are_counted():
    run, story = paged(*range(20)), BlockStory(SequenceNames())
    story.tell(run.record([(seq_id, 16) for seq_id in range(20)], admitted=range(20)))
    sentences = told(story, run.record([(seq_id, 1) for seq_id in range(20)], finished=range(20)))
    assert sentences == [
        "20 sequences took 20 blocks",
        "20 sequences wrote a token each",
        "20 sequences ended and freed 40 blocks",
    ]


def run_of_three(num_blocks=64, steps=30):
    """A sequence, then two forks of it."""
    run = paged(1, num_blocks=num_blocks)
    records = [run.record([(1, 20)], admitted=[1])]
    run.cache.fork(1, 2)
    run.cache.fork(1, 3)
    records += [run.record([(seq_id, 1) for seq_id in (1, 2, 3)]) for _ in range(steps)]
    return records


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (60, 20), (200, 60)], ids=str)
@pytest.mark.parametrize("num_blocks", [16, 512, 1000])
def test_a_frame_keeps_to_the_terminal(size, num_blocks):
    width, height = size
    screen = BlockScreen()
    for record in run_of_three(num_blocks, 10):
        screen.feed(record)
        lines = screen.frame(width, height)
        assert len(lines) <= height
        assert max(line.cell_len for line in lines) <= max(width, 78)
        assert any("seq 0" in line.plain for line in lines)


def test_many_sequences_leave_the_frame_whole():
    run = paged(*range(40), num_blocks=1000)
    screen = BlockScreen()
    screen.feed(run.record([(seq_id, 20) for seq_id in range(40)], admitted=range(40)))
    lines = [line.plain for line in screen.frame(80, 23)]
    assert len(lines) <= 23 and any("more sequences with" in line for line in lines)


def test_what_is_out_of_the_ordinary_has_the_room():
    screen, run = BlockScreen(), paged(1)
    screen.feed(run.record([(1, 20)], admitted=[1]))
    for seq_id in (2, 3):
        run.cache.fork(1, seq_id)
    screen.feed(run.record([(seq_id, 1) for seq_id in (1, 2)]))
    shown = "\n".join(line.plain for line in screen.frame(80, 23))
    assert "shared by 3: copied to 2" in shown and "shared by 2: copied to 3" in shown


def test_what_a_cache_counted_before_the_run_is_not_the_runs():
    run, screen = Run(PrefixKvCache(16, 16)), BlockScreen()
    run.cache.add(1, list(range(32)))
    before = run.record([(1, 32)], admitted=[1])
    screen.since = run.cache.stats()
    counted = replace(before, cache=replace(before.cache, prefix_queries=32, prefix_hits=0, splits=0, evictions=0))
    screen.feed(counted)
    assert screen.record.cache.prefix_queries == 0


def test_the_picture_is_of_the_fullest_step_and_the_split_is_remembered():
    screen = BlockScreen()
    for record in run_of_three():
        screen.feed(record)
    assert screen.split[0] == 2
    assert "step 31" in screen.picture(80)[0].plain
    assert "step 2 " in screen.picture(80, screen.split)[0].plain


def test_a_pipe_gets_one_line_per_step_while_it_runs_and_the_picture_at_the_end():
    console = piped()
    records = run_of_three()
    with BlockGeneration(console, "Once", False, 20.0) as view:
        view.step(records[0])
        assert written(console).startswith("step   1  used   2  free  62  fragmentation 37.5 %  seq 0 began")
        for record in records[1:]:
            view.step(record)
        view.finish(flat(3))
    out = written(console)
    assert "\x1b" not in out
    assert len([line for line in out.splitlines() if line.startswith("step ")]) == len(records)
    for expected in ("seq 2 ", "copy-on-write", "blocks, in the order of positions", "kv mode"):
        assert expected in out


def test_without_colour_the_cells_still_say_whose_they_are():
    console = terminal(NO_COLOR="1")
    with BlocksView(console, BlockScreen(), 1e6) as watch:
        for record in run_of_three(steps=1):
            watch.step(record)
    out = written(console)
    assert "seq 1" in out and not re.search(r"\x1b\[[\d;]*[349]\d[\d;]*m", out)
    with BlocksView(coloured := terminal(), BlockScreen(), 1e6) as watch:
        watch.step(run_of_three(steps=0)[0])
    assert re.search(r"\x1b\[[\d;]*[349]\d[\d;]*m", written(coloured))


def test_a_terminal_sees_every_step_at_its_pace(monkeypatch):
    slept = []
    monkeypatch.setattr("forge.views.blocks.time.sleep", slept.append)
    console = terminal()
    with BlocksView(console, BlockScreen(), 50.0) as watch:
        for record in run_of_three(steps=4):
            watch.step(record)
    assert len(slept) == 5 and all(0 <= seconds <= 0.02 for seconds in slept)
    slept.clear()
    with BlocksView(console, BlockScreen(), 0) as watch:
        watch.step(run_of_three(steps=0)[0])
    assert not slept


def test_a_pipe_is_not_watched():
    console, screen = piped(), BlockScreen()
    with BlocksView(console, screen, 20.0) as watch:
        watch.step(run_of_three(steps=0)[0])
    assert screen.steps == 1 and written(console) == ""


def test_a_step_as_json_has_tables_counts_and_sentences():
    screen, found = BlockScreen(), []
    for record in run_of_three(steps=1):
        found.append(blocks_object(record, screen.feed(record), screen.names))
    assert [one["blocks"] for one in found[1]["tables"]] == [[0, 2], [0, 3], [0, 1]]
    assert found[1]["tables"][0]["reference_counts"] == [3, 1] and found[1]["written"] == [1, 2, 3]
    assert "seq 0 wrote into block 1, shared by 3: copied to 2" in found[1]["sentences"]


def test_a_conversation_keeps_its_blocks_and_goes_on_with_them():
    run, story = paged(1), BlockStory(SequenceNames(), keeps=True)
    sentences = told(story, run.record([(1, 20)], admitted=[1], finished=[1]))
    assert sentences[-1] == "seq 0 ended (length) and keeps its 2 blocks"
    record = run.record([(1, 4)])
    again = replace(record, admitted=(AdmitRecord(1, "new", 20, 0),))
    assert told(story, again)[0] == "seq 0 went on with 20 tokens, which it had kept"
