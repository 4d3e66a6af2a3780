"""The engine on the `cuda` backend: every cache kind, batches, and what `--invariant` promises of them."""

import numpy as np
import pytest

from forge import LLM, SamplingParams
from forge import llm as llm_module
from forge.backends.cuda import backend as backend_module
from forge.backends.cuda.backend import CudaBackend
from forge.backends.reference import ReferenceBackend
from forge.cache.factory import KV_MODES
from tests.backends.cuda.test_graphs import StandIn
from tests.backends.cuda.test_invariance import rows_alike  # noqa: F401 (a fixture)
from tests.slow import mostly_slow
from tests.small_models import write_small_qwen3

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPTS = ([5, 9, 200, 31, 7, 44, 12], [3, 3, 8], [250, 1, 17, 90, 2])


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(write_small_qwen3(tmp_path_factory.mktemp("model") / "m.gguf", num_layers=1, seed=3))


@pytest.fixture
def engine_on(path, monkeypatch):
    def make(backend, kv: str = "basic", **options) -> LLM:
        monkeypatch.setattr(llm_module, "create_backend", lambda *_, **__: backend)
        blocks = {} if kv == "off" else {"block_size": 4}
        return LLM(path, kv=kv, kv_dtype="float32", max_model_len=32, **blocks, **options)

    return make


def tokens_of(llm: LLM, prompts=PROMPTS) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), GREEDY)]


@pytest.mark.parametrize("kv", mostly_slow(KV_MODES, quick=["off", "prefix"]))
def test_plain_operations_say_what_the_reference_says(kv, engine_on, device):
    want = tokens_of(engine_on(ReferenceBackend(), kv))

    assert tokens_of(engine_on(CudaBackend(device, kernels="torch", dtype="float32"), kv)) == want


@pytest.mark.slow
def test_fused_kernels_say_what_the_reference_says(engine_on, device):
    want = tokens_of(engine_on(ReferenceBackend()))

    assert tokens_of(engine_on(CudaBackend(device, dtype="float32"))) == want


@pytest.mark.slow
def test_with_one_tiling_the_logits_bits_are_the_same_in_every_cache_and_batch(engine_on, device, rows_alike):  # noqa: F811
    def logits(kv: str, prompts) -> list[np.ndarray]:
        run = engine_on(CudaBackend(device, invariant=True), kv).start(list(prompts), GREEDY, keep_logits=True)
        for _ in run:
            pass
        return run.logits

    want = logits("off", PROMPTS[:1])
    for kv in KV_MODES[1:]:
        got = logits(kv, PROMPTS if kv == "basic" else PROMPTS[:1])
        assert len(got) == len(want) == GREEDY.max_tokens
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(got, want, strict=True)), kv


@pytest.mark.slow
def test_steps_launched_before_the_tokens_are_known_say_the_same(engine_on, device, monkeypatch):
    """Sequences end at different steps, so some rows are wasted; and some draw their tokens, on the device."""
    if device == "cpu":
        monkeypatch.setattr(backend_module, "Graphs", StandIn)
    drawn = SamplingParams(max_tokens=5, temperature=0.8, seed=3, top_p=0.9, frequency_penalty=0.5, ignore_eos=True)

    planned_ahead = {True: 0, False: 0}

    def said(runs_ahead: bool) -> list[tuple[int, ...]]:
        backend = CudaBackend(device, dtype="float32", graphs=True, runs_ahead=runs_ahead)
        engine = engine_on(backend, "prefix").engine
        found = []
        for turn, params in enumerate(
            [[SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (6, 3)], [GREEDY, drawn]]
        ):
            names = [f"{turn}-{number}" for number in range(len(params))]
            for name, prompt, each in zip(names, PROMPTS, params, strict=False):
                engine.add_request(name, prompt, each)
            while engine.has_unfinished():
                planned_ahead[runs_ahead] += engine.step().planned_ahead
            found += [engine.output(name).outputs[0].token_ids for name in names]
        assert backend.execution.mode == "graph"
        return found

    assert said(runs_ahead=True) == said(runs_ahead=False)
    assert planned_ahead == {True: 7, False: 0}


@pytest.mark.slow
def test_each_record_says_how_its_step_was_launched(engine_on, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(backend_module, "Graphs", StandIn)
    llm = engine_on(CudaBackend(device, dtype="float32", graphs=True), "paged")

    executions = [record.execution for record in llm.start(list(PROMPTS[:1]), GREEDY)]

    assert executions[0].reason == "the first step of this shape"
    assert [each.mode for each in executions] == ["eager", "eager", "graph", "graph"]
    assert executions[-1].reason == "captured for 1 rows"


@pytest.mark.parametrize("kv", mostly_slow(["basic", "paged", "prefix"], quick=["prefix"]))
def test_steps_planned_ahead_say_what_the_reference_says(kv, engine_on, device):
    params = SamplingParams(max_tokens=9, temperature=0.0)
    prompts = [*PROMPTS, [9, 9]]
    want = [o.outputs[0].token_ids for o in engine_on(ReferenceBackend()).generate(prompts, params)]
    llm = engine_on(CudaBackend(device, dtype="float32", runs_ahead=True), kv)
    run = llm.start(prompts, params)
    records = []
    for record in run:
        llm.engine.scheduler.check_invariants()
        records.append(record)

    assert llm.model.runs_ahead
    assert [output.outputs[0].token_ids for output in run.outputs] == want
    assert sum(record.planned_ahead for record in records) >= 5
