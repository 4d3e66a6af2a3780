"""What the CPU promises, on a GPU: `forge compare` ends with 0 only if both sides gave the same tokens."""

import numpy as np
import pytest

from forge import LLM
from forge.cli.main import main

SCENARIOS = (
    "generate Once 16 --kv prefix",
    "generate Once 16 --temperature 0.8 --seed 1 --kv paged --n 3",
    "compare --kv off vs basic Once 24",
    "compare --kv basic vs paged Once 24",
    "compare --kv paged vs prefix Once 24",
    "compare --speculate off vs ngram --kv paged Once 24",
    "compare --speculate off vs draft --kv paged Once 24",
    "compare --batch 1 vs 8 --requests 12",
    "compare --preempt lifo vs least-progressed --requests 12 --num-blocks 24",
    "compare --preemption recompute vs swap --requests 12 --num-blocks 24",
    "compare --chunked-prefill vs --no-chunked-prefill --requests 12",
    "compare --class generation vs prefill-only --requests 12",
    "compare --prefix-planning vs --no-prefix-planning --requests 12",
)


@pytest.mark.parametrize("line", SCENARIOS)
def test_a_scenario_of_the_cpu(line, gpu):
    assert main([*line.split(), "--device", gpu, "--invariant"]) == 0


@pytest.mark.parametrize("options", [{}, {"invariant": True}, {"kernels": "torch"}], ids=str)
def test_the_bundled_model_gives_the_references_logits(options, gpu):
    ids = LLM("tales", device="reference").tokenizer.encode("Once upon a time the old ferryman met a fox")
    want, got = (
        np.asarray(LLM("tales", device=name, **more).logits(ids)) for name, more in (("reference", {}), (gpu, options))
    )
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.05
