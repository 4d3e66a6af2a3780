"""The forward pass as fused steps, about five launches a layer for a decode, then the output head: which kernel, on
what grid, with which tile.

By the number of rows a product is `matvec` (1), `matmul` (2 to `Tuning.tile_rows`; to 64 with packed weights, which
cuBLAS does not read), or cuBLAS with kernels of its own for what is fused elsewhere (more). With `invariant` it is
`matmul` in one tile for any number, so that a row's bits never depend on how many rows there are.

Every launch goes through one callable, `Launcher`, so that another can take its place: tests list what a real
model would launch and compile exactly that, without a device.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from forge.backends.cuda import shapes
from forge.backends.cuda.inputs import Inputs, Shape
from forge.backends.cuda.kernels import argmax, attention, matmul, unfused
from forge.backends.cuda.kernels.parts import INTERPRETED
from forge.backends.cuda.network import Layer, Network
from forge.backends.cuda.shapes import Policy
from forge.backends.cuda.storage import Rotations, TorchKvStorage
from forge.backends.cuda.warm_up import LaunchDescription, describe
from forge.backends.cuda.weights import DENSE, Matrix
from forge.backends.fusion import Norm

Launcher = Callable[..., None]
"""Called with (kernel, grid, *arguments, **constants), and with `num_warps` and `num_stages` if not `ONE_STAGE`."""

COMPILE_OPTIONS = {"enable_fp_fusion": True}
"""Multiply and add in one instruction, whatever this Triton's default is."""
ONE_STAGE = {"num_warps": 4, "num_stages": 1}
"""The warps and stages of a launch that states none: of a kernel that loops over nothing."""
EMBED_COLUMNS = 1024
"""Columns of a row of the embedding that one program copies. Guess."""
SWIGLU_COLUMNS = 1024
"""Columns of a row of SwiGLU that one program computes. Guess."""
ARGMAX_COLUMNS = 2048
"""Columns of a row of logits that one program looks through. Guess."""
LEAST_COUNTERS = 1 << 14
OUTPUT_HEAD_ROWS = 64
"""Logit rows that share one pass over the output head at most. Guess."""


class TritonLauncher:
    """Launches for real. dependent: whether a kernel may start before the one before it has ended (sm_90)."""

    def __init__(self, dependent: bool):
        self.dependent = dependent
        self._options = COMPILE_OPTIONS | ({"launch_pdl": True} if dependent else {})

    def __call__(self, kernel, grid: tuple[int, ...], *arguments, **options) -> None:
        kernel[grid](*arguments, **self.options(options))

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Add the options that hold for every launch to a launch's constants, warps and stages."""
        return ONE_STAGE | options | self._options | {"PDL": self.dependent}


class ListingLauncher(TritonLauncher):
    """Launches nothing and counts how often each description is launched, in order of first use, in `found`."""

    def __init__(self, dependent: bool):
        super().__init__(dependent)
        self.found: Counter[LaunchDescription] = Counter()

    def __call__(self, kernel, grid: tuple[int, ...], *arguments, **options) -> None:
        self.found[describe(kernel, arguments, self.options(options))] += 1


class Launches:
    """Launches each fused step, on the arrays of one device."""

    def __init__(
        self,
        network: Network,
        policy: Policy,
        rotations: Rotations,
        device: torch.device,
        dtype: torch.dtype,
        launcher: Launcher,
    ):
        self.network, self.policy, self._rotations = network, policy, rotations
        self._device, self._dtype, self.launch = device, dtype, launcher
        self._exact = INTERPRETED or dtype == torch.float32
        """Whether float32 is multiplied where tensor cores would otherwise be used."""
        sizes = [matrix.num_weights for matrix in network.products() if matrix.dense is None]
        self._scratch = torch.empty(max(sizes, default=0), dtype=dtype, device=device)
        """Room for the largest matrix that has no dense copy."""
        self._counters = torch.zeros(LEAST_COUNTERS, dtype=torch.int32, device=device)
        self.step: Callable[[str, int], AbstractContextManager[None]] = lambda name, layer: nullcontext()
        """Returns a context around everything that a step of the forward pass launches; a clock replaces it."""

    def reserve(self, shape: Shape) -> bool:
        """Allocate the counters that a step of that shape needs. Returns whether they moved, which invalidates every
        graph."""
        needed = max(shape.tiles, shape.num_logit_rows) * self.network.num_kv_heads
        if needed <= len(self._counters):
            return False
        self._counters = torch.zeros(shapes.next_power_of_2(needed), dtype=torch.int32, device=self._device)
        return True

    def fuses_attention(self, inputs: Inputs) -> bool:
        """True if a step's attention is one kernel, `decode_attention`."""
        return inputs.shape.is_decode and not self.policy.invariant

    # The forward pass

    def forward(
        self, output_head: Matrix | None, inputs: Inputs, storage: TorchKvStorage, samples: torch.Tensor
    ) -> torch.Tensor:
        """Write the step's keys and values; return logits on the device, float32 `[logit rows, vocabulary]`.

        Read it beside `Qwen3.forward_pass`: the same network, in the groups that `network.py` recognised. There is no
        synchronization in it, and nothing depends on the batch but through `inputs`, so it can be captured in a CUDA
        graph as it stands; its arrays then come from the graph's own memory.

        samples: int32 `[logit rows or more, 2]`; input tokens may be taken from there, and the argmax of each logit row
        is left there with the bits of its logit. Without an output head: the last norm's result, float32
        `[logit rows, hidden]`, and no samples.
        """
        network, shape = self.network, inputs.shape
        with self.step("embed", -1):
            x = self.embed(network.embedding, inputs, samples)
        for index, layer in enumerate(network.layers):
            logit_rows_only = shape.prunes and index == len(network.layers) - 1
            attended = self.attend(x, layer, storage, index, inputs, logit_rows_only)
            if attended is None:  # a chunk that only fills the cache: its keys are written, and that was all
                return x.new_empty(
                    (0, x.shape[1] if output_head is None else output_head.out_features), dtype=torch.float32
                )
            if logit_rows_only:
                x = self.pick(x, inputs)
            with self.step("attn_output, add", index):
                self.add_product(x, attended, layer.output)
            with self.step("rms_norm, ffn_gate, ffn_up, swiglu", index):
                gated = self.gated(x, layer.feed_forward_norm, layer.gate_up)
            with self.step("ffn_down, add", index):
                self.add_product(x, gated, layer.down)
        if not (shape.is_decode or shape.prunes):
            x = self.pick(x, inputs)
        if output_head is None:
            with self.step("rms_norm", -1):
                return self.normed(x, network.final_norm, torch.float32)
        with self.step("rms_norm, output head", -1):
            logits = self.logits(x, network.final_norm, output_head)
        with self.step("argmax", -1):
            self.argmax(logits, samples)
        return logits

    def attend(
        self, x: torch.Tensor, layer: Layer, storage: TorchKvStorage, index: int, inputs: Inputs, logit_rows_only: bool
    ) -> torch.Tensor | None:
        """Attend in one layer. Returns None in the last layer if no row needs logits."""
        with self.step("rms_norm, attn_q, attn_k, attn_v", index):
            qkv = self.products(x, layer.attention_norm, layer.qkv)
        if self.fuses_attention(inputs):
            with self.step("head norm, rope, write_kv, attention", index):
                return self.decode_attention(qkv, layer, storage, index, inputs)
        with self.step("head norm, rope, write_kv", index):
            self.store_heads(qkv, layer, storage, index, inputs)
        if logit_rows_only and inputs.shape.num_logit_rows == 0:
            return None
        with self.step("attention", index):
            return self.attention(qkv, storage, index, inputs, logit_rows_only)

    # Steps

    def embed(self, table: Matrix, inputs: Inputs, samples: torch.Tensor) -> torch.Tensor:
        """Return the residual stream's first value, `[T, hidden]`. Token -1 - r stands for the token in
        `samples[r]`."""
        out = self._empty(inputs.shape.num_rows, table.in_features)
        self._gather(table, inputs.token_ids, samples, out)
        return out

    def products(self, x: torch.Tensor, norm: Norm, matrices: tuple[Matrix, ...]) -> torch.Tensor:
        """Return norm(x) times each of `matrices`, side by side: `[T, rows of all]`."""
        out = self._empty(len(x), sum(matrix.out_features for matrix in matrices))
        parts = out.split([matrix.out_features for matrix in matrices], dim=1)
        normed = None
        for matrix, part in zip(matrices, parts, strict=True):
            if self._by_cublas(len(x), matrix):
                normed = self.normed(x, norm) if normed is None else normed
                torch.mm(normed, self._dense(matrix).t(), out=part)
            else:
                self._multiply(x, matrix, part, norm=norm)
        return out

    def add_product(self, stream: torch.Tensor, x: torch.Tensor, matrix: Matrix) -> None:
        """Compute stream += x times the matrix."""
        if self._by_cublas(len(x), matrix):
            stream.addmm_(x, self._dense(matrix).t())
        else:
            self._multiply(x, matrix, stream, add=True)

    def gated(self, x: torch.Tensor, norm: Norm, gate_up: Matrix) -> torch.Tensor:
        """Return silu(gate) * up of norm(x): `[T, ffn]`."""
        width = gate_up.out_features // 2
        out = self._empty(len(x), width)
        if not self._by_cublas(len(x), gate_up):
            self._multiply(x, gate_up, out, norm=norm, glu=True)
            return out
        pairs = self.normed(x, norm) @ self._dense(gate_up).t()
        block = min(SWIGLU_COLUMNS, shapes.next_power_of_2(width))
        self.launch(unfused.swiglu, (len(x), -(-width // block)), pairs, out, width, BLOCK=block)
        return out

    def decode_attention(
        self, qkv: torch.Tensor, layer: Layer, storage: TorchKvStorage, index: int, inputs: Inputs
    ) -> torch.Tensor:
        """Compute a decode's head norms, rotation, cache writes and attention: `[T, heads * head_dim]`."""
        head_dim, splits = self.network.head_dim, inputs.shape.splits
        norms = layer.query_norm.weight, layer.key_norm.weight, self._rotations.cos, self._rotations.sin
        return self._attend(
            attention.decode_attention,
            self.policy.one_row_tile(inputs.shape.in_float32),
            (len(qkv), splits),
            len(qkv),
            (qkv, *norms, inputs.positions, inputs.slots, inputs.tables, inputs.table_stride),
            (storage, index),
            inputs.shape.in_float32,
            layer.query_norm.eps,
            head_dim**-0.5,
            BLOCK_HALF=max(16, shapes.next_power_of_2(head_dim // 2)),
            NEWEST=splits - 1 if self.policy.tuning.new_key_last else 0,
        )

    def store_heads(self, qkv: torch.Tensor, layer: Layer, storage: TorchKvStorage, index: int, inputs: Inputs) -> None:
        """Normalize and rotate queries in place, and store keys and values in the cache."""
        network = self.network
        self.launch(
            attention.norm_rope_store,
            (len(qkv),),
            qkv,
            layer.query_norm.weight,
            layer.key_norm.weight,
            self._rotations.cos,
            self._rotations.sin,
            inputs.positions,
            inputs.slots,
            storage.keys[index],
            storage.values[index],
            layer.query_norm.eps,
            HEADS=network.num_heads,
            KV_HEADS=network.num_kv_heads,
            HEAD_DIM=network.head_dim,
            BLOCK_HEADS=shapes.next_power_of_2(network.num_heads),
            BLOCK_KV_HEADS=shapes.next_power_of_2(network.num_kv_heads),
            BLOCK_HALF=max(16, shapes.next_power_of_2(network.head_dim // 2)),
        )

    def attention(
        self, qkv: torch.Tensor, storage: TorchKvStorage, index: int, inputs: Inputs, logit_rows_only: bool
    ) -> torch.Tensor:
        """Compute attention for every row, or for the logit rows alone: `[T or R, heads * head_dim]`."""
        shape = inputs.shape
        tile = self.policy.one_row_tile(shape.in_float32)
        if logit_rows_only:
            num_tiles, splits = shape.num_logit_rows, shape.last_splits
            tiles = inputs.logit_sequences, inputs.logit_rows, inputs.logit_lengths
        else:
            if not shape.is_decode:
                tile = self.policy.attention_tile(shape.num_rows, shape.in_float32)
            num_tiles, splits = shape.tiles, shape.splits
            tiles = inputs.tile_sequences, inputs.tile_firsts, inputs.tile_lengths
        return self._attend(
            attention.paged_attention,
            tile,
            (num_tiles, splits),
            num_tiles if logit_rows_only else len(qkv),
            (qkv, inputs.positions, *tiles, inputs.tables, inputs.table_stride),
            (storage, index),
            shape.in_float32,
            self.network.head_dim**-0.5,
            ROWS=tile.rows,
            BLOCK_GROUP=self.policy.group,
            COMPACT=logit_rows_only,
        )

    def _attend(
        self,
        kernel: Any,
        tile: shapes.AttentionTile,
        programs: tuple[int, int],
        num_rows: int,
        reads: Sequence[torch.Tensor],
        cache: tuple[TorchKvStorage, int],
        in_float32: bool,
        *numbers: float,
        **constants: int,
    ) -> torch.Tensor:
        """Launch either attention kernel over a layer's keys and values.

        programs: tiles and splits; each is one per key/value head. num_rows: of the result. reads: the kernel's arrays
        before keys and values. cache: their storage and layer. in_float32: as the tile was chosen for. numbers: the
        arguments after its last array.
        """
        network, (num_tiles, splits), (storage, index) = self.network, programs, cache
        out = self._empty(num_rows, network.num_heads * network.head_dim)
        block_d = max(16, shapes.next_power_of_2(network.head_dim))
        num_valid = tile.rows * self.policy.group
        num_partial = num_tiles * network.num_kv_heads * splits if splits > 1 else 0
        floats = partial(torch.empty, dtype=torch.float32, device=self._device)
        self.launch(
            kernel,
            (num_tiles, network.num_kv_heads, splits),
            *reads,
            storage.keys[index],
            storage.values[index],
            out,
            floats((num_partial, num_valid, block_d)),  # of the splits' results, if there are several
            floats((num_partial, 2, num_valid)),
            self._counters,
            *numbers,
            HEADS=network.num_heads,
            KV_HEADS=network.num_kv_heads,
            HEAD_DIM=network.head_dim,
            BLOCK_SIZE=storage.layout.block_size,
            BLOCK_M=tile.block_m,
            BLOCK_D=block_d,
            CHUNK=shapes.CHUNK,
            SPLITS=splits,
            NUM_VALID=num_valid,
            AT_ONCE=shapes.splits_at_once(splits, num_valid, block_d),
            **constants,
            IN_FLOAT32=in_float32,
            EXACT=self._exact or in_float32,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out

    def logits(self, x: torch.Tensor, norm: Norm, output_head: Matrix) -> torch.Tensor:
        """Return logits, float32 `[R, vocabulary]`, of the stream's rows `[R, hidden]`."""
        out = torch.empty((len(x), output_head.out_features), dtype=torch.float32, device=self._device)
        self._multiply(x, output_head, out, norm=norm)
        return out

    def argmax(self, logits: torch.Tensor, samples: torch.Tensor) -> None:
        """Leave the argmax of each row, and the bits of its logit, in `samples`."""
        num_rows, vocabulary = logits.shape
        part = min(ARGMAX_COLUMNS, max(128, shapes.next_power_of_2(vocabulary)))
        parts = -(-vocabulary // part)
        part_maxima = torch.empty((num_rows, parts), dtype=torch.int64, device=self._device)
        self.launch(
            argmax.argmax_rows,
            (num_rows, parts),
            logits,
            part_maxima,
            samples,
            self._counters,
            vocabulary,
            PARTS=parts,
            PART=part,
            BLOCK_PARTS=max(32, shapes.next_power_of_2(parts)),
        )

    def pick(self, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return the logit rows of the stream."""
        return x.index_select(0, inputs.logit_rows[: inputs.shape.num_logit_rows])

    # Parts of steps

    def attends_in_float32(self, storage: TorchKvStorage) -> bool:
        """True if attention over that storage multiplies in float32."""
        return torch.float32 in (self._dtype, storage.keys.dtype)

    def _by_cublas(self, num_rows: int, matrix: Matrix) -> bool:
        """True if cuBLAS computes the product."""
        most = self.policy.tuning.tile_rows if matrix.kind == DENSE else shapes.PACKED_TILE_ROWS
        return num_rows > most and not self.policy.invariant

    def tile_for(self, num_rows: int, matrix: Matrix) -> shapes.Tile:
        """Return the tile of a product with that many rows; a single row takes `matvec`'s."""
        if self.policy.invariant:
            return shapes.INVARIANT_TILE
        size = (matrix.out_features, matrix.in_features, matrix.kind, self.policy.multiprocessors)
        if num_rows <= shapes.MATVEC_ROWS:
            return shapes.matvec_tile(*size)
        return shapes.matmul_tile(min(num_rows, OUTPUT_HEAD_ROWS), *size, in_float32=self._dtype == torch.float32)

    def _multiply(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        out: torch.Tensor,
        norm: Norm | None = None,
        add: bool = False,
        glu: bool = False,
    ) -> None:
        """Compute x · matrixᵀ with a kernel that reads the matrix in its own format."""
        tile = self.tile_for(len(x), matrix)
        arrays = matrix_arrays(matrix)
        weight, eps = (norm.weight, norm.eps) if norm is not None else (arrays[0], 0.0)
        sizes = (matrix.in_features, matrix.out_features, out.stride(0), eps)
        flags: dict[str, Any] = {"NORM": norm is not None, "ADD": add, "GLU": glu}
        flags |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
        flags |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.block_m > 1:
            tiles = -(-len(x) // tile.block_m), -(-matrix.out_features // tile.block_n)
            flags |= {"KIND": matrix.kind, "EXACT": self._exact, "BLOCK_M": tile.block_m}
            flags["PREFETCH"] = self.policy.tuning.prefetch and tile.block_m == 16
            self.launch(matmul.matmul, tiles, x, *arrays, weight, out, len(x), *sizes, **flags)
            return
        grid = (-(-matrix.out_features // tile.block_n), len(x))
        if matrix.kind == DENSE:
            self.launch(matmul.matvec, grid, x, matrix.dense, weight, out, *sizes, **flags)
        else:
            self.launch(matmul.matvec_packed, grid, x, *arrays, weight, out, *sizes, KIND=matrix.kind, **flags)

    def normed(self, x: torch.Tensor, norm: Norm, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return norm(x), rounded to `dtype`, or to the dtype of x."""
        out = torch.empty_like(x, dtype=dtype)
        width = x.shape[1]
        block = shapes.next_power_of_2(width)
        warps = min(16, max(1, block // 512))
        self.launch(unfused.rms_norm, (len(x),), x, norm.weight, out, width, norm.eps, BLOCK=block, num_warps=warps)
        return out

    def _dense(self, matrix: Matrix) -> torch.Tensor:
        """Return the matrix in the activations' dtype: its dense copy, or else dequantized into scratch."""
        if matrix.dense is not None:
            return matrix.dense
        out = self._scratch[: matrix.num_weights].view(matrix.out_features, matrix.in_features)
        self._gather(matrix, None, None, out)
        return out

    def _gather(
        self, matrix: Matrix, numbers: torch.Tensor | None, samples: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        block = min(EMBED_COLUMNS, max(32, shapes.next_power_of_2(matrix.in_features)))
        values, scales, factors = matrix_arrays(matrix)
        self.launch(
            unfused.gather_rows,
            (len(out), -(-matrix.in_features // block)),
            values,
            scales,
            factors,
            numbers if numbers is not None else values,
            samples if samples is not None else values,
            out,
            matrix.in_features,
            NUMBERED=numbers is not None,
            KIND=matrix.kind,
            BLOCK_K=block,
        )

    def _empty(self, num_rows: int, width: int) -> torch.Tensor:
        return torch.empty((num_rows, width), dtype=self._dtype, device=self._device)


def matrix_arrays(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, scales and factors as kernels take them; another array stands in for one that the kind lacks."""
    if matrix.packed is None:
        dense = matrix.own_dense()
        return dense, dense, dense
    packed = matrix.packed
    return packed.values, packed.scales, packed.factors if packed.factors is not None else packed.scales
