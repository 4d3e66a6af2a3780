"""`LLM` on the `cuda` backend needs the standard library, NumPy, torch and Triton alone."""

import os
import subprocess
import sys

import pytest

from tests.backends.cuda.bare_machine import bare_environment, refused_packages

GENERATE = """
from forge import SamplingParams
from forge.model.synth import synthetic_config
from tests.backends.cuda.drawn_model import drawn_llm
from tests.backends.cuda.interpreter import repaired_interpreter

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
config = synthetic_config(num_layers=1, head_dim=16, vocab_size=270, **sizes)
with repaired_interpreter():
    for kv in ("paged", "prefix"):
        llm = drawn_llm(config, device="cpu", kv=kv, max_model_len=32)
        for params in ({}, {"temperature": 1.0, "seed": 1}, {"frequency_penalty": 1.0, "logprobs": 2}):
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True, **params))
            assert len(output.outputs[0].token_ids) == 2
"""


@pytest.mark.slow
def test_the_core_path_needs_no_package_but_numpy_torch_and_triton(tmp_path):
    """Prefills and decodes, greedy and drawn. A draw looks for llvmlite, to run in machine code, and goes without."""
    assert {"gguf", "numba", "tokenizers", "typer", "rich"} <= refused_packages()
    refused = tmp_path / "refused"
    environment = os.environ | bare_environment(refused)
    done = subprocess.run([sys.executable, "-c", GENERATE], env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    missed = {line.split()[0] for line in refused.read_text().splitlines()} if refused.exists() else set()
    assert missed <= {"llvmlite"}
