"""Recording, replaying, exporting, and the commands that run many requests, on a small random model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge.engine.sampling_params import SamplingParams
from forge.trace.recorder import TraceWriter, read_trace
from tests.cli.conftest import ROOT, environment
from tests.cli.test_imports import HEAVY, modules_after
from tests.engine.scripted import muddled, new_engine
from tests.slow import mostly_slow
from tests.trace.runs import HEADER

FEW = ("-n", "4", "--prompt-tokens", "6:12", "--max-tokens", "8")
TIGHT = ("--block-size", "4", "--num-blocks", "8", "--max-num-seqs", "3")


@pytest.fixture
def recorded(forge, small, tmp_path) -> str:
    path = str(tmp_path / "run.jsonl")
    assert forge("trace-scheduler", *FEW, *TIGHT, *small, "--trace", path).status == 0
    return path


def test_a_run_that_is_traced_shows_the_same_when_it_is_replayed(forge, small, tmp_path):
    path = str(tmp_path / "run.jsonl")
    live = forge("trace-scheduler", *FEW, *TIGHT, *small, "--trace", path)
    again = forge("replay", path)
    assert live.status == again.status == 0 and again.err == ""
    steps = [line for line in live.out.splitlines() if line.startswith("step ")]
    assert steps and steps == [line for line in again.out.splitlines() if line.startswith("step ")]
    assert "victim of" in live.out and "What did the run come to?" in live.out


def test_a_view_of_a_run_is_found_by_its_file(forge, recorded):
    shown = forge("replay", recorded, "--view", "costs")
    assert shown.status == 0 and "Where did the time of the steps go?" in shown.out and "decode" in shown.out
    refused = forge("replay", recorded, "--view", "none")
    assert refused.status == 2 and "unknown view 'none'; there are costs" in refused.err
    assert "Where the time of the steps went" in refused.err


def test_replay_has_the_facts_of_the_run(forge, recorded):
    facts = json.loads(forge("replay", recorded, "--json").out)
    assert facts["totals"]["ended"] == {"length": 4} and facts["totals"]["preemptions"] > 0
    assert [one["num_output_tokens"] for one in facts["sequences"]] == [8] * 4


def test_replay_tells_the_story_of_one_sequence(forge, recorded):
    found = forge("replay", recorded, "--seq", "2")
    assert found.status == 0 and "seq 2 · request request-2" in found.out and "ends" in found.out
    assert json.loads(forge("replay", recorded, "--seq", "2", "--json").out)["seq_id"] == 2
    wrong = forge("replay", recorded, "--seq", "9")
    assert wrong.status == 2 and wrong.err == "forge: the run has no seq 9; there are 0 to 3\n"


def test_replay_loads_no_model_and_no_engine(recorded):
    loaded = modules_after(f"from forge.cli.main import main; assert main(['replay', {recorded!r}]) == 0")
    assert not [name for name in HEAVY if name in loaded]
    assert not {"forge.llm", "forge.engine.engine", "forge.model.qwen3"} & loaded


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--kv", "paged", "Once", "4", "--ignore-eos"),
        ("naive", "Once", "4"),
        ("kv-cache", "Once", "4"),
    ],
)
def test_any_command_that_runs_the_engine_can_be_traced(forge, small, tmp_path, command):
    path = tmp_path / "run.jsonl"
    assert forge(*command, *small, "--trace", str(path)).status == 0
    trace = read_trace(path)
    assert len(trace.steps) == 4 and len(trace.ends) == 1 and trace.header.command is not None
    assert forge("replay", str(path)).status == 0


def test_a_conversation_is_one_trace(small, tmp_path):
    path = tmp_path / "run.jsonl"
    line = [sys.executable, "-m", "forge", "chat", *small, "--max-tokens", "3", "--trace", str(path)]
    subprocess.run(
        line, input="Hello\nAgain\n", text=True, check=True, capture_output=True, env=environment(), cwd=ROOT
    )
    trace = read_trace(path)
    assert len(trace.ends) == 2 and sum(len(step.arrived) for step in trace.steps) == 2


def test_export_for_perfetto(forge, recorded, tmp_path):
    found = forge("trace", "export", recorded, "--perfetto")
    assert found.status == 0 and "ui.perfetto.dev" in found.out
    events = json.loads((tmp_path / "run.perfetto.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    elsewhere = tmp_path / "other.json"
    assert forge("trace", "export", recorded, "--perfetto", "--out", str(elsewhere)).status == 0
    assert json.loads(elsewhere.read_text())["traceEvents"] == events


@pytest.fixture
def deferred(tmp_path) -> str:
    """Requests that share an uncached prefix: one computes it, the others are deferred."""
    engine = new_engine(muddled, kv="prefix", block_size=2, num_blocks=64, max_num_batched_tokens=64)
    for name, output in (("a", 3), ("b", 3), ("judge", 1), ("judge too", 1)):
        engine.add_request(name, [1, 2, 3, 4, 5, 6, output], SamplingParams(max_tokens=output, ignore_eos=True))
    path = tmp_path / "shared.jsonl"
    with TraceWriter(path) as writer:
        writer.begin(HEADER)
        while engine.has_unfinished():
            writer.write(engine.step())
    assert '"owner"' in path.read_text()
    return str(path)


def test_requests_that_share_an_uncached_prefix_can_be_replayed(forge, deferred):
    found = forge("replay", deferred)
    assert found.status == 0 and found.err == ""
    assert "deferred: seq 0 computes the same 6-token prefix" in found.out
    assert "deferred while seq 0 computed the same" in found.out
    facts = json.loads(forge("replay", deferred, "--json").out)
    assert any("deferred while seq 0 computed" in line for one in facts["sequences"] for line in one["why"])
    path = Path(deferred)
    path.write_text(path.read_text().replace('"owner"', '"leader"'))  # as it was written before
    assert forge("replay", deferred).out == found.out


def test_requests_that_share_an_uncached_prefix_can_be_exported(forge, deferred, tmp_path):
    assert forge("trace", "export", deferred, "--perfetto").status == 0
    events = json.loads((tmp_path / "shared.perfetto.json").read_text())["traceEvents"]
    waits = [event for event in events if event["name"] == "waits: Deferred"]
    assert waits and all("seq 0 computed the same" in event["args"]["why"] for event in waits)
    assert any(event["name"].startswith("prefill-only") for event in events)


def test_mistakes_are_one_line(forge, small, tmp_path, recorded):
    no_trace = tmp_path / "no.jsonl"
    no_trace.write_text("{}\n")
    for line, said in (
        (("replay", str(tmp_path / "none")), "cannot read the trace"),
        (("replay", str(no_trace)), "no forge trace"),
        (("trace", "export", recorded), "say into which format"),
        (("trace", "export", recorded, "--perfetto", "--out", recorded), "is the trace itself"),
        (("trace-scheduler", "--arrival", "soon"), "--arrival is all"),
        (("trace-scheduler", "--prompt-tokens", "0"), "--prompt-tokens"),
        (("trace-scheduler", "-n", "0", *small), "--requests must be at least 1"),
        (("trace-scheduler", *small, "--preempt", "nobody"), "unknown --preempt"),
        (("trace-scheduler", *small, "--prompt-tokens", "64", "--num-blocks", "2"), "no request can run"),
        (("generate", "Once", "--trace", str(tmp_path / "no" / "run.jsonl")), "cannot write the trace"),
        (("bench", "engine", "--batch", "many"), "--batch takes numbers"),
    ):
        found = forge(*line)
        assert found.status in (1, 2) and found.err.count("\n") == 1 and said in found.err, line


def test_a_cut_trace_is_replayed_with_a_note(forge, recorded, tmp_path):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(Path(recorded).read_bytes()[:-30])
    found = forge("replay", str(cut))
    assert found.status == 0 and "the last line is cut off" in found.err


@pytest.mark.parametrize(
    "options",
    [("--order", "priority"), ("--preemption", "swap"), ("--no-chunked-prefill",), ("--arrival", "every:3")],
)
def test_every_way_of_scheduling_ends_every_request(forge, small, options):
    facts = json.loads(forge("trace-scheduler", *FEW, *TIGHT, *small, *options, "--json").out)
    assert facts["totals"]["ended"] == {"length": 4} and facts["totals"]["output_tokens"] == 32


def test_the_final_picture_is_saved(forge, small, tmp_path):
    path = tmp_path / "run.svg"
    assert forge("trace-scheduler", *FEW, *small, "--svg", str(path)).status == 0
    assert path.read_text(encoding="utf-8").startswith("<svg")


def test_batching_side_by_side(forge, small):
    found = forge("batching", "--only", "run", *FEW, *small)
    assert found.status == 0 and "✓ identical: 4 requests, 32 tokens each way" in found.out
    assert [line.split()[:2] for line in found.out.splitlines() if " x " in line and line[0].isdigit()][:2] == [
        ["1", "continuous"],
        ["4", "static"],
    ]
    facts = json.loads(forge("batching", "--json", *FEW, *small).out)
    assert facts["identical"] and facts["continuous_16"]["totals"]["output_tokens"] == 32


def test_bench_engine_has_a_row_per_way(forge, small):
    facts = json.loads(forge("bench", "engine", *FEW, *small, "--batch", "2", "--reps", "1", "--json").out)
    assert facts["identical"] and {"sequential", "static_2", "continuous_2"} < facts.keys()


@pytest.mark.parametrize(
    "varied",
    [
        ("--batch", "1", "vs", "3"),
        ("--preempt", "lifo", "vs", "least-progressed", "--batch", "3"),
        ("--preemption", "recompute", "vs", "swap"),
        ("--order", "fcfs", "vs", "priority"),
    ],
)
def test_many_requests_are_compared_and_say_the_same(forge, small, varied):
    tight = ("--block-size", "4", "--num-blocks", "8", "-n", "4", "--prompt-tokens", "6:12")
    found = forge("compare", *varied, "8", *small, *tight)
    assert found.status == 0 and found.err == "" and "✓ identical: 4 requests, 32 tokens" in found.out
    facts = json.loads(forge("compare", *varied, *small, *tight, "--json").out)
    assert facts["identical"] and len({side["totals"]["output_tokens"] for side in facts["sides"]}) == 1


@pytest.mark.parametrize(
    ("options", "recomputed", "overlap"),
    [
        (("--num-blocks", "16", "--arrival", "every:3", "--max-tokens", "16:64"), "fewer", 4),
        (("--num-blocks", "20", "--arrival", "every:6", "--max-tokens", "8:100"), "more", 2),
    ],
)
def test_the_two_victim_policies_choose_different_victims(forge, options, recomputed, overlap):
    line = ("trace-scheduler", "-m", "hash", "-n", "12", *options, "--json", "--preempt")
    found = [json.loads(forge(*line, policy).out) for policy in ("lifo", "least-progressed")]
    lifo, least = ({seq for step in one["steps"] for seq in step["preempted"]} for one in found)
    assert len(lifo ^ least) == overlap
    lost, other = (one["totals"]["tokens_recomputed"] for one in found)
    assert other < lost if recomputed == "fewer" else other > lost


@pytest.mark.slow
def test_the_shortest_job_first_starves_and_aging_does_not(forge):
    line = ("trace-scheduler", "-m", "hash", "--max-num-seqs", "2", "--arrival", "every:3")
    found = {order: forge(*line, "--order", order, "--no-lines").out for order in ("fcfs", "sjf", "sjf-aged")}
    assert "overtaken 32 of 64 requests by more than 8 later ones (50 %), at most by 58" in found["sjf"]
    assert "overtaken 0 of 64 requests" in found["sjf-aged"] and "overtaken" not in found["fcfs"]
    totals = json.loads(forge(*line, "--order", "sjf", "--json").out)["totals"]
    assert totals["starved"] == 32 and totals["most_overtaken"] > 8 and totals["longest_wait"] > 0


def test_a_run_draws_its_throughput_over_time(forge):
    line = ("trace-scheduler", "-n", "8", "-m", "hash", "--no-lines")
    assert "Throughput over time" in forge(*line, "--chart").out
    assert "Throughput over time" not in forge(*line).out


@pytest.mark.parametrize("rule", mostly_slow(["least-progressed", "lifo-others"], quick=["lifo-others"]))
def test_compare_has_the_workloads_in_which_victim_rules_differ(forge, rule):
    workload = ("-n", "12", "--num-blocks", "16", "--arrival", "every:3", "--output-tokens", "16:64")
    facts = json.loads(forge("compare", "--preempt", "lifo", "vs", rule, "-m", "hash", *workload, "--json").out)
    again = [side["totals"]["tokens_recomputed"] for side in facts["sides"]]
    assert facts["identical"] and again[0] > again[1] > 0
