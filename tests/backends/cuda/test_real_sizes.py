"""Every kernel at a model's sizes against float64, again and again, each after a kernel that writes its input over NaN.

On a GPU, at the sizes of Qwen3-0.6B and 4B, both are replayed as one graph, with dependent launches and without: a
kernel that reads before it has waited reads NaN, and an error that moves between two replays is a race. Elsewhere the
same runs interpreted at toy sizes, twice.
"""

from dataclasses import dataclass

import pytest
import torch

from forge.backends.cuda.shapes import Tuning
from forge.backends.cuda.weights import DENSE, Q8, Matrix
from forge.backends.fusion import Norm
from tests.backends.cuda.conftest import HAS_GPU
from tests.backends.cuda.drawn_model import drawn_matrix
from tests.backends.cuda.models import TOLERANCE, launches
from tests.backends.cuda.test_attention import Setting
from tests.slow import mostly_slow

EPS = 1e-6
ALL_SWITCHES = Tuning(tile_rows=128, prefetch=True, new_key_last=True)


@dataclass(frozen=True)
class Sizes:
    """What a model's kernels are launched for."""

    hidden: int
    heads: tuple[int, int, int]
    """Of queries, of keys, and the size of one."""
    inner: int
    vocabulary: int

    def products(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of every product of a decode step."""
        heads, kv_heads, size = self.heads
        return {
            "qkv": ((heads + 2 * kv_heads) * size, self.hidden),
            "output": (self.hidden, heads * size),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "output_head": (self.vocabulary, self.hidden),
        }


if HAS_GPU:
    MODELS = {"0.6B": Sizes(1024, (16, 8, 128), 3072, 151_936), "4B": Sizes(2560, (32, 8, 128), 9728, 151_936)}
    ROWS, REPEATS, LAUNCHES = (1, 2, 4, 16, 17, 64), 50, (True, False)
    SPANS = [[(end - 1, end)] * rows for rows in (1, 7) for end in (1, 16, 17, 160, 2048, 4100)]
    SPANS += [[(0, 128)], [(0, 512)], [(100, 117)], [(4000, 4100)]]
else:
    MODELS = {"toy": Sizes(64, (4, 2, 16), 96, 288)}
    ROWS, REPEATS, LAUNCHES = (1, 5), 2, (None,)
    SPANS = [[(149, 150)] * 2, [(20, 27)]]


def check(compute, want: torch.Tensor) -> None:
    """Compute again and again: each result is near `want`, and all have the same bits."""
    result, replay = compute(), None
    if HAS_GPU:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compute()
        replay = graph.replay
    first = None
    for _ in range(REPEATS):
        if replay is not None:
            result.fill_(float("nan"))
            replay()
        else:
            result = compute()
        error = float((result.double() - want).norm() / want.norm())
        assert error < TOLERANCE["bfloat16"]
        first = result.clone() if first is None else first
        assert torch.equal(result, first), "another time it computed something else: a race"


def over_nan(run, source: torch.Tensor, x: torch.Tensor) -> None:
    """x = source, by a kernel of ours."""
    x.fill_(float("nan"))
    run._gather(Matrix("source", len(source), source.shape[1], dense=source), None, None, x)


@pytest.mark.parametrize("tuning", [Tuning(), ALL_SWITCHES], ids=["as it is", "all switches"])
@pytest.mark.parametrize("kind", [DENSE, Q8], ids=["BF16", "Q8_0"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", mostly_slow(["qkv", "output", "gate_up", "down", "output_head"], quick=["qkv"]))
@pytest.mark.parametrize("dependent", LAUNCHES)
def test_products(dependent, model, name, kind, tuning, device):
    torch.manual_seed(0)
    height, width = MODELS[model].products()[name]
    where = torch.device(device)
    count = torch.cuda.get_device_properties(where).multi_processor_count if HAS_GPU else 2
    run = launches(device, "bfloat16", multiprocessors=count, dependent=dependent, tuning=tuning)
    matrix = drawn_matrix(name, height, width, kind, where)
    exact = (matrix.dense if matrix.packed is None else matrix.packed.dense(torch.float32)).double()
    run._scratch = torch.empty(height * width, dtype=torch.bfloat16, device=where)
    norm = Norm(None, 1 + 0.2 * torch.randn(width, device=where), EPS)
    for rows in ROWS:
        source = torch.randn(rows, width, device=where).bfloat16()
        before = torch.randn(rows, height, device=where).bfloat16()
        stream, x = torch.empty_like(before), torch.empty_like(source)
        samples = torch.empty((rows, 2), dtype=torch.int32, device=where)
        normed = source.double() / (source.double().square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
        want = before.double() + source.double() @ exact.t() if name in ("output", "down") else normed @ exact.t()
        if name == "gate_up":
            gate, up = want.unflatten(-1, (-1, 2)).unbind(-1)
            want = torch.nn.functional.silu(gate) * up

        def compute(source=source, x=x, stream=stream, before=before, samples=samples) -> torch.Tensor:
            over_nan(run, source, x)
            if name == "qkv":
                return run.products(x, norm, (matrix,))
            if name == "gate_up":
                return run.gated(x, norm, matrix)
            if name == "output_head":
                logits = run.logits(x, norm, matrix)
                run.argmax(logits, samples)
                return logits
            stream.copy_(before)
            run.add_product(stream, x, matrix)
            return stream

        run._counters.zero_()
        check(compute, want)
        if name == "output_head":
            assert torch.equal(samples[:, 0].long(), compute().argmax(-1))


@pytest.mark.parametrize("tuning", [Tuning(), ALL_SWITCHES], ids=["as it is", "all switches"])
@pytest.mark.parametrize("spans", SPANS, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dependent", LAUNCHES)
def test_attention(dependent, model, spans, tuning, device):
    count = torch.cuda.get_device_properties(device).multi_processor_count if HAS_GPU else 2
    setting = Setting(
        device, "bfloat16", "bfloat16", *MODELS[model].heads, spans=spans, block_size=16,
        multiprocessors=count, dependent=dependent, tuning=tuning,
    )  # fmt: skip
    inputs, run, layer, storage = setting.inputs(), setting.run, setting.layer, setting.storage
    past = storage.keys.clone(), storage.values.clone()
    x = torch.empty_like(setting.qkv)

    def compute() -> torch.Tensor:
        storage.keys.copy_(past[0]), storage.values.copy_(past[1])
        over_nan(run, setting.qkv, x)
        if run.fuses_attention(inputs):
            return run.decode_attention(x, layer, storage, 0, inputs)
        run.store_heads(x, layer, storage, 0, inputs)
        return run.attention(x, storage, 0, inputs, logit_rows_only=False)

    check(compute, setting.expected().to(device))
