"""`forge speculation`, and `--speculate` wherever it can be given, on small random models."""

import json

import pytest

from tests.small_models import write_small_qwen3


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[str, ...]:
    """Options for a target and a draft that agrees most of the time: the same weights, other rounding."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_small_qwen3(folder / "target.gguf", seed=4)
    draft = write_small_qwen3(folder / "little.gguf", seed=4, tensor_type="Q8_0")
    return ("-m", str(target), "--draft", str(draft), "--device", "reference")


def test_speculation_shows_what_was_kept_and_gained(forge, pair):
    found = forge("speculation", "--only", "run", "the hat on the hat", "24", *pair, "--k", "3", "--speculate-fixed")

    assert found.status == 0 and found.err == ""
    for expected in (
        "Which draft tokens did the target accept?",
        "little drafts for target",
        "cycle 1",
        "α",
        "✓ identical: 24",
    ):
        assert expected in found.out


def test_speculation_as_json(forge, pair):
    found = json.loads(forge("speculation", "the hat", "20", *pair, "--k", "2", "--speculate-fixed", "--json").out)

    assert len(found["token_ids"]) == 20
    assert found["identical"] is True
    assert 0 < found["alpha"] <= 1
    assert found["target_forwards"] < found["plain_forwards"] == 20
    assert {"predicted", "measured", "verify_cost", "draft_cost", "cycles"} <= found.keys()


def test_a_revoked_draft_costs_no_token(forge, pair):
    found = json.loads(
        forge("speculation", "the hat", "20", *pair, "--speculate-fixed", "--revoke-draft-at", "6", "--json").out
    )

    assert found["identical"] is True
    assert found["release_ms"] is not None
    assert "draft model was revoked" in found["errors"][0]
    assert [cycle["error"] is None for cycle in found["cycles"]][-1] is False


@pytest.mark.parametrize(
    ("rule", "verdict"), [("gumbel", "identical: 20 tokens"), ("rejection", "20 tokens, drawn from the distribution")]
)
def test_speculation_under_sampling_says_whether_the_tokens_are_those_without_a_draft(forge, pair, rule, verdict):
    drawing = ("--temperature", "1.5", "--seed", "3", "--acceptance", rule)
    found = forge("speculation", "--only", "run", "the hat", "20", *pair, "--speculate-fixed", *drawing)

    assert found.status == 0
    assert "seed 3" in found.out
    assert verdict in " ".join(found.out.split())


def test_generate_refuses_an_acceptance_rule_without_speculation_and_an_unknown_one(forge, pair):
    for options, message in (
        ((), "--acceptance means nothing with --speculate off"),
        (("--speculate", "ngram"), "supported: gumbel"),
    ):
        found = forge("generate", "the hat", "2", "--acceptance", "typical", *options)
        assert found.status == 2 and message in found.err


def test_generate_with_guesses_says_the_same(forge, pair):
    texts = []
    target, draft = pair[:2], pair[2:4]
    for guessing in ((), ("--speculate", "draft", "--speculate-fixed", *draft), ("--speculate", "ngram", "--k", "3")):
        found = forge("generate", "the hat", "16", *target, *guessing, *pair[4:], "--kv", "on", "--json")
        texts.append(json.loads(found.out)["token_ids"])

    assert texts[0] == texts[1] == texts[2]


def test_compare_with_and_without_guesses(forge, pair):
    found = forge(
        "compare", "--speculate", "off", "vs", "draft", *pair, "--speculate-fixed", "--kv", "paged", "--ignore-eos"
    )

    assert found.status == 0
    assert "Does speculation change what the model says" in found.out
    assert "✓ identical: 32 tokens, logits equal to the last bit" in found.out
    assert "draft tokens verified in each" in found.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "a", "--speculate", "medusa"), "unknown --speculate 'medusa'; supported: off, draft, ngram"),
        (
            ("generate", "a", "--speculate", "ngram", "--k", "0"),
            "--k is how many draft tokens to propose at a time, 1 to 64",
        ),
        (("speculation", "--speculate", "off"), "--speculate off proposes nothing: take draft or ngram"),
        (("speculation", "--speculate", "ngram", "--revoke-draft-at", "3"), "for --speculate draft"),
        (("bench", "speculation", "--batch", "17"), "--batch takes 1 to 16 sequences, got 17"),
        (("bench", "speculation", "--k", "65"), "got 65"),
        (("bench", "engine", "--k", "3"), "--k means nothing with --speculate off"),
    ],
)
def test_a_mistake_is_one_line(forge, args, message):
    found = forge(*args)

    assert found.status == 2
    assert message in found.err and found.err.count("\n") == 1


def test_bench_speculation_measures_every_case(forge, pair):
    args = ("--quick", "--tokens", "12", "--k", "1", "--k", "3", "--batch", "1", "--batch", "2")
    found = json.loads(forge("bench", "speculation", *pair, *args, "--json").out)

    cases = [(figure["proposer"], figure["k"], figure["batch"]) for figure in found["figures"]]
    assert len(cases) == len(set(cases)) == 8
    assert all(figure["identical"] and figure["speed_up"] > 0 for figure in found["figures"])
    shown = forge("bench", "speculation", *pair, *args)
    assert shown.status == 0 and "✓ identical" in shown.out and "2 sequences" in shown.out


def test_guesses_are_in_every_record_and_every_view_of_a_run(forge, pair, tmp_path):
    path, options = str(tmp_path / "run.jsonl"), (*pair, "--speculate", "draft", "--k", "3", "--speculate-fixed")
    live = forge("generate", "the hat on the hat", "20", *options, "--trace", path)
    assert live.status == 0 and "drafted: little " in live.out and "little drafted" in live.out
    again = forge("replay", path)
    assert "decode 1 seq + 3 draft tokens" in again.out and "little drafted" in again.out
    (draft,) = json.loads(forge("replay", path, "--json").out)["speculation"]
    many = forge("trace-scheduler", "-n", "3", "--max-tokens", "12", "--prompt-tokens", "4:8", *options)
    assert "decode 3 seqs + 9 draft tokens" in many.out
    both = forge("compare", "the hat", "20", *pair, "--speculate-fixed", "--speculate", "off", "vs", "draft")
    assert "draft tokens accepted" in both.out and "proposing them" in both.out and "identical" in both.out
    for cycle in (
        cycle for step in json.loads(forge("replay", path, "--json").out)["steps"] for cycle in step["cycles"]
    ):
        before, written, after = cycle["target_positions"]
        own_before, own_written, own_after = cycle["draft_positions"]
        assert written - before == len(cycle["proposed"]) + 1 and after - before == len(cycle["emitted"])
        assert own_before <= before and own_written == written - 1 and own_after == min(own_written, after)
    assert draft["accepted"] and draft["name"] == "little"


def test_the_table_of_batching_has_a_row_with_guesses_and_its_tokens_are_the_same(forge):
    few = ("bench", "engine", "-m", "hash", "-n", "6", "--max-tokens", "32", "--batch", "4", "--reps", "1")
    found = json.loads(forge(*few, "--draft", "hash:0.8", "--json").out)
    assert found["identical"] and found["speculative_4"]["acceptance"] == pytest.approx(0.59, abs=0.12)
    assert found["speculative_4"]["totals"]["num_steps"] < found["continuous_4"]["totals"]["num_steps"]
    shown = forge(*few, "--draft", "hash:1").out
    assert "4 speculative: 100 % accepted" in shown and "exact." in shown


def test_a_hash_draft_is_a_draft_for_the_hash_model_alone(forge):
    assert "hash:1 drafted" in forge("generate", "-m", "hash", *HASH_DRAFT, "--speculate-fixed", "x", "9").out
    assert "cannot draft for this target" in forge("generate", *HASH_DRAFT, "x", "9").err
    assert "between 0 and 1" in forge("generate", "-m", "hash", "--speculate", "draft", "--draft", "hash:7", "x").err


HASH_DRAFT = ("--speculate", "draft", "--draft", "hash:1")


def test_a_request_says_which_drafts_guess_for_it_and_how_many(forge):
    line = ("-m", "hash", "--speculate-fixed", "--ignore-eos", "--draft", "hash:0.8", "--draft", "hash:0.5", "x", "12")
    speculating = (*line, "--speculate", "draft")
    found = forge("generate", *speculating, "--drafts", "hash:0.5", "--num-speculative-tokens", "2").out
    assert "hash:0.5 drafted" in found and "hash:0.8 drafted" not in found and " of 3" not in found
    varied = json.loads(forge("compare", *speculating, "--num-speculative-tokens", "0", "vs", "4", "--json").out)
    assert varied["identical"] and varied["option"] == "--num-speculative-tokens"
    none, four = (len(side["forwards"]) for side in varied["sides"])
    assert none == 12 > four
    needless = forge("generate", *line, "--num-speculative-tokens", "2")
    assert needless.status == 2 and "means nothing with --speculate off" in needless.err
    unknown = forge("generate", *speculating, "--drafts", "nobody")
    assert unknown.status == 2 and "has no 'nobody'; it has hash:0.8" in unknown.err


def test_the_pins_of_a_pair_are_four_lines_or_facts(forge, pair):
    shown = forge("speculation", "pins", "16", *pair)
    assert shown.status == 0 and shown.out.count("✓") == 4 and "all bits" in shown.out
    assert json.loads(forge("speculation", "pins", "16", *pair, "--temperature", "1", "--json").out)["held"] is True
    assert "pins checks a draft model" in forge("speculation", "pins", "--speculate", "ngram").err
    assert "takes lengths from 1 with commas" in forge("speculation", "pins", "--lengths", "short").err
    assert "are for forge speculation pins" in forge("speculation", "x", "--seeds", "0,1").err
    assert "takes lengths from 1" in forge("speculation", "pins", "--lengths", "0,8", *pair).err


def test_both_models_are_taken_back_and_given_back_and_no_token_changes(forge, pair):
    when = ("--revoke-target-at", "6", "--revoke-draft-at", "10", "--return-draft-at", "16", "--json")
    found = json.loads(forge("speculation", "the hat", "32", *pair, "--speculate-fixed", *when).out)
    assert found["identical"] is True and len(found["leases"]) == 2
    assert any("the target was taken back, and released" in text for text in found["leases"])
    assert any("the draft was loaded again" in text for text in found["leases"])
    assert found["cycles"][-1]["proposed"], "the draft that was given back proposes"
    at_the_end = forge("speculation", "the hat", "8", *pair, "--speculate-fixed", "--revoke-target-at", "7", "--json")
    assert json.loads(at_the_end.out)["identical"] is True
    for wrong in (("--return-draft-at", "4"), ("--revoke-target-at", "0")):
        assert forge("speculation", "the hat", "8", *pair, *wrong).status == 2


def test_each_tenant_has_its_number_of_guesses_and_its_acceptance(forge, pair):
    few = ("trace-scheduler", "-n", "6", "--max-tokens", "12", "--prompt-tokens", "4:8", *pair, "--speculate-fixed")
    found = json.loads(forge(*few, "--speculate", "draft", "--tenants", "3,1,0", "--json").out)["tenants"]
    assert [one["num_speculative_tokens"] for one in found] == [3, 1, 0] and [one["requests"] for one in found] == [
        2
    ] * 3
    assert found[0]["proposed"] > found[1]["proposed"] > 0 == found[2]["proposed"] and found[2]["acceptance"] is None
    assert "Each tenant's draft tokens" in forge(*few, "--speculate", "draft", "--tenants", "2,0").out
    assert "give --speculate" in forge(*few[:-1], "--draft", "x", "--tenants", "1").err
    assert "takes numbers of draft tokens" in forge(*few, "--speculate", "draft", "--tenants", "a").err


def test_a_draft_is_revoked_while_its_forward_is_under_way():
    from types import SimpleNamespace

    from forge.experiments.speculation.borrowing import _revoke_in_the_next_forward
    from forge.speculation.leases import Lease, LeaseRevoked

    seen, clock = [], iter(range(10))
    model = SimpleNamespace(forward=lambda batch, storage: seen.append((lease.revoked, lease.release_ms)))
    lease = Lease("draft", model, clock=lambda: next(clock))
    _revoke_in_the_next_forward(lease)
    assert not lease.revoked
    lease.enter().forward(None, None)
    lease.leave()
    assert seen == [(True, None)] and lease.release_ms == 1000  # by a clock of one second a look
    with pytest.raises(LeaseRevoked):
        lease.enter()


CANNOT_WIN = ("-m", "hash", "--speculate", "draft", "--draft", "hash:0.52", "--k", "4")


def test_a_run_without_a_guess_says_why_on_screen_in_the_trace_and_in_json(forge, tmp_path):
    path, why = tmp_path / "run.jsonl", "even accepted draft tokens would not pay"
    shown = forge("generate", *CANNOT_WIN, "abc", "24", "--trace", str(path)).out
    assert shown.count(f"plain: {why}") == 23 and "plain decodes" in shown and "23 because" in shown
    assert path.read_text().count('"undrafted":[{"seq_id":0,"reason":"off"') == 23
    facts = json.loads(forge("generate", *CANNOT_WIN, "abc", "24", "--json").out)
    assert facts["speculation"] == [] and facts["undrafted"] == {"cannot_win": 23}
    assert why in facts["forwards"][1]["undrafted"][0]["why"]
    assert f"0 plain: {why}" in forge("replay", str(path)).out
    batch = forge("trace-scheduler", *CANNOT_WIN, "-n", "2", "--max-tokens", "4").out
    assert f"0 1 plain: {why}" in batch


def test_a_cycles_json_has_its_accepted_and_emitted_counts(forge):
    guessing = ("-m", "hash", "--speculate", "draft", "--draft", "hash:0.8", "--speculate-fixed", "--ignore-eos")
    facts = json.loads(forge("generate", *guessing, "abc", "24", "--json").out)
    cycles = [cycle for forward in facts["forwards"] for cycle in forward["cycles"]]
    assert cycles and all(cycle["num_emitted"] == len(cycle["emitted"]) for cycle in cycles)
    assert sum(cycle["num_accepted"] for cycle in cycles) == facts["speculation"][0]["accepted"]
    steps = json.loads(forge("trace-scheduler", *guessing[:-1], "-n", "2", "--max-tokens", "8", "--json").out)["steps"]
    assert all({"num_accepted", "num_emitted"} <= cycle.keys() for step in steps for cycle in step["cycles"])
