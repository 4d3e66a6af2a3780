"""Every command on a small random model: what it prints, and its exit status."""

import json

import pytest

from forge.engine_args import memory_bytes
from tests.small_models import gguf_beginning


def test_generate_in_a_pipe(forge, model):
    found = forge("generate", "Once upon a time", "5", "-m", model, "--kv", "basic", "--ignore-eos")
    assert found.status == 0 and found.err == ""
    forwards = [line for line in found.out.splitlines() if line.startswith("forward ")]
    assert [line.split()[2] for line in forwards] == ["prefill", "decode", "decode", "decode", "decode"]
    assert "kv mode              basic" in found.out
    assert "\x1b" not in found.out


def test_generate_as_json(forge, small):
    found = forge("generate", "Once", "4", *small, "--json", "--ignore-eos", "--kv", "on")
    run = json.loads(found.out)
    assert run["kv"] == "basic" and len(run["forwards"]) == len(run["token_ids"]) == 4
    assert run["finish_reason"] == "length"
    assert run["forwards"][0]["tokens_computed"] == len(run["prompt_token_ids"])
    assert all(forward["tokens_computed"] == 1 for forward in run["forwards"][1:])


def test_without_a_cache_every_forward_computes_everything(forge, small):
    run = json.loads(forge("generate", "Once", "4", *small, "--json", "--ignore-eos").out)
    prompt = len(run["prompt_token_ids"])
    assert run["kv"] == "off" and run["kv_bytes_held"] == 0
    assert [forward["tokens_computed"] for forward in run["forwards"]] == [prompt + index for index in range(4)]


def test_the_same_seed_gives_the_same_tokens(forge, small):
    drawing = ("--temperature", "1.5", "--top-k", "40", "--top-p", "0.95")

    def tokens(seed):
        found = forge("generate", "Once", "8", *small, "--json", *drawing, "--seed", seed)
        return json.loads(found.out)["token_ids"]

    assert tokens("7") == tokens("7") != tokens("8")


def test_several_samples(forge, small):
    found = forge("generate", "Once", "3", *small, "--n", "2", "--temperature", "1", "--ignore-eos")
    assert "sample 0 · length" in found.out and "sample 1 · length" in found.out and "seed" in found.out


def test_no_tokens_where_only_the_prompt_matters(forge, small):
    found = forge("generate", "Once", "0", *small, "--prompt-logprobs", "2")
    assert found.status == 0 and "prompt token" in found.out
    echoed = forge("generate", "Once upon", "0", *small, "--echo")
    assert echoed.status == 0 and "Once upon" in echoed.out and "prompt token" not in echoed.out


def test_log_probabilities_are_listed(forge, small):
    found = forge("generate", "Once", "2", *small, "--logprobs", "3", "--ignore-eos")
    assert "output token" in found.out and "likeliest there" in found.out


def test_compare_finds_the_cache_to_change_nothing(forge, small):
    found = forge("compare", "--kv", "off", "vs", "on", "Once", "6", *small, "--ignore-eos")
    assert found.status == 0 and found.err == ""
    assert "✓ identical: 6 tokens" in found.out and "tokens computed" in found.out


def test_compare_exits_1_when_tokens_differ(forge, small):
    found = forge("compare", "--seed", "1", "vs", "2", "Once", "12", *small, "--temperature", "2", "--ignore-eos")
    assert found.status == 1
    assert "✗ the tokens differ from output token" in found.out


def test_compare_has_a_prompt_of_its_own(forge, small):
    found = forge("compare", "--kv", "off", "vs", "on", *small, "--json", "--ignore-eos")
    sides = json.loads(found.out)["sides"]
    assert sides[0]["prompt"] == "Once upon a time" and len(sides[0]["token_ids"]) == 32


def test_naive_shows_where_the_time_goes(forge, small):
    found = forge("naive", "Once", "8", *small, "--only", "run")
    assert found.status == 0
    for expected in ("attention", "layers 0 to 1", "output head", "forge compare --kv off vs basic"):
        assert expected in found.out


def test_kv_cache_shows_what_is_held(forge, small):
    found = forge("kv-cache", "Once", "8", *small, "--only", "run")
    assert found.status == 0
    assert "2 layers x 2 KV heads x 32 numbers x 4 bytes" in found.out and "holds" in found.out


def test_experiments_as_json_have_what_their_chapters_name(forge, small):
    naive = json.loads(forge("naive", "Once", "8", *small, "--json").out)
    assert naive["tokens_computed"] == sum(naive["prompt_tokens"] + index for index in range(8))
    assert 0 < naive["attention_share"] + naive["matrices_share"] <= 1 and len(naive["layers"]) == 2
    kept = json.loads(forge("kv-cache", "Once", "8", *small, "--json").out)
    assert kept["tokens_without_cache"] == naive["tokens_computed"]
    assert kept["held_bytes"] == kept["tokens_computed"] * kept["bytes_per_token"] <= kept["slots_reserved"] * 1024


def test_inspect_describes_a_file(forge, model):
    found = forge("models", "inspect", model)
    assert found.status == 0 and "qwen3.block_count" in found.out and "blk.0-1.attn_q.weight" in found.out
    described = json.loads(forge("models", "inspect", model, "--json").out)
    assert described["version"] == 3 and described["kv_bytes_per_token"] == {
        "float32": 1024,
        "float16": 512,
        "int8": 288,
    }


def test_list_names_every_bundled_model(forge):
    found = forge("models", "list")
    assert found.status == 0 and "tales-q8_0, tales" in found.out
    assert {entry["name"] for entry in json.loads(forge("models", "list", "--json").out)} >= {"tales-q8_0"}


def test_a_pulled_model_that_does_not_run_is_marked_in_the_list(forge, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "forge" / "models" / "Someone" / "Tiny"
    folder.mkdir(parents=True)
    (folder / "Tiny-Q3_K_M.gguf").write_bytes(gguf_beginning(tmp_path, "IQ2_S"))
    listed = {entry["name"]: entry for entry in json.loads(forge("models", "list", "--json").out)}
    assert listed["Someone/Tiny:Q3_K_M"]["trouble"] == "forge does not compute with its IQ2_S tensors"
    assert "forge does not compute with its IQ2_S tensors" in forge("models", "list").out


def test_the_version(forge):
    assert forge("--version").out.startswith("forge ")


def test_help_has_its_panels(forge):
    out = forge("--help").out
    for expected in ("Chapters", "Run", "Inspect", "Measure", "Serve", "generate", "kv-cache", "doctor"):
        assert expected in out


COMMANDS = (
    "generate", "compare", "chapters", "chapter", "next", "naive", "kv-cache", "kernels", "paged", "prefix", "batching",
    "speculation", "oneshot", "cuda", "trace-scheduler", "replay", "trace", "chat", "classify", "score", "logprobs",
    "embed", "rerank", "serve", "watch", "models", "doctor", "build",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(forge, command):
    found = forge(command, "--help")
    assert found.status == 0 and "Usage" in found.out


def test_generate_shows_its_blocks(forge, small):
    sizes = ("--kv", "paged", "--num-blocks", "8", "--block-size", "16", "--show", "blocks")
    found = forge("generate", "Once", "8", *small, *sizes, "--ignore-eos", "--n", "2", "--temperature", "1")
    assert found.status == 0 and found.err == ""
    for expected in (
        "seq 1 began as a fork",
        "shared by 2: copied to",
        "blocks, in the order of positions",
        "8 blocks",
    ):
        assert expected in found.out
    run = json.loads(forge("generate", "Once", "8", *small, *sizes, "--ignore-eos", "--json").out)
    assert len(run["blocks"]) == len(run["forwards"]) and run["blocks"][-1]["tables"][0]["reference_counts"]


def test_the_pool_is_as_large_as_was_asked_for(forge, small):
    shown = ("--show", "blocks", "--json", "--ignore-eos", "--kv", "paged")
    by_number = json.loads(forge("generate", "Once", "1", *small, *shown, "--num-blocks", "7").out)["blocks"][0]
    by_bytes = json.loads(forge("generate", "Once", "1", *small, *shown, "--kv-memory", "64KiB").out)["blocks"][0]
    assert by_number["used_blocks"] + by_number["free_blocks"] == 7
    assert by_bytes["used_blocks"] + by_bytes["free_blocks"] == 65536 // (16 * 1024)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kv", "paged", "--show", "bricks"), "--show takes blocks"),
        (("--kv", "off", "--show", "blocks"), "--show means nothing with --kv off"),
        (("--kv", "paged", "--kv-memory", "lots"), "--kv-memory takes a size such as 64MB"),
        (("--kv", "paged", "--kv-memory", "1ib"), "--kv-memory takes a size such as 64MB"),
        (("--kv", "paged", "--kv-memory", "100B"), "cannot hold one block"),
        (("--kv", "paged", "--kv-memory", "1MB", "--num-blocks", "3"), "give one of them"),
        (("--kv", "paged", "--num-blocks", "0"), "--num-blocks must be a whole number"),
        (("--kv", "paged", "--show", "blocks", "--pace", "-1"), "--pace is a number of steps per second"),
    ],
)
def test_a_bad_size_or_view_is_one_line(forge, small, options, said):
    found = forge("generate", "Once", "1", *small, *options)
    assert found.status == 2 and said in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), ("64MB", 64_000_000), ("1.5 gb", 1_500_000_000), ("256MiB", 1 << 28), ("2k", 2000)]
)
def test_sizes_in_bytes(text, number):
    assert memory_bytes(text) == number


def test_compare_shows_what_paging_saves(forge, small):
    found = forge("compare", "--kv", "basic", "vs", "paged", "Once", "6", *small, "--ignore-eos")
    assert found.status == 0
    for expected in ("✓ identical: 6 tokens", "KV reserved", "blocks used at once", "reserved and empty"):
        assert expected in found.out


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    beginning = "The fox and the lantern and the old mill by the river"
    path.write_text(f"{beginning}, once\n\n{beginning}, twice\n{beginning}\n", encoding="utf-8")
    return str(path)


def test_compare_shows_what_int8_saves_though_no_cache_was_named(forge, small):
    line = ("compare", "--kv-dtype", "float32", "vs", "int8", "Once", "6", *small, "--ignore-eos", "--json")
    held = [side["kv_bytes_held"] for side in json.loads(forge(*line).out)["sides"]]
    assert held[0] > 2 * held[1] > 0


def test_compare_runs_every_prompt_of_a_file(forge, small, prompts):
    line = ("compare", "--kv", "paged", "vs", "prefix", "--prompts", prompts, *small, "--block-size", "4")
    found = forge(*line, "6", "--ignore-eos")
    assert found.status == 0 and found.err == ""
    for expected in ("3 prompts of", "✓ identical: 18 tokens of 3 prompts, logits equal", "prompt tokens found"):
        assert expected in found.out
    paged, prefix = json.loads(forge(*line, "6", "--ignore-eos", "--json").out)["sides"]
    assert [one["token_ids"] for one in paged["prompts"]] == [one["token_ids"] for one in prefix["prompts"]]
    assert paged["cache"]["tokens_cached"] == 0 < prefix["cache"]["tokens_cached"]
    saved = prefix["cache"]["tokens_cached"]
    assert paged["tokens_computed"] - prefix["tokens_computed"] == saved
    assert prefix["cache"]["most_blocks_saved"] > 0 and len(prefix["prompts"]) == 3


def test_any_option_can_vary_over_several_prompts(forge, small, prompts):
    found = forge("compare", "--seed", "1", "vs", "2", "--prompts", prompts, "--temperature", "2", *small, "8")
    assert found.status == 1 and "✗ the tokens differ from output token" in found.out and "of prompt 1" in found.out


def test_a_seed_that_was_not_given_is_the_same_on_both_sides_for_every_prompt(forge, small, prompts):
    line = ("--prompts", prompts, "--temperature", "2", *small, "6", "--ignore-eos")
    assert forge("compare", "--kv", "off", "vs", "prefix", *line).status == 0


def test_a_prompt_beside_a_file_of_prompts_is_one_line(forge, small, prompts):
    for words in (("Once",), ("Once", "6")):
        found = forge("compare", "--kv", "off", "vs", "on", "--prompts", prompts, *small, *words)
        assert found.status == 2 and "leave out 'Once'" in found.err and found.err.count("\n") == 1


def test_a_file_without_prompts_is_one_line(forge, small, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    for name, said in (("empty.txt", "has no prompt in it"), ("missing.txt", "No such file")):
        found = forge("compare", "--kv", "off", "vs", "on", "--prompts", str(tmp_path / name), *small)
        assert found.status == 2 and said in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("varied", "compared", "verdict"),
    [
        (
            ("--requests", "2", "vs", "3"),
            2,
            "✓ identical: 2 requests in both workloads (they differ), 64 tokens each way",
        ),
        (
            ("--requests", "2", "vs", "3", "4"),
            2,
            "✓ identical: 2 requests in both workloads (they differ), 8 tokens each way",
        ),
        (("--batch", "1", "vs", "2", "--requests", "3"), 3, "✓ identical: 3 requests, 96 tokens each way"),
        (("--prompt-tokens", "4", "vs", "5", "--requests", "3"), 0, "tokens not compared: the two sides have no req"),
    ],
)
def test_many_requests_are_compared_where_both_sides_have_them(forge, small, varied, compared, verdict):
    line = ("compare", "--kv", "paged", *small, *varied)
    if "--prompt-tokens" not in varied:
        line += ("--prompt-tokens", "2:4")
    found = forge(*line)
    assert found.status == 0 and found.out.splitlines()[-1].startswith(verdict)
    facts = json.loads(forge(*line, "--json").out)
    assert facts["requests_compared"] == compared and facts["identical"] is (True if compared else None)


PAGED = ("paged", "Once", "--sequences", "6", "--num-blocks", "16", "--block-size", "4", "--max-model-len", "32")


def test_paged_holds_both_caches_against_each_other(forge, small):
    found = forge(*PAGED, *small, "--only", "run")
    assert found.status == 0 and found.err == "" and "\x1b" not in found.out
    for expected in ("basic", "stories at once", "reserved and empty", "✓ identical", "blocks aside for a story"):
        assert expected in found.out


def test_paged_as_json_has_what_its_chapter_names(forge, small):
    facts = json.loads(forge(*PAGED, *small, "--json").out)
    basic, paged = facts["basic"], facts["paged"]
    assert facts["identical"] and facts["blocks_per_run"] == 8 and facts["longest"] <= 32
    assert basic["most_running"] == 2 < paged["most_running"]
    assert paged["internal_fragmentation"] < basic["internal_fragmentation"]
    assert paged["steps"] < basic["steps"]


PREFIX = ("prefix", "Once", "16", "--block-size", "4", "--branches", "2", "--requests", "3")


def test_prefix_forks_a_story_and_shares_a_rubric(forge, small, tmp_path):
    (tmp_path / "rubric.txt").write_text("Read the story of the fox and answer.\n")
    found = forge(*PREFIX, *small, "--only", "run", "--rubric", str(tmp_path / "rubric.txt"))
    assert found.status == 0 and found.err == "" and "\x1b" not in found.out
    for expected in ("copied to", "began as a fork", "request 3", "✓ identical", "without sharing it would have been"):
        assert expected in found.out


def test_prefix_without_branches_says_which_blocks_a_small_pool_evicts_and_in_which_order(forge, small, tmp_path):
    (tmp_path / "rubric.txt").write_text("Read the story of the fox and answer.\n")
    line = ("prefix", "Once", "16", "--block-size", "4", "--branches", "0", "--requests", "6", "--num-blocks", "32")
    line = (*line, *small, "--rubric", str(tmp_path / "rubric.txt"))
    found = forge(*line)
    assert found.status == 0 and "── 5 ·" not in found.out and "began as a fork" not in found.out
    facts = json.loads(forge(*line, "--json").out)
    assert facts["story"] is None and facts["identical"]
    evicted = facts["rubric"]["evicted"]
    assert len(evicted) == facts["rubric"]["prefix"]["evictions"] > 1
    assert f"block {evicted[0]['block']} evicted: number {evicted[0]['place']} of the" in found.out
    assert evicted[0]["place"] == evicted[0]["num_full"], "a sequence releases its last block first"


def test_prefix_shows_what_a_snapshot_holds(forge, small):
    line = ("prefix", "Once", "16", "--block-size", "4", "--branch-at", "7", "--snapshot", *small)
    found = forge(*line)
    assert found.status == 0 and "✓ identical: the snapshot's" in found.out
    assert "<prefix KV cache: 0 of 64 blocks used" in found.out
    facts = json.loads(forge(*line, "--json").out)
    computed, taken, written, ended, restored, released = facts["moments"]
    assert taken["used"] == computed["used"] and set(taken["snapshot"]) & {"*"}
    assert written["used"] == taken["used"] + 1  # the block that is not full is copied, and only that one
    assert ended["story"] == "–" and ended["used"] == taken["used"] and restored["used"] == ended["used"]
    assert released["used"] == 0 and facts["unchanged"]


def test_prefix_as_json_has_what_its_chapter_names(forge, small, tmp_path):
    (tmp_path / "rubric.txt").write_text("Read the story of the fox and answer.\n")
    facts = json.loads(forge(*PREFIX, *small, "--json", "--rubric", str(tmp_path / "rubric.txt")).out)
    story, rubric = facts["story"], facts["rubric"]
    assert story["hit_tokens"] == story["beginning_tokens"] - 1 and story["hit_tokens"] % 4
    assert len(story["splits"]) == 2 and story["splits"][0]["references"] == 2
    assert story["tokens_computed"] == story["tokens_without_sharing"] - story["hit_tokens"] - story["beginning_tokens"]
    found = sum(request["tokens_cached"] for request in rubric["requests"])
    assert found >= 2 * rubric["tokens"] - 2
    assert rubric["paged"]["tokens_computed"] - rubric["prefix"]["tokens_computed"] == found
    assert facts["identical"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("paged", "Once", "--sequences", "0"), "--sequences is at least 1"),
        (("prefix", "Once", "--requests", "1"), "--requests is at least 2"),
        (("naive", "--heads", "--trace", "run.jsonl"), "leave --trace and --step out"),
        (("prefix", "Once", "16", "--branch-at", "16"), "--branch-at is between 1 and 15"),
    ],
)
def test_an_experiment_without_a_meaning_is_one_line(forge, small, line, said):
    found = forge(*line, *small, "--only", "run")
    assert found.status == 2 and said in found.err and found.err.count("\n") == 1


def test_bench_cache_measures_both_caches(forge, small):
    found = forge("bench", "cache", *small, "--quick", "--length", "20", "--block-size", "4")
    assert found.status == 0
    for expected in ("contiguous", "scattered", "bookkeeping of a step, 64 sequences, prefix", "hit rate"):
        assert expected in found.out


def test_generate_keeps_to_a_form(forge, small, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}}))
    grammar = tmp_path / "form.lark"
    grammar.write_text('start: "it is " ("good" | "bad")')

    def text(*form):
        found = forge("generate", "Once", "60", *small, "--json", "--temperature", "1", *form)
        return json.loads(found.out)["text"]

    assert text("--choice", "happy", "--choice", "sad") in ("happy", "sad")
    assert text("--regex", "[0-9]{3}").isdigit()
    assert text("--grammar", str(grammar)) in ("it is good", "it is bad")
    found = forge("generate", "Once", "200", *small, "--json", "--json-schema", str(schema), "--speculate", "grammar")
    run = json.loads(found.out)
    assert run["finish_reason"] == "length" or isinstance(json.loads(run["text"]), dict)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (("--regex", "(a"), "regular expression is refused"),
        (("--regex", "a", "--choice", "b"), "give one of --json-schema"),
        (("--json-schema", "missing.json"), "missing.json: No such file"),
    ],
)
def test_a_form_that_is_wrong_is_one_line(forge, small, form, message):
    found = forge("generate", "Once", "4", *small, *form)
    assert found.status == 2 and message in found.err and found.err.count("\n") == 1


def test_the_hash_model_has_no_heads_to_show(forge):
    found = forge("naive", "--heads", "-m", "hash")
    assert found.status == 2 and found.err.startswith("forge: the hash model has no attention heads")
