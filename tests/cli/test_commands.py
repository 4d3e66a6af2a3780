"""Every command on a small random model: what it prints, and its exit status."""

import json

import pytest


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
    for expected in ("attention", "layers 0 to 1", "output head", "forge compare --kv off vs on"):
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
    assert described["version"] == 3 and described["kv_bytes_per_token"] == {"float32": 1024, "float16": 512}


def test_list_names_every_bundled_model(forge):
    found = forge("models", "list")
    assert found.status == 0 and "tales-q8_0, tales" in found.out
    assert {entry["name"] for entry in json.loads(forge("models", "list", "--json").out)} >= {"tales-q8_0"}


def test_the_version(forge):
    assert forge("--version").out.startswith("forge ")


def test_help_has_its_panels(forge):
    out = forge("--help").out
    for expected in ("Chapters", "Run", "Inspect", "Measure", "generate", "kv-cache", "doctor"):
        assert expected in out


@pytest.mark.parametrize(
    "command",
    [
        "generate",
        "compare",
        "chapters",
        "chapter",
        "next",
        "naive",
        "kv-cache",
        "kernels",
        "speculation",
        "chat",
        "models",
        "doctor",
    ],
)
def test_every_command_has_help(forge, command):
    found = forge(command, "--help")
    assert found.status == 0 and "Usage" in found.out
