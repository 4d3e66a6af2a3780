"""Hugging Face transformers as a contender: Qwen3ForCausalLM in bfloat16, its weights dequantized from the same file.

transformers reads GGUF files of this architecture itself, and Hugging Face folders of course. It multiplies in
bfloat16 whatever the file holds, so it reads two bytes per weight where forge reads one, or half of one.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

if __package__:
    from forge.bench.worker import Missing, peak_memory, serve, take_turn, timed
else:
    from worker import Missing, peak_memory, serve, take_turn, timed

    sys.path.pop(0)  # this folder's modules are not for others to find


class TransformersContender:
    """One loaded model, and the cache of the case at hand."""

    def __init__(self):
        self._model = None
        self._expected = 0.0

    def load(self, model: str, threads: int, max_context: int) -> Mapping[str, Any]:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import torch
            import transformers
        except Exception as error:  # a shared library that does not load raises what it likes
            raise Missing(f"transformers is not importable in {sys.executable}: {error}") from None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch, self._cache_type = torch, transformers.DynamicCache
        folder, file = (model, None) if os.path.isdir(model) else os.path.split(os.path.abspath(model))

        def ready():
            options = {} if file is None else {"gguf_file": file}
            found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
            self._model = found.eval()

        try:
            _, seconds = timed(ready)
        except Exception as error:
            raise Missing(f"transformers {transformers.__version__} does not load this model: {error}") from None
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return {"description": f"{versions}, {threads} threads, bfloat16", "seconds": seconds, "first_time": False}

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        self._past = context
        ids = self._torch.tensor(token_ids)
        self._cache = self._cache_type()
        if context:
            self._model(ids[:, :context], past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._step_ids = ids[:, context:]
        self._expected = self._step()
        return {"setting": f"bfloat16, attention {self._model.config._attn_implementation}", "seconds": self._expected}

    def turn(self, min_steps: int, min_seconds: float) -> Mapping[str, Any]:
        seconds = take_turn(self._step, min_steps, min_seconds, self._expected)
        self._expected = seconds[-1]
        return {"seconds": seconds, "top_tokens": self._top_tokens}

    def _step(self) -> float:
        if self._past == 0:
            self._cache = self._cache_type()
        output, seconds = timed(
            lambda: self._model(
                self._step_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        )
        self._top_tokens = output.logits[:, -1].argmax(-1).tolist()
        if self._past:
            self._cache.crop(self._past)
        return seconds


if __name__ == "__main__":
    contender = TransformersContender()
    serve(
        {"load": contender.load, "prepare": contender.prepare, "turn": contender.turn, "memory": peak_memory}
    )
