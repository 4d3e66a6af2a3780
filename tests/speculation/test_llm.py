"""`LLM(speculate=…)`: real models, from a file to tokens, beside the same model without speculation."""

from pathlib import Path

import pytest

from forge import LLM, SamplingParams, UsageError
from forge.speculation.leases import LeaseRevoked
from tests.small_models import small_tokenizer, write_small_qwen3

PROMPTS = ["the hat on the hat on", "a", "in the then in the then"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "target": write_small_qwen3(folder / "target.gguf", tensor_type="Q8_0", seed=1),
        "same": write_small_qwen3(folder / "same.gguf", tensor_type="F32", seed=1),
        "other": write_small_qwen3(folder / "other.gguf", tensor_type="Q4_0", num_layers=1, seed=2),
    }


def outputs(llm: LLM, params=GREEDY, prompts=PROMPTS) -> list:
    return [[(one.token_ids, one.text) for one in output.outputs] for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain(files) -> dict[str, list]:
    llm = LLM(files["target"], kv="basic", threads=1, max_model_len=96)
    return {"greedy": outputs(llm), "sampled": outputs(llm, SAMPLED)}


@pytest.mark.parametrize("kv", ["off", "basic", "paged", "prefix"])
@pytest.mark.parametrize(
    "guessing",
    [
        {"speculate": "ngram"},
        {"speculate": "draft", "draft": "same"},
        {"speculate": "draft", "draft": "other"},
        {"speculate": "draft", "draft": ["same", "other"]},
    ],
    ids=["ngram", "same", "other", "both"],
)
def test_speculative_decode_greedy_matches_target_only_greedy_for_real_models(kv, guessing, files, plain):
    names = guessing.get("draft", [])
    drafts = files[names] if isinstance(names, str) else [files[name] for name in names]
    for k, num_blocks in ((1, None), (4, None), (5, 9)):
        small = {"num_blocks": num_blocks, "block_size": 8} if num_blocks and kv in ("paged", "prefix") else {}
        llm = LLM(
            files["target"],
            kv=kv,
            threads=1,
            max_model_len=96,
            max_num_seqs=4,
            k=k,
            speculate_fixed=True,
            **{**guessing, "draft": drafts},
            **small,
        )
        assert outputs(llm) == plain["greedy"]
        assert outputs(llm, SAMPLED) == plain["sampled"]


@pytest.mark.parametrize(("k", "kv_dtype"), [(1, None), (3, None), (8, None), (3, "int8")])
def test_speculative_batched_verify_paged_matches_sequential_decode_one(k, kv_dtype, files):
    """The logits that each token was chosen from, bit for bit."""
    logits = []
    for speculate in ("off", "draft"):
        llm = LLM(
            files["target"],
            kv="paged",
            threads=1,
            speculate=speculate,
            draft=files["same"] if speculate == "draft" else (),
            k=k,
            kv_dtype=kv_dtype,
            max_model_len=96,
            speculate_fixed=True,
        )
        run = llm.start(PROMPTS[:1], GREEDY, keep_logits=True)
        forwards = len(list(run))
        logits.append([row.tobytes() for row in run.logits])

    assert logits[0] == logits[1]
    assert forwards < 24


def test_guesses_can_be_switched_between_runs(files, plain):
    llm = LLM(files["target"], kv="paged", threads=1, max_model_len=96, speculate_fixed=True)
    assert llm.engine.proposers == ()
    for mode, drafts, names in (
        ("ngram", (), ["ngram"]),
        ("draft", files["other"], ["other"]),
        ("draft", [files["other"]] * 2, ["other", "other #2"]),
        ("off", (), []),
    ):
        llm.speculate_with(mode, drafts)
        assert [proposer.name for proposer in llm.engine.proposers] == names
        assert outputs(llm) == plain["greedy"]


def test_a_sampled_run_with_a_draft_can_be_repeated(files):
    found = [
        outputs(
            LLM(files["target"], kv=kv, threads=1, speculate="draft", draft=files["same"], max_model_len=96), SAMPLED
        )
        for kv in ("basic", "paged")
    ]

    assert found[0] == found[1]


def test_a_draft_with_another_tokenizer_is_refused(files, tmp_path):
    tokens = list(small_tokenizer(288)["tokenizer.ggml.tokens"])
    tokens[60], tokens[61] = tokens[61], tokens[60]
    draft = write_small_qwen3(tmp_path / "swapped.gguf", metadata={"tokenizer.ggml.tokens": tokens})

    with pytest.raises(UsageError, match="the draft model cannot draft for this target: token 60 is"):
        LLM(files["target"], threads=1, speculate="draft", draft=draft)


def test_the_bundled_draft_says_what_to_do_where_it_cannot_guess(files):
    with pytest.raises(UsageError, match="give one that can with --draft MODEL, or take --speculate ngram"):
        LLM(files["target"], threads=1, speculate="draft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "medusa"}, "unknown --speculate 'medusa'; supported: off, draft, ngram"),
        ({"speculate": "ngram", "k": 0}, "--k is how many draft tokens to propose at a time, 1 to 64, got 0"),
        ({"speculate": "ngram", "k": 65}, "got 65"),
        ({"speculate": "draft", "draft": "nowhere.gguf"}, "nowhere.gguf"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message, files):
    with pytest.raises(UsageError, match=message):
        LLM(files["target"], threads=1, **options)


def test_a_revoked_target_is_released(files):
    import gc
    import weakref

    llm = LLM(files["target"], kv="paged", threads=1, max_model_len=96)
    alive = weakref.ref(llm.model)
    run = llm.start(PROMPTS, GREEDY)
    for _, _ in zip(range(3), run, strict=False):
        pass
    llm.lease().revoke()
    for _ in run:
        pass
    gc.collect()

    assert alive() is None
    assert [one.finish_reason for output in run.outputs for one in output.outputs] == ["error"] * 3
    assert all("target model was revoked" in output.outputs[0].errors[0] for output in run.outputs)
    with pytest.raises(LeaseRevoked):
        llm.generate(PROMPTS, GREEDY)


def test_speculation_that_began_in_a_chat_goes_on_with_the_kept_cache(files):
    answers = []
    for speculate in ("off", "ngram"):
        session = LLM(files["target"], kv="paged", threads=1, speculate=speculate, speculate_fixed=True).chat_session()
        said = []
        for text in ("the hat on the hat", "on the hat"):
            turn = session.send(text, GREEDY)
            for _ in turn:
                pass
            said.append(turn.outputs[0].outputs[0].token_ids)
        answers.append(said)

    assert answers[0] == answers[1]


@pytest.mark.parametrize("neighbour", [False, True])
def test_a_seed_is_a_seed_beside_a_neighbour_with_a_draft_and_without(neighbour):
    """A neighbour takes budget, so K shrinks: the tokens stay those of the target alone."""
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=7, ignore_eos=True)
    alone = LLM("tales", kv="paged").generate(["Once upon a time"], params)[0].outputs[0].token_ids
    llm = LLM("tales", kv="paged", speculate="draft", max_num_batched_tokens=64)
    run, lengths = iter(drafted := llm.start(["Once upon a time"], params)), set()
    for step, record in enumerate(run):
        lengths |= {len(cycle.proposed) for cycle in record.cycles}
        if step == 2 and neighbour:
            llm.engine.add_request("neighbour", [5] * 600, SamplingParams(max_tokens=4))

    assert drafted.outputs[0].outputs[0].token_ids == alone
    assert max(lengths) > 1


def test_an_unknown_acceptance_rule_is_refused(files):
    with pytest.raises(UsageError, match="unknown --acceptance 'typical'; supported: gumbel, rejection"):
        LLM(files["target"], threads=1, acceptance="typical")


@pytest.mark.parametrize("params", ["greedy", "sampled"])
def test_the_draft_may_be_on_another_device(files, plain, params):
    llm = LLM(
        files["target"],
        kv="basic",
        threads=1,
        max_model_len=96,
        speculate="draft",
        draft=files["other"],
        draft_device="reference",
        speculate_fixed=True,
    )
    (draft,) = llm.engine.proposers
    assert type(draft.model.backend).__name__ == "ReferenceBackend" != type(llm.model.backend).__name__
    assert outputs(llm, {"greedy": GREEDY, "sampled": SAMPLED}[params]) == plain[params]


@pytest.mark.parametrize(
    ("draft_device", "kv_dtype", "expected"),
    [(None, None, "int8"), ("reference", None, "float32"), ("reference", "float16", "float16")],
)
def test_a_draft_keeps_keys_as_its_device_can_unless_told_otherwise(files, draft_device, kv_dtype, expected):
    llm = LLM(
        files["target"],
        threads=1,
        max_model_len=96,
        speculate="draft",
        draft=files["other"],
        draft_device=draft_device,
        kv_dtype=kv_dtype,
    )
    (draft,) = llm.engine.proposers
    assert draft.storage.layout.kv_dtype == expected


def test_a_draft_device_that_there_is_none_of_is_refused_before_anything_is_loaded():
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        LLM("no such model", speculate="draft", draft_device="tpu")
