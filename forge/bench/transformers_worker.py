"""Hugging Face transformers as a peer: Qwen3ForCausalLM in bfloat16, its weights dequantized from the same file.

transformers reads GGUF files itself where `accelerate` is installed, and Hugging Face folders of course; otherwise
forge's reader gives it the weights. It multiplies in bfloat16 whatever the file holds, so it reads two bytes per weight
where forge reads one, or half of one.

On a GPU it runs at its best: a static cache compiled with CUDA graphs for steps (where compiling fails, uncompiled with
the same cache, and the setting says so), and its own continuous batching for requests.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any

from forge.bench.worker import Missing, Worker, import_peer, one_line, plural, timed

_ALIKE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_theta",
)  # fmt: skip
"""Fields of a configuration that have the same name in transformers and in forge."""


class TransformersWorker(Worker):
    """One loaded model, and the cache of the case at hand."""

    def load(self, model: str, device: str, threads: int | None = None, **others: Any) -> Mapping[str, Any]:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        torch, transformers = import_peer("torch transformers", "torch", "transformers")
        transformers.Qwen3ForCausalLM  # noqa: B018 (imported on first use, which is no part of loading a file)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_grad_enabled(False)
        self._torch, self._library, self._on_gpu = torch, transformers, device == "cuda"
        if self._on_gpu:
            if not torch.cuda.is_available():
                raise Missing(f"torch {torch.__version__} sees no GPU")
            torch.set_float32_matmul_precision("high")
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            (loaded, reader), seconds = timed(lambda: _load(model, torch, transformers))
        except Exception as error:
            raise Missing(f"transformers {transformers.__version__} does not load this model: {error}") from None
        self._model, more = timed(lambda: loaded.eval().cuda() if self._on_gpu else loaded.eval())
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        used = f", {plural(threads)}" if threads is not None else ""
        description = f"{versions}{used}, bfloat16, weights read by {reader}"
        return {"description": description, "seconds": seconds + more, "first_time": False}

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        self._past = context
        ids = self._torch.tensor(token_ids, device="cuda" if self._on_gpu else None)
        setting = f"bfloat16, attention {self._model.config._attn_implementation}"
        if self._on_gpu:
            self._torch._dynamo.reset()
            room = -(-(ids.shape[1] + 1) // 64) * 64
            self._cache = self._library.StaticCache(config=self._model.config, max_cache_len=room)
        else:
            self._cache = self._library.DynamicCache()
        if context:
            self._model(ids[:, :context], past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._step_ids = ids[:, context:].contiguous()  # `[sequences, tokens]` that a step computes
        self._forward, self._positions = self._model, {}
        if self._on_gpu:
            self._positions = {"position_ids": self._torch.arange(context, ids.shape[1], device="cuda")[None]}
            setting = self._compile()
        self._expected = self._step()
        return {"setting": setting, "seconds": self._expected}

    def logits(self, token_ids: list[int]) -> Mapping[str, Any]:
        """Return the logits of the last token."""
        ids = self._torch.tensor([token_ids], device=self._model.device)
        return {"logits": self._model(ids, logits_to_keep=1).logits[0, -1].float().tolist()}

    def _compile(self) -> str:
        """Make the steps run as CUDA graphs, if this release can; return the setting."""
        self._forward = self._torch.compile(self._model, mode="reduce-overhead", dynamic=False)
        try:
            for _ in range(4):
                self._step()
        except Exception as error:
            self._forward = self._model
            return f"static cache, uncompiled ({one_line(error)[:80]})"
        return "static cache, compiled, CUDA graphs"

    def requests(self, load: Any) -> Mapping[str, Any]:
        """Run a closed loop of requests through its continuous batching, with the manager that its server uses too.
        load: a `Load`'s fields."""
        from forge.bench.cases import Load, answered, unique_prompts

        self._cache, load = None, Load(**load)
        config = self._library.GenerationConfig(
            max_new_tokens=load.output_tokens, do_sample=False, use_cache=True, eos_token_id=-1
        )
        try:
            manager = self._model.init_continuous_batching(generation_config=config)
            manager.warmup()  # its CUDA graphs
            manager.start()
        except Exception as error:
            raise Missing(f"no continuous batching here: {one_line(error)}") from None
        try:
            for count, seed in load.rounds:
                prompts = unique_prompts(count, load.prompt_tokens, self._model.config.vocab_size, seed)
                moments, seconds = closed_loop(manager, prompts, load.output_tokens, load.concurrency)
        finally:
            manager.stop(block=True)
        return answered("its continuous batching, in process", moments, seconds)

    def _step(self) -> float:
        """Run the step once and return its seconds. On a GPU a step is over when the host knows its tokens."""
        if self._past == 0 and not self._on_gpu:
            self._cache = self._library.DynamicCache()
        if self._on_gpu:
            self._torch.cuda.synchronize()

        def forward():
            output = self._forward(
                self._step_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **self._positions
            )
            return output.logits[:, -1].argmax(-1).tolist() if self._on_gpu else output

        output, seconds = timed(forward)
        self._top_tokens = output if self._on_gpu else output.logits[:, -1].argmax(-1).tolist()
        length = self._step_ids.shape[1]
        if self._on_gpu:
            for layer in self._cache.layers:  # back to where the step began, so that the next one does the same
                layer.cumulative_length.sub_(length)
        elif self._past:
            self._cache.crop(-length)  # takes this many off the end
        return seconds


def closed_loop(
    manager: Any,
    prompts: Iterable[Sequence[int]],
    output_tokens: int,
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[tuple[float, float]], float]:
    """Run the prompts through a continuous batching manager, `concurrency` at a time. Return of each request, in the
    order in which they ended, the seconds to its first token and to its end; and the seconds of the whole."""
    waiting, moments = iter(prompts), []
    begun: dict[str, float] = {}
    first: dict[str, float] = {}
    started = clock()

    def admit() -> None:
        for prompt in islice(waiting, concurrency - len(begun)):
            now = clock()  # queueing is part of what a request waits for
            options = {"max_new_tokens": output_tokens, "eos_token_id": -1}
            begun[manager.add_request(list(prompt), streaming=True, **options)] = now  # so that a first token is seen

    admit()
    while begun:
        result = manager.get_result(timeout=60)
        if result is None:
            raise RuntimeError("its continuous batching gave no result for a minute")
        if result.error:
            raise RuntimeError(result.error)
        now, request_id = clock(), result.request_id
        if result.generated_tokens:
            first.setdefault(request_id, now)
        if result.is_finished():
            begin = begun.pop(request_id)
            moments.append((first.pop(request_id) - begin, now - begin))
            admit()
    return moments, clock() - started


def _load(path: str, torch, transformers):
    """Load the model; return it and the name of the program that read its weights."""
    if os.path.isdir(path):
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), "transformers"
    if find_spec("accelerate") is None and find_spec("forge") is not None:
        return _read_by_forge(path, torch, transformers), "forge"
    folder, file = os.path.split(os.path.abspath(path))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    return model, "transformers"


def _read_by_forge(path: str, torch, transformers):
    """Build a Qwen3ForCausalLM with the file's weights dequantized and rounded to bfloat16."""
    from pathlib import Path

    from forge.model.config import expected_tensors
    from forge.model.hf_directory import hugging_face_name
    from forge.model.loader import open_weights

    with open_weights(Path(path)) as source:
        ours = source.config
        config = transformers.Qwen3Config(
            **{name: getattr(ours, name) for name in _ALIKE},
            num_hidden_layers=ours.num_layers,
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
