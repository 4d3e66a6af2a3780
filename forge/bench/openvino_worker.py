"""OpenVINO GenAI as a peer: its continuous batching, whose steps are timed one by one, the choice of a token included.

Runs with any interpreter that has `openvino_genai`, without forge too. Its best setting: bfloat16 or float32
between the matrices (8-bit activations need the latter), whichever is faster in the case at hand. Keys and values in
8 bits, as it chooses itself. A decode feeds its own tokens, so its context grows by one with every step.
"""

import os
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any

from forge.bench.worker import Missing, Worker, for_trial, import_peer, plural, timed

SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"},
    "float32": {"INFERENCE_PRECISION_HINT": "f32"},
}
TRIAL_STEPS = 4
"""Steps of each setting when the faster one is chosen."""
BEGIN_EARLIER = 16
"""Tokens before the case's context at which a decode begins, since it moves on."""


class OpenVinoWorker(Worker):
    """One pipeline for each setting, and the requests of the case at hand."""

    def load(self, model: str, threads: int, scratch: str, **others: Any) -> Mapping[str, Any]:
        if os.path.isdir(model):
            raise Missing("OpenVINO GenAI takes part with GGUF files only")
        openvino, openvino_genai = import_peer("openvino-genai", "openvino", "openvino_genai")
        self._openvino, self._library, self._threads, self._folder = openvino, openvino_genai, threads, scratch
        self._pipelines: dict[str, Any] = {}
        self._requests: list[Any] = []
        self._numbers = count()
        link, saved = os.path.join(scratch, "model.gguf"), os.path.join(scratch, "openvino_model.xml")
        if not os.path.exists(link):
            os.symlink(model, link)
        options = {"INFERENCE_NUM_THREADS": threads, "enable_save_ov_model": not os.path.exists(saved)}
        version = f"OpenVINO GenAI {openvino_genai.__version__}"
        try:
            _, seconds = timed(lambda: openvino_genai.LLMPipeline(link, "CPU", **options))
        except Exception as error:
            raise Missing(f"{version} does not load this model: {error}") from None
        return {"description": f"{version}, {plural(threads)}, KV 8 bits", "seconds": seconds, "first_time": False}

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        best = self._set_up_fastest(SETTINGS, partial(self._begin, kind, *for_trial(context, token_ids)), TRIAL_STEPS)
        self._begin(kind, context, token_ids, best)  # not only a short trial: a decode's context has grown
        return {"setting": f"{best}, paged attention, 8-bit KV", "seconds": self._expected}

    def logits(self, token_ids: list[int]) -> Mapping[str, Any]:
        """Return the logits of the last token, computed with the matrices of the faster setting."""
        if not hasattr(self, "_compiled"):
            path = os.path.join(self._folder, "openvino_model.xml")
            self._compiled = self._openvino.Core().compile_model(path, "CPU", self._options("float32"))
        import numpy as np

        request, ids = self._compiled.create_infer_request(), np.array([token_ids])
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "beam_idx": np.zeros(1, np.int32)}
        request.infer(inputs | {"position_ids": np.arange(ids.size)[None]})
        return {"logits": request.get_output_tensor(0).data[0, -1].tolist()}

    def _options(self, setting: str) -> dict[str, Any]:
        return {"INFERENCE_NUM_THREADS": self._threads, **SETTINGS[setting]}

    def _begin(self, kind: str, context: int, token_ids: list[list[int]], setting: str) -> None:
        """Choose the setting's pipeline. For a decode, add the case's requests to it and fill their caches."""
        for request in self._requests:
            request.cancel()
        self._requests = []
        if setting not in self._pipelines:
            config = self._library.SchedulerConfig()
            config.max_num_batched_tokens = config.max_num_seqs = 1 << 16
            config.enable_prefix_caching = False
            self._pipelines[setting] = self._library.ContinuousBatchingPipeline(
                self._folder, config, "CPU", self._options(setting)
            )
        self._top_tokens = []
        self._pipeline, self._prompt = self._pipelines[setting], token_ids[0] if kind == "prefill" else None
        if kind == "decode":
            begun = max(1, context - BEGIN_EARLIER)
            self._requests = [self._add(ids[:begun], 4096) for ids in token_ids]
            self._pipeline.step()

    def _add(self, token_ids: list[int], new_tokens: int) -> Any:
        import numpy as np

        config = self._library.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        tensor = self._openvino.Tensor(np.array([token_ids], np.int64))
        return self._pipeline.add_request(next(self._numbers), tensor, config)

    def _step(self) -> float:
        if self._prompt is None:
            return timed(self._pipeline.step)[1]
        request = self._add(self._prompt, 1)
        _, seconds = timed(self._pipeline.step)
        self._top_tokens = [output.generated_ids[0] for output in request.read_all()]
        return seconds
