"""classify, score, logprobs, embed, rerank, oneshot, and comparisons of many requests: what they print, and refuse."""

import json
import math

import pytest


@pytest.fixture
def lines(tmp_path) -> str:
    path = tmp_path / "lines.txt"
    path.write_text("the tin hat\n\non a ship there\nin the heat\nthe tin hat on\nthin\n", encoding="utf-8")
    return str(path)


def test_classify_one_text(forge, small):
    found = forge("classify", "--labels", "a,b", "the tin hat", *small)
    assert found.status == 0 and found.err == ""
    assert found.out.splitlines()[0].split() == ["label", "probability", "logprob"]


def test_classify_a_file_as_json(forge, small, lines):
    found = json.loads(forge("classify", "--labels", "happy, sad", "--file", lines, "one more", *small, "--json").out)
    assert [one["text"] for one in found["results"]][:2] == ["one more", "the tin hat"]
    assert len(found["results"]) == 6
    for one in found["results"]:
        assert sum(one["probabilities"].values()) == pytest.approx(1)
        assert one["label"] == max(one["logprobs"], key=one["logprobs"].get)


def test_classify_asks_what_it_is_told_to(forge, small):
    def logprobs(*extra):
        found = json.loads(forge("classify", "--labels", "a,b", "the tin hat", *small, "--json", *extra).out)
        return found["results"][0]["logprobs"]

    assert len({json.dumps(logprobs(*extra)) for extra in ((), ("--raw",), ("--question", "Which?"))}) == 3


def test_score_adds_up(forge, small):
    found = json.loads(forge("score", "the tin", " hat on a ship", "--top", "2", *small, "--json").out)
    logprobs = [token["logprob"] for token in found["tokens"]]
    assert found["total"] == pytest.approx(sum(logprobs))
    assert found["perplexity"] == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)))
    assert all(len(token["top"]) == 2 for token in found["tokens"])
    assert "".join(token["token"] for token in found["tokens"]) == " hat on a ship"
    assert "perplexity" in forge("score", "the tin", " hat", *small).out


def test_logprobs_of_a_text_are_its_score(forge, small):
    found = json.loads(forge("logprobs", "the tin hat", *small, "--json").out)
    whole = json.loads(forge("score", "", "the tin hat", "--top", "5", *small, "--json").out)
    assert found == whole
    assert "likeliest there" in forge("logprobs", "the tin hat", "--top", "3", *small).out


def test_embed_as_table_and_json(forge, small):
    found = forge("embed", "the tin hat", "on a ship", "the tin hat", *small)
    assert found.status == 0
    assert found.out.splitlines()[2].split()[:4] == ["1", "1.000", found.out.splitlines()[2].split()[2], "1.000"]
    facts = json.loads(forge("embed", "the tin hat", "on a ship", "--pooling", "mean", *small, "--json").out)
    vectors = [one["embedding"] for one in facts["embeddings"]]
    assert facts["pooling"] == "mean" and facts["dimensions"] == len(vectors[0]) == 64
    assert sum(value * value for value in vectors[0]) == pytest.approx(1, abs=1e-5)
    assert facts["cosines"][0][1] == pytest.approx(sum(a * b for a, b in zip(*vectors, strict=True)), abs=1e-5)


def test_embedding_many_texts_shows_the_nearest(forge, small, tmp_path):
    path = tmp_path / "many.txt"
    path.write_text("\n".join(f"the {'tin ' * (number % 7)}hat {number}" for number in range(14)), encoding="utf-8")
    found = forge("embed", "--file", str(path), *small)
    assert found.status == 0 and "nearest" in found.out and "14 texts" in found.out


def test_rerank_by_embedding(forge, small, lines):
    found = json.loads(forge("rerank", "--query", "the tin hat", lines, "--by", "embedding", *small, "--json").out)
    scores = [one["score"] for one in found["ranking"]]
    assert scores == sorted(scores, reverse=True)
    assert found["ranking"][0]["document"] == "the tin hat" and scores[0] == pytest.approx(1, abs=1e-5)
    assert forge("rerank", "--query", "the tin hat", lines, "--by", "embedding", *small).out.startswith("the tin hat")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["classify", "text"], "two labels or more"),
        (["classify", "--labels", "a", "text"], "two labels or more"),
        (["classify", "--labels", "a,a", "text"], "the same tokens"),
        (["classify", "--labels", "a,b"], "there is no text"),
        (["classify", "--labels", "a,b", "--raw", "--question", "x", "text"], "give one of the two"),
        (["classify", "--labels", "a,b", "--file", "/nowhere"], "No such file"),
        (["classify", "--labels", "a,b", "--raw", ""], "a text is empty"),
        (["classify", "--labels", "a,b", "x", "--prefill-only-tokens", "0"], "--prefill-only-tokens must be"),
        (["classify", "--labels", "a,b", "x", "--oneshot-tokens", "9"], "is called --prefill-only-tokens now"),
        (["classify", "--labels", "a,b", "x", "--prefill-only-memory", "much"], "--prefill-only-memory takes a size"),
        (["score", "a", ""], "nothing to score"),
        (["score", "a", "b", "--top", "-1"], "--top is a number"),
        (["logprobs", "x"], "nothing to score"),
        (["embed"], "there is no text"),
        (["embed", "x", "--pooling", "best"], "supported: last, mean"),
        (["rerank", "--query", "q", "/nowhere"], "No such file"),
        (["oneshot", "--requests", "0", "--json"], "--requests must be at least 1"),
        (["compare", "--class", "generation", "vs", "oneshot", "-n", "2"], "--class is generation or prefill-only"),
        (["compare", "--prefix-planning", "off", "vs", "perhaps", "-n", "2"], "write --prefix-planning on vs off"),
        (["bench", "oneshot", "--concurrency", "none"], "--concurrency takes"),
        (["bench", "oneshot", "--only", "all"], "unknown part"),
        (["bench", "prefix-planning", "--reps", "0"], "at least 1"),
        (["bench", "tokenizer", "/nowhere.gguf"], "nowhere"),
    ],
)
def test_a_mistake_is_one_clear_line(forge, small, args, message):
    found = forge(*args, *(() if "tokenizer" in args else small))
    assert found.status != 0 and found.out == ""
    assert message in found.err and found.err.count("\n") == 1


def test_the_hash_model_has_no_embeddings_and_says_so(forge):
    found = forge("embed", "a", "b", "-m", "hash")
    assert found.status != 0 and "no hidden states" in found.err and found.err.count("\n") == 1


def test_oneshot_compares_both_classes(forge):
    facts = json.loads(forge("oneshot", "--requests", "6", "-m", "hash", "--json").out)
    generation, prefill_only = facts["sides"]
    assert facts["identical"] and facts["requests"] == 6
    assert (generation["value"], prefill_only["value"]) == ("generation", "prefill-only")
    assert prefill_only["blocks_held"] == prefill_only["block_table_entries"] == 0
    assert generation["blocks_held"] > 0 and generation["block_table_entries"] > 0
    assert prefill_only["steps"] < generation["steps"]
    assert "✓ identical" in forge("oneshot", "--only", "run", "--requests", "3", "-m", "hash").out


def test_compare_classes(forge):
    found = forge("compare", "--class", "generation", "vs", "prefill-only", "--requests", "5", "-m", "hash")
    assert found.status == 0 and "✓ identical: 5 tokens of 5 requests" in found.out
    longer = forge("compare", "--class", "generation", "vs", "prefill-only", "--requests", "5", "3", "-m", "hash")
    assert "✓ identical: 15 tokens of 5 requests" in longer.out


def test_compare_planning_on_a_file(forge, tmp_path):
    path = tmp_path / "items.txt"
    path.write_text("\n".join("the same rubric for all of them, " * 3 + str(n) for n in range(8)), encoding="utf-8")
    found = json.loads(
        forge("compare", "--prefix-planning", "off", "vs", "on", "--prompts", str(path), "-m", "hash", "--json").out
    )
    off, on = found["sides"]
    assert found["identical"] and found["option"] == "--prefix-planning"
    assert off["tokens_cached"] == 0 and on["tokens_cached"] == 7 * 96
    assert on["deferred"] == 7 and off["tokens_computed"] - on["tokens_computed"] == 7 * 96


def test_compare_eviction_policies(forge, tmp_path):
    """A rubric that comes back after eight prompts without it, in a pool for six of them."""
    path, rubric = tmp_path / "prompts.txt", "the same rubric for all of them, " * 3
    prompts = [*(f"{rubric}{n}" for n in range(5)), *(letter * 96 for letter in "abcdefgh"), f"{rubric}5"]
    path.write_text("\n".join(prompts), encoding="utf-8")
    line = [
        "compare",
        "--evict",
        "lru",
        "vs",
        "prefix-cost",
        "-m",
        "hash",
        "--num-blocks",
        "42",
        "--prompts",
        str(path),
    ]
    comparison = json.loads(forge(*line, "4", "--json").out)
    oldest, cheapest = comparison["sides"]
    assert comparison["identical"] and (oldest["value"], cheapest["value"]) == ("lru", "prefix-cost")
    assert (oldest["tokens_cached"], cheapest["tokens_cached"]) == (4 * 96 + 12, 5 * 96 + 12)
    assert "14 requests, 4 at a time" in forge(*line, "4").out


def test_compare_one_prompt_in_both_classes(forge):
    found = forge("compare", "--class", "generation", "vs", "prefill-only", "once", "-m", "hash")
    assert "1 request at once" in found.out and "✓ identical" in found.out


def test_bench_oneshot_as_json(forge):
    command = (
        "bench",
        "oneshot",
        "-m",
        "hash",
        "--concurrency",
        "1,4",
        "--reps",
        "1",
        "--prompt-tokens",
        "16",
        "--json",
    )
    facts = json.loads(forge(*command).out)
    assert facts["identical"] and facts["capacity"]["identical"]
    assert [level["concurrency"] for level in facts["levels"]] == [1, 4]
    assert facts["control"]["output_tokens"] == 32
    assert facts["packing"]["tokens"] == 2048
    assert facts["capacity"]["judges"] == 24
    shown = forge("bench", "oneshot", "-m", "hash", "--concurrency", "2", "--reps", "1", "--only", "sweep")
    assert "2 at once" in shown.out and "same tokens" in shown.out


def test_bench_prefix_planning_as_json(forge):
    command = ("bench", "prefix-planning", "-m", "hash", "--requests", "8", "--rubric-tokens", "64", "--reps", "1")
    (facts,) = json.loads(forge(*command, "--json").out)["shared"]
    assert facts["identical"]
    assert facts["tokens_off"] == 8 * 96 and facts["tokens_on"] == 64 + 8 * 32
    assert "faster" in forge(*command).out
