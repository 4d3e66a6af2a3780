"""Run `module:function` of a session, or a small model's generation, where only NumPy, torch and Triton are installed.

What torch itself imports counts as torch. Started by `test_gpu_session.py`; prints what was refused.
"""

import sys

FORBIDDEN = (
    "gguf", "fastapi", "uvicorn", "pydantic", "starlette", "httptools", "orjson", "fastokens", "rich", "typer", "click",
    "tokenizers", "huggingface_hub", "numba", "llvmlite", "transformers", "pytest", "hypothesis", "tests",
)  # fmt: skip


class Refusing:
    refused: list[str] = []  # noqa: RUF012 (one process, one list)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            self.refused.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def generate() -> None:
    """The core path of `--device cuda`, interpreted: a paged cache, greedy and drawn tokens."""
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    from forge import SamplingParams
    from forge.backends.cuda.interpreter import repaired_interpreter
    from forge.bench.drawn_model import drawn_llm
    from forge.model.synth import synthetic_config

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = synthetic_config(num_layers=1, head_dim=16, vocab_size=270, **sizes)
    with repaired_interpreter():
        llm = drawn_llm(config, device="cpu", kv="paged", max_model_len=32)
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=2, temperature=temperature, seed=1, ignore_eos=True)
            (output,) = llm.generate([[5, 6, 7]], params)
            assert len(output.outputs[0].token_ids) == 2


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusing())
    if sys.argv[1] == "generate":
        generate()
    else:
        __import__(sys.argv[1])
        loaded = {name.partition(".")[0] for name in sys.modules}
        print(sorted(loaded - set(sys.stdlib_module_names) - {"forge", "__main__", "_distutils_hack"}))
    print("refused", sorted(set(Refusing.refused)))
