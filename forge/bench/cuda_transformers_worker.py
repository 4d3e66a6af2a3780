"""Hugging Face transformers on the GPU as a contender, each at its best: a static cache compiled with CUDA graphs for
steps, and its own continuous batching for requests. bfloat16, on the same weights.

Where compiling fails, steps run uncompiled with the same cache, and the setting says so.
"""

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from forge.bench.worker import Missing, one_line, peak_memory, serve, take_turn, timed
else:
    from worker import Missing, one_line, peak_memory, serve, take_turn, timed

    sys.path.pop(0)  # this folder's modules are not for others to find


class CudaTransformersContender:
    """One loaded model, and the static cache of the case at hand."""

    def __init__(self):
        self._model = None
        self._cache: Any = None
        self._expected = 0.0

    def load(self, model: str, max_context: int, max_sequences: int, kv: str) -> Mapping[str, Any]:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import torch
            import transformers

            from forge.bench.transformers_worker import _load
        except Exception as error:  # a shared library that does not load raises what it likes
            raise Missing(f"transformers is not importable in {sys.executable}: {error}") from None
        if not torch.cuda.is_available():
            raise Missing(f"torch {torch.__version__} sees no GPU")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("high")
        self._torch, self._transformers = torch, transformers
        try:
            (found, reader), seconds = timed(lambda: _load(model, torch, transformers))
        except Exception as error:
            raise Missing(f"transformers {transformers.__version__} does not load this model: {error}") from None
        self._model, more = timed(lambda: found.eval().cuda())
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        description = f"{versions}, bfloat16, weights read by {reader}"
        return {"description": description, "seconds": seconds + more}

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        torch = self._torch
        torch._dynamo.reset()
        ids = torch.tensor(token_ids, device="cuda")
        length = ids.shape[1]
        room = -(-(length + 1) // 64) * 64
        self._cache = self._transformers.StaticCache(config=self._model.config, max_cache_len=room)
        if context:
            self._model(ids[:, :context], past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._ids = ids[:, context:].contiguous()
        self._positions = torch.arange(context, length, device="cuda")[None]
        setting, self._forward = (
            "static cache, compiled, CUDA graphs",
            torch.compile(self._model, mode="reduce-overhead", dynamic=False),
        )
        try:
            for _ in range(4):
                self._expected = self._step()
        except Exception as error:
            setting, self._forward = f"static cache, uncompiled ({one_line(error)[:80]})", self._model
            self._expected = self._step()
        return {"setting": setting, "seconds": self._expected}

    def turn(self, min_steps: int, min_seconds: float) -> Mapping[str, Any]:
        seconds = take_turn(self._step, min_steps, min_seconds, self._expected)
        self._expected = seconds[-1]
        return {"seconds": seconds, "top_tokens": self._top_tokens}

    def requests(
        self, prompt_tokens: int, output_tokens: int, concurrency: int, requests: int, seed: int
    ) -> Mapping[str, Any]:
        """Its continuous batching, `concurrency` requests at a time, through the manager that its server uses too."""
        from forge.bench.cuda_load import drive, unique_prompts

        self._cache = None
        config = self._transformers.GenerationConfig(
            max_new_tokens=output_tokens, do_sample=False, use_cache=True, eos_token_id=-1
        )
        prompts = [
            unique_prompts(count, prompt_tokens, self._model.config.vocab_size, seed + extra)
            for count, extra in ((3 * concurrency, 1), (requests, 0))
        ]
        try:
            manager = self._model.init_continuous_batching(generation_config=config)
            manager.warmup()  # its CUDA graphs
            manager.start()
        except Exception as error:
            raise Missing(f"no continuous batching here: {one_line(error)}") from None
        try:
            drive(_Manager(manager), prompts[0], output_tokens, concurrency)
            moments, seconds = drive(_Manager(manager), prompts[1], output_tokens, concurrency)
        finally:
            manager.stop(block=True)
        return {
            "setting": "its continuous batching, in process",
            "seconds": seconds,
            "first_token": [each.first_token for each in moments],
            "end": [each.end for each in moments],
        }

    def _step(self) -> float:
        torch = self._torch
        torch.cuda.synchronize()
        started = time.perf_counter()
        output = self._forward(
            self._ids,
            past_key_values=self._cache,
            position_ids=self._positions,
            use_cache=True,
            logits_to_keep=1,
        )
        self._top_tokens = output.logits[:, -1].argmax(-1).tolist()  # a step is over when the host knows its tokens
        seconds = time.perf_counter() - started
        for layer in self._cache.layers:  # back to where the step began, so that the next one does the same
            layer.cumulative_length.sub_(self._ids.shape[1])
        return seconds


class _Manager:
    """A continuous batching manager as a `LoadedEngine`. It streams, so that a first token can be seen."""

    def __init__(self, manager):
        self._manager = manager
        self._numbers: dict[str, int] = {}

    def add(self, prompt, output_tokens: int) -> int:
        number = len(self._numbers)
        request_id = self._manager.add_request(
            list(prompt), max_new_tokens=output_tokens, streaming=True, eos_token_id=-1
        )
        self._numbers[request_id] = number
        return number

    def step(self):
        result = self._manager.get_result(timeout=60)
        if result is None:
            raise RuntimeError("its continuous batching gave no result for a minute")
        if result.error:
            raise RuntimeError(result.error)
        number = self._numbers[result.request_id]
        return ([number] if result.generated_tokens else []), ([number] if result.is_finished() else [])


if __name__ == "__main__":
    contender = CudaTransformersContender()
    serve(
        {
            "load": contender.load,
            "prepare": contender.prepare,
            "turn": contender.turn,
            "requests": contender.requests,
            "memory": peak_memory,
        }
    )
