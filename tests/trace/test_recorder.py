"""A trace reads back equal to what was written, and a file that is none is refused with the line that is wrong."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import UsageError
from forge.reasons import Deferred, NoBlocks
from forge.trace.codec import codec_of
from forge.trace.recorder import SCHEMA_VERSION, Trace, TraceError, TraceWriter, read_trace
from forge.trace.records import (
    CacheRecord,
    EndRecord,
    FinishRecord,
    ItemRecord,
    PreemptRecord,
    SpecCycle,
    StepRecord,
    TokenRecord,
    WaitRecord,
)
from tests.trace.runs import HEADER, crowded, write_trace

RUN = crowded()
TRACE = Trace(HEADER, RUN.steps, RUN.ends)


@pytest.fixture
def path(tmp_path):
    write_trace(tmp_path / "run.jsonl", TRACE)
    return tmp_path / "run.jsonl"


def through_json(kind, record):
    codec = codec_of(kind)
    return codec.decode(json.loads(json.dumps(codec.encode(record), allow_nan=False)), "")


@pytest.mark.parametrize("kind", [StepRecord, EndRecord, SpecCycle])
def test_any_record_reads_back_equal(kind):
    @given(st.data())
    @settings(max_examples=60)
    def check(data):
        record = data.draw(st.from_type(kind))
        assert repr(through_json(kind, record)) == repr(record)  # by text, because a NaN is not equal to itself

    check()


def test_a_run_with_all_that_can_happen_reads_back_equal(path):
    assert any(step.preempted for step in RUN.steps) and any(step.waiting for step in RUN.steps)
    assert any(step.rejected for step in RUN.steps) and any(step.finished for step in RUN.steps)
    found = read_trace(path)
    assert found == TRACE
    assert [type(one) for one in found.steps[0].items] == [type(one) for one in RUN.steps[0].items]


def test_every_line_is_json_that_any_reader_takes():
    token = TokenRecord(0, 1, 2, "\ud800", math.nan, ((1, -math.inf),))
    text = json.dumps(codec_of(TokenRecord).encode(token), allow_nan=False)
    assert repr(codec_of(TokenRecord).decode(json.loads(text), "")) == repr(token)


def test_of_several_kinds_of_records_the_one_that_it_was_is_read():
    wait = WaitRecord(3, NoBlocks(8, 2))
    assert codec_of(WaitRecord).encode(wait) == {"seq_id": 3, "reason": {"is": "NoBlocks", "needed": 8, "free": 2}}
    assert through_json(WaitRecord, wait) == wait


def test_text_and_number_are_told_apart():
    for stop in (None, "7", 7):
        assert through_json(FinishRecord, FinishRecord(1, "stop", stop=stop)) == FinishRecord(1, "stop", stop=stop)


def test_fields_with_their_default_are_left_out():
    assert codec_of(FinishRecord).encode(FinishRecord(4, "length")) == {"seq_id": 4, "reason": "length"}


def test_a_newer_schema_is_refused_in_one_line(path):
    lines = path.read_text().splitlines()
    header = json.loads(lines[0]) | {"forge_trace": SCHEMA_VERSION + 1, "forge": "9.9", "news": 1}
    path.write_text("\n".join([json.dumps(header), *lines[1:]]))
    with pytest.raises(TraceError, match=r"written by forge 9\.9 in version 2 .* update forge$"):
        read_trace(path)


def test_a_last_line_that_is_cut_off_is_left_out_with_a_note(path):
    text = path.read_bytes()
    path.write_bytes(text[:-20])
    found = read_trace(path)
    assert found.steps == RUN.steps and found.ends == RUN.ends[:-1]
    assert found.note == f"the last line is cut off: {len(RUN.steps)} whole steps were read"
    path.write_bytes(text[: text.index(b"\n") + 40])
    assert read_trace(path).steps == ()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda step: step | {"step": "four"}, r"line 5: step is 'four' and should be a whole number"),
        (lambda step: step | {"mood": 1}, r"line 5: mood is no field of StepRecord"),
        (lambda step: {k: v for k, v in step.items() if k != "started"}, r"line 5: started is missing"),
        (lambda step: step | {"execution_class": "odd"}, r"line 5: execution_class is 'odd' and should be one of"),
        (lambda step: step | {"items": [{"seq_id": 1}]}, r"line 5: items\[0\]\.phase is missing"),
        (
            lambda step: step | {"waiting": [{"seq_id": 1, "reason": {"is": "Whim"}}]},
            r"line 5: waiting\[0\]\.reason is 'Whim' and should be one of NoBlocks, MaxNumSeqs, NoBudget",
        ),
    ],
)
def test_a_malformed_record_is_refused_with_its_line(path, damage, said):
    lines = path.read_text().splitlines()
    lines[4] = json.dumps({"step": damage(json.loads(lines[4])["step"])})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match=said):
        read_trace(path)


@pytest.mark.parametrize("line", ["{", "[]", '{"steps": {}}', "[" * 100_000, "null"])
def test_a_line_that_is_no_record_is_refused_with_its_number(path, line):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(TraceError, match="line 3: "):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"\x00\xff\xfe", b"{}\n", b"[1]\n", b'{"forge": 1}\n', b"GGUF"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="no forge trace"):
        read_trace(path)


def test_no_such_file_and_no_such_folder(tmp_path):
    with pytest.raises(UsageError, match="cannot read the trace: No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot write the trace"):
        TraceWriter(tmp_path / "none" / "run.jsonl")


def test_what_was_written_can_be_read_while_the_run_goes_on(tmp_path):
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        writer.begin(HEADER)
        writer.begin(replace(HEADER, model="the second run of the same engine"))
        writer.write(RUN.steps[0])
        assert read_trace(tmp_path / "run.jsonl") == Trace(HEADER, RUN.steps[:1])


def test_the_header_begins_with_the_version(path):
    assert path.read_text().startswith(f'{{"forge_trace":{SCHEMA_VERSION},')


def test_a_trace_from_before_a_field_was_renamed_or_derived_still_opens():
    reason = {"is": "Deferred", "leader": 4, "num_tokens": 48}
    assert codec_of(WaitRecord).decode({"seq_id": 5, "reason": reason}, "") == WaitRecord(5, Deferred(4, 48))
    assert codec_of(WaitRecord).encode(WaitRecord(5, Deferred(4, 48)))["reason"] == {
        "is": "Deferred",
        "owner": 4,
        "num_tokens": 48,
    }
    item = {"seq_id": 1, "phase": "oneshot", "start": 0, "num_tokens": 4, "num_guesses": 2}
    assert codec_of(ItemRecord).decode(item, "") == ItemRecord(1, "prefill_only", 0, 4, num_draft_tokens=2)
    lost = PreemptRecord(1, 12, 1, 0, "lifo", "swap", 37, 3)
    before = codec_of(PreemptRecord).encode(lost)
    before |= {"policy": before.pop("preempt"), "mode": before.pop("preemption")}
    assert codec_of(PreemptRecord).decode(before, "") == lost
    cache = CacheRecord("paged", 16, 4, used_blocks=2, tokens_held=20, bytes_held=40, bytes_reserved=64)
    with_derived = codec_of(CacheRecord).encode(cache) | {"slots_reserved": 32, "slots_filled": 20}
    assert codec_of(CacheRecord).decode(with_derived, "") == cache and cache.slots_reserved == 32
    with pytest.raises(ValueError, match="chief is no field of Deferred"):
        codec_of(Deferred).decode({"chief": 4, "num_tokens": 48}, "")
