"""Run as a script: the digest of the logits of a small model of each type named on the command line.

Prints the instruction set in use and the folder of compiled code, then a line `type digest` each.
"""

import hashlib
import sys

import numpy as np

from forge.model.manual_batch import Part, flat_batch, new_storage
from tests.backends.cpu.models import ThreadedBackend, small_model


def logits_of(tensor_type: str, kv_dtype: str = "float16") -> np.ndarray:
    """A prefill of 13 and one of 70 tokens together, then a step of both: float32, all logits."""
    model = small_model(ThreadedBackend(threads=2), tensor_type, seed=11, num_layers=2)
    rng = np.random.default_rng(5)
    tokens = [rng.integers(0, model.vocab_size, length).tolist() for length in (14, 71)]
    storage = new_storage(model, 10, 16, kv_dtype)
    blocks = [[3], [9, 0, 5, 1, 2]]
    steps = [[Part(tokens[i], 0, len(tokens[i]) - 1, blocks[i]) for i in range(2)]]
    steps.append([Part(tokens[i], len(tokens[i]) - 1, len(tokens[i]), blocks[i]) for i in range(2)])
    return np.concatenate([model.forward(flat_batch(parts, 16), storage) for parts in steps])


if __name__ == "__main__":
    from forge.backends.cpu.compilation import cache_folder, instruction_set

    print(instruction_set().name)
    print(cache_folder())
    for argument in sys.argv[1:]:
        name, _, kind = argument.partition("/")
        logits = logits_of(name, kind or "float16")
        assert np.isfinite(logits).all()
        print(argument, hashlib.sha256(logits.tobytes()).hexdigest())
