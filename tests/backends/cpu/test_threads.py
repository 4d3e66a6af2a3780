"""Engines in several threads on one backend: its program, context and thread pool serve one forward at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest

from forge import LLM, SamplingParams
from forge.backends.devices import create_backend
from forge.engine.engine import Engine
from forge.model.loader import load_model
from tests.small_models import write_small_qwen3

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], list(range(9, 40))]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
ROUNDS, THREADS = 4, 3


@pytest.fixture(scope="module")
def llms(tmp_path_factory) -> list[LLM]:
    """As many as there are threads, on one loaded model."""
    path = write_small_qwen3(tmp_path_factory.mktemp("models") / "small.gguf", hidden_size=128, num_layers=4)
    loaded = load_model(path, partial(create_backend, "cpu", 2))
    return [LLM(loaded, kv="paged") for _ in range(THREADS)]


def generate(engine: Engine) -> list[tuple[int, ...]]:
    """The tokens that follow each prompt, one request after another."""
    tokens = []
    for prompt in PROMPTS:
        engine.add_request("request", prompt, GREEDY)
        while engine.has_unfinished():
            engine.step()
        tokens.append(engine.output("request").outputs[0].token_ids)
        engine.forget("request")
    return tokens


@pytest.mark.parametrize(
    "engines",
    [
        lambda llms: [llm.engine for llm in llms],
        lambda llms: [llms[0].new_engine() for _ in range(THREADS)],
    ],
    ids=["an LLM each", "an engine each"],
)
def test_engines_in_threads_give_the_tokens_of_one_alone(llms, engines: Callable[[Sequence[LLM]], list[Engine]]):
    expected = generate(llms[0].new_engine())
    start = Barrier(THREADS)

    def work(engine: Engine) -> list[list[tuple[int, ...]]]:
        start.wait(60)
        return [generate(engine) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, engines(llms)))
    assert found == [[expected] * ROUNDS] * THREADS


def test_logits_and_tokens_may_be_wanted_at_once(llms):
    expected = generate(llms[0].new_engine()), llms[1].logits(PROMPTS[2])
    start = Barrier(2)

    def tokens():
        start.wait(60)
        return [generate(llms[0].engine) for _ in range(ROUNDS)]

    def logits():
        start.wait(60)
        return [llms[1].logits(PROMPTS[2]).tobytes() for _ in range(8 * ROUNDS)]

    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.submit(tokens), pool.submit(logits)
    assert ours.result() == [expected[0]] * ROUNDS
    assert theirs.result() == [expected[1].tobytes()] * 8 * ROUNDS
