"""llama.cpp as a peer, through llama-cpp-python: `llama_decode` and nothing above it.

Runs with any interpreter that has `llama_cpp`, without forge too. Its best setting: flash attention on auto, a
ubatch of 512, weights repacked as llama.cpp likes; keys and values in float16 or 8 bits and, with several sequences, in
one KV buffer for all or one for each, whichever is faster on this machine (tried before every figure).
"""

import ctypes
import os
from collections.abc import Mapping
from itertools import product
from typing import Any

from forge.bench.worker import Missing, Worker, for_trial, import_peer, plural, timed

UBATCH = 512
TRIAL_STEPS = {"prefill": 1, "decode": 4}
"""Steps of each setting when the fastest one is chosen."""
KV_TYPES = {"f16": 1, "8-bit": 8}
"""llama.cpp's numbers for these types: GGML_TYPE_F16 and GGML_TYPE_Q8_0."""


class LlamaCppWorker(Worker):
    """One loaded model, and a context for the case at hand."""

    def __init__(self):
        self._lib = self._model = self._context = None

    def load(self, model: str, threads: int, max_model_len: int, **others: Any) -> Mapping[str, Any]:
        if os.path.isdir(model):
            raise Missing("llama.cpp reads GGUF files only")
        lib = self._lib = _library()
        self._threads = threads

        def ready():
            self._model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
            if not self._model:
                raise RuntimeError(f"llama.cpp does not load {model}")
            self._open_context(1, max_model_len, ("f16", True))

        _, seconds = timed(ready)
        self._close_context()
        description = f"llama-cpp-python {lib.__version__}, {_instructions(lib)}, {plural(threads)}"
        return {"description": description, "seconds": seconds, "first_time": False}

    def prepare(self, kind: str, context: int, token_ids: list[list[int]]) -> Mapping[str, Any]:
        self._past, self._token_ids = for_trial(context, token_ids)
        settings = product(KV_TYPES, (True, False) if len(token_ids) > 1 else (True,))
        kv, unified = self._set_up_fastest(settings, self._set_up, TRIAL_STEPS[kind])
        if len(self._token_ids[0]) < len(token_ids[0]):
            self._past, self._token_ids = context, token_ids
            self._set_up((kv, unified))
        buffers = "" if len(token_ids) == 1 else ", one KV buffer" if unified else ", a KV buffer per sequence"
        return {"setting": f"flash attention auto, ubatch {UBATCH}, {kv} KV{buffers}", "seconds": self._expected}

    def logits(self, token_ids: list[int]) -> Mapping[str, Any]:
        """Return the logits of the last token."""
        self._open_context(1, len(token_ids), ("f16", True))
        self._decode([token_ids], 0)
        return {"logits": self._row(len(token_ids) - 1).tolist()}

    def _set_up(self, setting: tuple[str, bool]) -> None:
        """Open a new context and fill every sequence's cache."""
        self._open_context(len(self._token_ids), len(self._token_ids[0]), setting)
        for sequence, ids in enumerate(self._token_ids):
            for start in range(0, self._past, UBATCH):
                stop = min(self._past, start + UBATCH)
                self._decode([ids[start:stop]], start, first=sequence)

    def _step(self) -> float:
        memory = self._lib.llama_get_memory(self._context)
        for sequence in range(len(self._token_ids)):
            self._lib.llama_memory_seq_rm(memory, sequence, self._past, -1)
        return self._decode([ids[self._past :] for ids in self._token_ids], self._past)

    def _decode(self, token_ids: list[list[int]], start: int, first: int = 0) -> float:
        """Compute rows of sequences `first`, `first + 1`, … from position `start` on; the seconds it took."""
        lib, count = self._lib, len(token_ids[0])
        batch = lib.llama_batch_init(len(token_ids) * count, 0, 1)
        batch.n_tokens = len(token_ids) * count
        for row in range(batch.n_tokens):
            sequence, offset = divmod(row, count)
            batch.token[row] = token_ids[sequence][offset]
            batch.pos[row] = start + offset
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = first + sequence
            batch.logits[row] = offset == count - 1

        def compute():
            status = lib.llama_decode(self._context, batch)
            lib.llama_synchronize(self._context)
            return status

        status, seconds = timed(compute)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        self._top_tokens = [int(self._row(row).argmax()) for row in range(count - 1, batch.n_tokens, count)]
        lib.llama_batch_free(batch)
        return seconds

    def _row(self, row: int) -> Any:
        import numpy as np

        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, row), (self._vocab_size,))

    def _open_context(self, sequences: int, length: int, setting: tuple[str, bool]) -> None:
        """Open a new context. setting: the keys' and values' type, and whether sequences share one buffer of them."""
        self._close_context()
        lib = self._lib
        params = lib.llama_context_default_params()
        per_sequence = -(-length // 256) * 256
        params.n_ctx = sequences * per_sequence
        params.n_batch, params.n_ubatch, params.n_seq_max = max(per_sequence, sequences), UBATCH, sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_AUTO
        kv, params.kv_unified = setting
        params.type_k = params.type_v = KV_TYPES[kv]
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def _close_context(self) -> None:
        if self._context:
            self._lib.llama_free(self._context)
            self._context = None


def _library():
    """Import llama-cpp-python and silence its log. Raises `Missing` if it cannot be imported."""
    (lib,) = import_peer("llama-cpp-python", "llama_cpp")
    global _silence
    _silence = lib.llama_log_callback(lambda *_: None)  # must stay alive as long as the library
    lib.llama_log_set(_silence, ctypes.c_void_p(0))
    lib.llama_backend_init()
    return lib


def _instructions(lib) -> str:
    """Return what of the processor it was built to use: `AVX512 VNNI`."""
    text = lib.llama_print_system_info().decode(errors="replace")
    used = [part.split("=")[0].strip().split(" : ")[-1] for part in text.split("|") if part.strip().endswith("= 1")]
    vector = [name for name in used if name.startswith(("AVX", "AMX", "NEON", "SVE", "DOTPROD", "MATMUL_INT8"))]
    return " ".join(name.lower() for name in vector[-4:]) or "portable"
