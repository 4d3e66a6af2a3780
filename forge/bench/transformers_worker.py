"""Hugging Face transformers as a contender: Qwen3ForCausalLM in bfloat16, its weights dequantized from the same file.

transformers reads GGUF files itself where `accelerate` is installed, and Hugging Face folders of course; otherwise
forge's reader gives it the weights. It multiplies in bfloat16 whatever the file holds, so it reads two bytes per weight
where forge reads one, or half of one.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from forge.bench.worker import Missing, peak_memory, plural, serve, take_turn, timed
else:
    from worker import Missing, peak_memory, plural, serve, take_turn, timed

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
        transformers.Qwen3ForCausalLM  # noqa: B018 (imported on first use, which is no part of loading a file)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch, self._cache_type = torch, transformers.DynamicCache
        try:
            (found, reader), seconds = timed(lambda: _load(model, torch, transformers))
        except Exception as error:
            raise Missing(f"transformers {transformers.__version__} does not load this model: {error}") from None
        self._model = found.eval()
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        description = f"{versions}, {plural(threads)}, bfloat16, weights read by {reader}"
        return {"description": description, "seconds": seconds, "first_time": False}

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
            lambda: self._model(self._step_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        )
        self._top_tokens = output.logits[:, -1].argmax(-1).tolist()
        if self._past:
            self._cache.crop(-self._step_ids.shape[1])  # takes this many off the end
        return seconds


def _load(path: str, torch, transformers):
    """The model, and who read its weights."""
    if os.path.isdir(path):
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), "transformers"
    if find_spec("accelerate") is None and find_spec("forge") is not None:
        return _read_by_forge(path, torch, transformers), "forge"
    folder, file = os.path.split(os.path.abspath(path))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    return model, "transformers"


def _read_by_forge(path: str, torch, transformers):
    """Qwen3ForCausalLM with the file's weights dequantized and rounded to bfloat16."""
    from pathlib import Path

    from forge.model.config import expected_tensors
    from forge.model.hf_directory import hugging_face_name
    from forge.model.weight_source import open_weights

    with open_weights(Path(path)) as source:
        ours = source.config
        config = transformers.Qwen3Config(
            vocab_size=ours.vocab_size,
            hidden_size=ours.hidden_size,
            intermediate_size=ours.intermediate_size,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_attention_heads,
            num_key_value_heads=ours.num_key_value_heads,
            head_dim=ours.head_dim,
            rms_norm_eps=ours.rms_norm_eps,
            max_position_embeddings=ours.max_position_embeddings,
            tie_word_embeddings=ours.tie_word_embeddings,
            rope_theta=ours.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
            attention_bias=False,
        )
        with torch.device("meta"):  # no memory yet, and nothing drawn at random
            model = transformers.Qwen3ForCausalLM(config)
        weights = {
            hugging_face_name(name): torch.from_numpy(source.tensor(name).dequantize()).bfloat16()
            for name in expected_tensors(ours)
        }
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise RuntimeError(f"no weight for {left[0]}")
    return model


if __name__ == "__main__":
    contender = TransformersContender()
    serve({"load": contender.load, "prepare": contender.prepare, "turn": contender.turn, "memory": peak_memory})
