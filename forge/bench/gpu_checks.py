"""Every kernel in bfloat16 at a model's real sizes against float64, again and again.

Before each kernel another one writes its input, over NaN, and the two are replayed as one graph: a kernel that starts
early (dependent launches) and reads too soon reads NaN or what stood there before. All kernels give the same bits for
the same input, so an error that moves between two replays is a race.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from forge.backends.cuda.backend import INTERPRETED_MULTIPROCESSORS
from forge.backends.cuda.inputs import InputBuffer, Policy, shape_of
from forge.backends.cuda.kernels.parts import INTERPRETED
from forge.backends.cuda.launches import Launcher, Launches, ListingLauncher, TritonLauncher
from forge.backends.cuda.network import Layer, Network, Norm
from forge.backends.cuda.rotations import Rotations
from forge.backends.cuda.sampling import SamplingRows, sample
from forge.backends.cuda.shapes import DEFAULT_TUNING, Tuning
from forge.backends.cuda.storage import TorchKvStorage
from forge.backends.cuda.warm_up import LaunchDescription
from forge.backends.cuda.weights import DENSE, Q8, Matrix
from forge.bench.cuda_tiles import products_of
from forge.bench.drawn_model import drawn_matrix
from forge.cache.kv_storage import KvLayout
from forge.engine.sampling import choose_token
from forge.engine.sampling_params import SamplingParams
from forge.model.config import Qwen3Config
from forge.model.logits import Draw
from forge.model.manual_batch import Part, flat_batch

TOLERANCE = 1e-2
"""Relative error of one operation in bfloat16 against float64."""
EPS = 1e-6
BLOCK_SIZE = 16
ALL_SWITCHES = Tuning(tile_rows=128, split_k=True, prefetch=True, round_splits_up=True, new_key_last=True)
DRAWN = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5),
)
_UNUSED = cast(Any, None)
"""Parts of a network that no kernel under check reads."""


@dataclass(frozen=True)
class Checked:
    """One kernel's result, of all its repetitions."""

    name: str
    error: float
    """The largest relative error; NaN if the result held one."""
    moved: int
    """Repetitions whose bits differed from the first one's."""

    @property
    def is_right(self) -> bool:
        return self.error < TOLERANCE and not self.moved


@dataclass(frozen=True)
class Cases:
    """Which numbers of rows, contexts and chunks are checked."""

    rows: tuple[int, ...] = (1, 2, 4, 16, 17, 64)
    contexts: tuple[int, ...] = (1, 16, 17, 160, 2048, 4100)
    sequences: tuple[int, ...] = (1, 7)
    """Of a decode."""
    spans: tuple[tuple[int, int], ...] = ((0, 128), (0, 512), (100, 117), (4000, 4100))
    """Start and end of a chunk."""


class Checks:
    """The kernels of one model's sizes."""

    def __init__(
        self,
        config: Qwen3Config,
        device: str,
        dependent: bool,
        repetitions: int,
        tuning: Tuning = DEFAULT_TUNING,
        launcher: Launcher | None = None,
        multiprocessors: int = INTERPRETED_MULTIPROCESSORS,
    ):
        """launcher: in place of Triton's. multiprocessors: of a GPU that `device` is not."""
        self._config, self._repetitions = config, repetitions
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        where = torch.cuda.get_device_properties(self._device) if self._on_gpu else None
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        multiprocessors = where.multi_processor_count if where else multiprocessors
        self._policy = Policy(heads, kv_heads, multiprocessors, False, False, tuning)
        network = Network(_UNUSED, (), _UNUSED, heads, kv_heads, config.head_dim, config.rope)
        self._rotations = Rotations(self._device)
        launcher = launcher or TritonLauncher(dependent)
        self._run = Launches(
            network, self._policy, self._rotations, self._device, torch.bfloat16, launcher, INTERPRETED
        )

    def parts(self, cases: Cases) -> dict[str, Iterator[Checked]]:
        """Return all checks of kernels, in parts that can fail by themselves."""
        decodes = {f"decodes of {count}": self.decodes(count, cases.contexts) for count in cases.sequences}
        rest = {"prefills": self.prefills(cases.spans), "embeddings": self.embeddings(max(cases.rows))}
        return {"products": self.products(cases.rows), **decodes, **rest}

    @classmethod
    def launches(
        cls, config: Qwen3Config, dependent: bool, tuning: Tuning, multiprocessors: int, cases: Cases
    ) -> list[LaunchDescription]:
        """What the checks launch, each specialization once. Launches nothing."""
        listing = ListingLauncher(dependent)
        checks = cls(config, "meta", dependent, 1, tuning, listing, multiprocessors)
        for part in checks.parts(cases).values():
            list(part)
        return list(listing.found)

    def products(self, rows: tuple[int, ...], kinds: tuple[int, ...] = (DENSE, Q8)) -> Iterator[Checked]:
        """Yield each product of a step, with what is fused into it, for each number of rows; logits with their
        argmax."""
        for name, (height, width) in products_of(self._config).items():
            for kind in kinds:
                matrix = drawn_matrix(name, height, width, kind, self._device)
                exact = (matrix.own_dense() if matrix.packed is None else matrix.packed.dense(torch.float32)).double()
                if matrix.packed is not None:
                    self._run._scratch = torch.empty(height * width, dtype=torch.bfloat16, device=self._device)
                for count in rows:
                    yield self._product(name, matrix, exact, count)

    def _product(self, name: str, matrix: Matrix, exact: torch.Tensor, rows: int) -> Checked:
        run, norm = self._run, self._norm(matrix.in_features)
        source = torch.randn(rows, matrix.in_features, device=self._device).bfloat16()
        x64 = source.double()
        normed = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
        before = torch.randn(rows, matrix.out_features, device=self._device).bfloat16()
        stream = torch.empty_like(before)
        samples = torch.empty((rows, 2), dtype=torch.int32, device=self._device)
        x = torch.empty_like(source)

        def compute() -> torch.Tensor:
            self._write(source, x)
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

        want = before.double() + x64 @ exact.t() if name in ("output", "down") else normed @ exact.t()
        if name == "gate_up":
            gate, up = want.unflatten(-1, (-1, 2)).unbind(-1)
            want = torch.nn.functional.silu(gate) * up
        title = f"{name}, {rows} rows" + (", packed" if matrix.packed is not None else "")
        if name != "output_head":
            return self._repeated(title, compute, want)
        run._counters.zero_()
        checked = self._repeated(title, compute, want)
        if self._device.type == "meta":
            return checked
        logits = compute()
        wrong = int((samples[:, 0].long() != logits.argmax(-1)).sum())
        return Checked(title, checked.error, checked.moved + wrong)

    def embeddings(self, rows: int, kinds: tuple[int, ...] = (DENSE, Q8)) -> Iterator[Checked]:
        """Yield rows of the embedding by token id: half of them known to the host, half taken from the step before."""
        vocabulary, width = self._config.vocab_size, self._config.hidden_size
        tokens = torch.randint(vocabulary, (rows, 2), dtype=torch.int32, device=self._device)
        numbers = torch.arange(rows, dtype=torch.int32, device=self._device)
        numbers = torch.where(numbers % 2 == 0, tokens[:, 0], -1 - numbers)
        samples = torch.empty_like(tokens)
        for kind in kinds:
            matrix = drawn_matrix("embedding", vocabulary, width, kind, self._device)
            exact = matrix.own_dense() if matrix.packed is None else matrix.packed.dense(torch.float32)
            out = torch.empty((rows, width), dtype=torch.bfloat16, device=self._device)

            def compute(matrix: Matrix = matrix, out: torch.Tensor = out) -> torch.Tensor:
                samples.copy_(tokens)
                self._run._gather(matrix, numbers, samples, out)
                return out

            title = f"embedding, {rows} rows" + (", packed" if matrix.packed is not None else "")
            yield self._repeated(title, compute, exact[tokens[:, 0].long()].double())

    def draws(self, rows: int) -> Iterator[Checked]:
        """Yield tokens drawn on the device against the engine's draws on the host: the error is the share that
        differs."""
        vocabulary = self._config.vocab_size
        logits = 3 * torch.randn(rows, vocabulary, device=self._device)
        for params in DRAWN:
            draws = [Draw(params, 7 * row, row % 2, range(100 + row), 100) for row in range(rows)]
            want = [
                choose_token(row, params, draw.history, draw.seed, draw.sample_index, len(draw.history), 100)
                for row, draw in zip(logits.cpu().numpy(), draws, strict=True)
            ]
            rows_wanted = SamplingRows.of(draws, vocabulary, self._device)
            found = [sample(logits, rows_wanted, self._run.launch).tolist() for _ in range(3)]
            wrong = sum(a != b for a, b in zip(found[0], want, strict=True))
            title = f"draws, {rows} rows, top_p {params.top_p:g}, presence_penalty {params.presence_penalty:g}"
            yield Checked(title, wrong / rows, sum(drawn != found[0] for drawn in found))

    def decodes(self, rows: int, contexts: tuple[int, ...]) -> Iterator[Checked]:
        """Yield the fused attention of a decode, for sequences that have each of `contexts` tokens in all."""
        for context in contexts:
            yield self._attention(f"decode, {rows} rows @ {context}", [(context - 1, context)] * rows, True)

    def prefills(self, spans: tuple[tuple[int, int], ...]) -> Iterator[Checked]:
        """Head norms, rotation, cache and attention of a chunk (start, end)."""
        for start, end in spans:
            yield self._attention(f"prefill {start} to {end}", [(start, end)], False)

    def _attention(self, title: str, spans: list[tuple[int, int]], fused: bool) -> Checked:
        config, run = self._config, self._run
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        blocks = -(-max(end for _, end in spans) // BLOCK_SIZE)
        order = torch.randperm(len(spans) * blocks).tolist()
        tables = [order[index * blocks : (index + 1) * blocks] for index in range(len(spans))]
        tokens = [0] * max(end for _, end in spans)
        batch = flat_batch([Part(tokens, *span, table) for span, table in zip(spans, tables, strict=True)], BLOCK_SIZE)
        storage = TorchKvStorage(KvLayout(1, len(order), BLOCK_SIZE, kv_heads, head_dim, "bfloat16"), self._device)
        for array in (storage.keys, storage.values):
            array.normal_()
        past = storage.keys.clone(), storage.values.clone()
        shape = shape_of(batch, self._policy, BLOCK_SIZE)
        buffer = InputBuffer(self._device)
        buffer.reach(shape, batch.block_tables.size)
        buffer.fill(shape, batch)
        self._rotations.reach(len(tokens), config.rope)
        run.reserve(shape)
        inputs = buffer.inputs(shape)
        width = (heads + 2 * kv_heads) * head_dim
        source = torch.randn(batch.num_rows, width, device=self._device).bfloat16()
        x = torch.empty_like(source)
        layer = Layer(_UNUSED, (), self._norm(head_dim), self._norm(head_dim), *[_UNUSED] * 4)

        def compute() -> torch.Tensor:
            storage.keys.copy_(past[0]), storage.values.copy_(past[1])
            self._write(source, x)
            if fused:
                assert run.fuses_attention(inputs)
                return run.decode_attention(x, layer, storage, 0, inputs)
            run.store_heads(x, layer, storage, 0, inputs)
            return run.attention(x, storage, 0, inputs, logit_rows_only=False)

        return self._repeated(title, compute, self._attended(source, spans, tables, past, layer))

    def _attended(self, source, spans, tables, past, layer: Layer) -> torch.Tensor:
        """float64, from the definition, keys and values rounded to the cache's dtype."""
        config = self._config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        outs, first = [], 0
        for (start, end), table in zip(spans, tables, strict=True):
            rows = source[first : first + end - start].double().view(end - start, -1, head_dim)
            first += end - start
            positions = torch.arange(start, end, device=self._device)
            query = self._turned(rows[:, :heads], layer.query_norm, positions)
            key = self._turned(rows[:, heads : heads + kv_heads], layer.key_norm, positions).bfloat16().double()
            stored = [stored_past[0, torch.tensor(table)].flatten(0, 1)[:start].double() for stored_past in past]
            keys = torch.cat([stored[0], key])
            values = torch.cat([stored[1], rows[:, heads + kv_heads :]])
            grouped = query.view(len(query), kv_heads, heads // kv_heads, head_dim)
            scores = torch.einsum("nhgd,khd->hgnk", grouped, keys) * head_dim**-0.5
            seen = torch.arange(end, device=self._device) <= positions[:, None]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hgnk,khd->nhgd", weights, values).reshape(len(query), -1))
        return torch.cat(outs)

    def _turned(self, heads: torch.Tensor, norm: Norm, positions: torch.Tensor) -> torch.Tensor:
        heads = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
        half = heads.shape[-1] // 2
        rope = self._config.rope
        angles = positions[:, None, None] * torch.from_numpy(rope.frequencies()).to(self._device)
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _norm(self, width: int) -> Norm:
        return Norm(1 + 0.2 * torch.randn(width, device=self._device), EPS)

    def _write(self, source: torch.Tensor, x: torch.Tensor) -> None:
        """x = source, by a kernel of ours, over NaN."""
        x.fill_(float("nan"))
        self._run._gather(Matrix("source", len(source), source.shape[1], dense=source), None, None, x)

    def _repeated(self, title: str, compute: Callable[[], torch.Tensor], want: torch.Tensor) -> Checked:
        result, replay = compute(), None
        if self._device.type == "meta":
            return Checked(title, 0.0, 0)
        if self._on_gpu:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = compute()
            replay = graph.replay
        first, worst, moved = None, 0.0, 0
        for _ in range(self._repetitions):
            if replay is not None:
                result.fill_(float("nan"))
                replay()
            else:
                result = compute()
            first = result.clone() if first is None else first
            moved += not torch.equal(result, first)
            error = float((result.double() - want).norm() / want.norm())
            worst = error if not error <= worst else worst  # NaN stays
        return Checked(title, worst, moved)
