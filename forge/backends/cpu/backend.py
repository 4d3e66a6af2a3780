"""`--device cpu`: int8 kernels in Python through Numba, several times the speed of the reference.

What makes it fast is explained where it is done: weights in the order of their use (`packing`, `tiles`), activations in
int8, the whole forward pass as one program for a thread pool (`recorder`, `thread_pool`). What makes it exact is the
arithmetic contract: no operation here lets a row's bits depend on another row, on a thread or on an instruction set.
"""

import ctypes
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from forge.backends.cpu.compilation import CompileProgress, compile_all, instruction_set
from forge.backends.cpu.llvm_code import LANES
from forge.backends.cpu.op_layout import (
    CHUNK,
    CONTEXT,
    GLU_SCRATCH_FLOATS,
    MAX_THREADS,
    OPERATION,
    QUERIES_PER_BLOCK,
    ROWS_PER_BLOCK,
    structure,
)
from forge.backends.cpu.packed_cache import PackedCache, packed_cache
from forge.backends.cpu.packing import Arena, PackedMatrix, aligned_empty, encode_q8_0, huge_pages, pack, padded
from forge.backends.cpu.processor import usable_cpus
from forge.backends.cpu.program import ExpertMatrices, Matrix, Program, Recording, Traffic, Vector, allocate
from forge.backends.cpu.recorder import Recorder
from forge.backends.cpu.thread_pool import POOL_KERNELS, ThreadPool
from forge.backends.cpu.tiles import AMX_ROWS, GROUP
from forge.backends.fusion import Fusion
from forge.backends.timed import OperationClock, short_name
from forge.cache.kv_storage import DEFAULT_KV_DTYPES, KV_DTYPES, BlockCopy, KvLayout, KvStorage, vector_bytes
from forge.errors import UsageError
from forge.gguf import FLOAT_TYPES, GGMLType
from forge.model.backend import Backend, ForwardPass, Tensor
from forge.model.forward_batch import ForwardBatch
from forge.model.operation_time import OperationTime
from forge.model.rope import Rope

SMALLEST_PROGRAM = 16
"""Rows that a program is first placed for; doubled as larger batches come."""
BARRIER_SECONDS = 2e-6
BYTES_PER_SECOND = 50e9
PRODUCTS_PER_SECOND = 250e9
"""What one thread does about, for deciding whether several are worth their barriers."""
LEAST_POSITIONS = 1024
"""Positions that the rotation tables are first computed for; doubled likewise."""
_PACKED = {"bfloat16": 2, "int8": 4}
"""Of packed keys and values, how many numbers lie together: dimensions of a key, tokens of values."""
_BATCH_ARRAYS = ("token_ids", "positions", "cu_seqlens", "slot_mapping", "block_tables", "logit_rows")
"""Those of a `ForwardBatch` that kernels read, which have the same names in the context."""


class CpuKvStorage(KvStorage):
    """K and V as arrays `[num_blocks, num_layers, num_kv_heads, block_size, head_dim padded to 16]`.

    In a block the tokens of one head lie side by side, because that is how attention reads them: 4 KB in a row where
    tokens-first would be 256 bytes here and there. All layers of a block lie together too: memory is taken as blocks
    are written, however many are reserved, and copying a block is one copy. int8 has its scale behind it, in the row's
    last four bytes; bfloat16 is kept as the uint16 that holds its bits. What is padding stays zero, so it adds nothing
    to a product.

    In blocks of a multiple of 16 tokens both are *packed*, in the order in which attention multiplies them: of every 16
    tokens, bfloat16 keys as `[width / 2, 16 tokens, 2]` and values as `[8, width, 2 tokens]`; int8 keys as `[width / 4,
    16 tokens, 4]` and values as `[4, width, 4 tokens]`, and behind them the 16 scales.
    """

    def __init__(self, layout: KvLayout):
        self.layout = layout
        self.width = padded(layout.head_dim, LANES)
        dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}[layout.kv_dtype]
        row_bytes = vector_bytes(self.width, layout.kv_dtype)
        row = row_bytes // np.dtype(dtype).itemsize
        shape = (layout.num_blocks, layout.num_layers, layout.num_kv_heads, layout.block_size, row)
        self.keys, self.values = _zeros(shape, dtype), _zeros(shape, dtype)
        head_bytes = layout.block_size * row_bytes
        layer_bytes = layout.num_kv_heads * head_bytes
        self.description = described = structure(CONTEXT)().cache
        """Where the arrays are, and their strides, as a batch context has them."""
        described.keys, described.values = self.keys.ctypes.data, self.values.ctypes.data
        described.block_size, described.kind = layout.block_size, KV_DTYPES.index(layout.kv_dtype)
        described.block_bytes, described.layer_bytes = layout.num_layers * layer_bytes, layer_bytes
        described.head_bytes, described.row_bytes = head_bytes, row_bytes

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self.keys[copy.destination] = self.keys[copy.source]
            self.values[copy.destination] = self.values[copy.source]

    def read_blocks(self, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        return self.keys[list(blocks)], self.values[list(blocks)]

    def write_blocks(self, blocks: Sequence[int], data: tuple[np.ndarray, np.ndarray]) -> None:
        self.keys[list(blocks)], self.values[list(blocks)] = data

    def gather(self, layer: int, block_table: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = np.asarray(block_table, np.int64)[: -(-length // self.layout.block_size)]
        keys, values = self.keys[blocks, layer], self.values[blocks, layer]
        if self.layout.kv_dtype in _PACKED and self.layout.block_size % LANES == 0:
            keys, values = self._by_token(keys, True), self._by_token(values, False)
        return self._floats(keys, length), self._floats(values, length)

    def _by_token(self, stored: np.ndarray, are_keys: bool) -> np.ndarray:
        """Return packed `[blocks, kv_heads, block_size, row]` with the rows of the tokens one behind the other."""
        blocks, heads, size, row = stored.shape
        by_sixteen = stored.reshape(blocks, heads, size // LANES, LANES * row)
        numbers, scales = np.split(by_sixteen, [LANES * self.width], axis=-1)
        together = _PACKED[self.layout.kv_dtype]
        if are_keys:
            by_token = numbers.reshape(blocks, heads, -1, self.width // together, LANES, together).swapaxes(-3, -2)
        else:
            by_token = numbers.reshape(blocks, heads, -1, self.width, together).swapaxes(-2, -1)
        return np.concatenate([part.reshape(blocks, heads, size, -1) for part in (by_token, scales)], axis=-1)

    def _floats(self, stored: np.ndarray, length: int) -> np.ndarray:
        """Convert `[blocks, kv_heads, block_size, row]` as stored to float32 `[length, kv_heads, head_dim]`."""
        by_token = stored.transpose(0, 2, 1, 3).reshape(-1, self.layout.num_kv_heads, stored.shape[-1])[:length]
        tokens = by_token[..., : self.layout.head_dim]
        if self.layout.kv_dtype == "int8":
            return tokens * by_token[..., self.width :].copy().view(np.float32)
        if self.layout.kv_dtype == "bfloat16":
            return (tokens.astype(np.uint32) << 16).view(np.float32)
        return tokens.astype(np.float32)


class CpuBackend(Backend):
    """Runs a model on the CPU: packs its weights for the instruction set, records each forward pass once as a program
    of kernels, and runs that program on a thread pool. A row's bits never depend on its batch."""

    name = "cpu"
    default_kv_dtype = DEFAULT_KV_DTYPES[name]

    def __init__(
        self, threads: int | None = None, quantize: str | None = None, on_compile: CompileProgress | None = None
    ):
        """threads: None for all CPUs that this process may use. quantize: `q8_0` quantizes float matrices as they are
        loaded. on_compile: called while kernels are compiled, which happens once per machine."""
        self._quantize = quantize
        instruction_set()  # a path that was forced and cannot run is refused before anything is loaded
        self.threads = threads or min(usable_cpus(), MAX_THREADS)
        if self.threads > MAX_THREADS:
            raise UsageError(f"--threads {threads} is more than the {MAX_THREADS} that the kernels can use")
        self._on_compile = on_compile
        self._arena = Arena()
        self._cache = PackedCache()
        self._pool: ThreadPool | None = None
        self._programs: dict[ForwardPass, Program] = {}
        self._context = structure(CONTEXT)()
        self._context_address = ctypes.addressof(self._context)
        self._inputs: dict[str, np.ndarray] = {}
        self._cos = self._sin = np.zeros((0, 0), np.float32)
        self._weight_bytes = 0
        self._clock: OperationClock | None = None
        """Where time is kept."""
        self._lock = threading.RLock()
        """Held during a forward: programs, context and threads are one per backend, and engines of several threads may
        share it. Uncontended it costs 0.3 µs."""

    @property
    def description(self) -> str:
        quantized = f", floats quantized to {self._quantize}" if self._quantize else ""
        return f"{instruction_set().name}, {self.threads} thread{'s' if self.threads > 1 else ''}{quantized}"

    # Loading

    @contextmanager
    def loading(self, path: Path | None, nbytes: int) -> Iterator[None]:
        try:
            with packed_cache(path, nbytes, self._quantize) as self._cache:
                yield
        finally:
            self._cache = PackedCache()

    def load_matrix(self, tensor: Tensor) -> Matrix:
        return Matrix(short_name(tensor.name), self._packed(tensor))

    def load_experts(self, tensor: Tensor) -> ExpertMatrices:
        experts, rows, _ = tensor.shape
        return ExpertMatrices(short_name(tensor.name), self._packed(tensor), experts, rows)

    def _packed(self, tensor: Tensor) -> PackedMatrix:
        return self._cache.packed(tensor.name, partial(self._pack, tensor))

    def _pack(self, tensor: Tensor) -> PackedMatrix:
        """Pack a matrix; of a matrix for each expert, one under the other, each with padding to whole tiles."""
        *experts, rows, columns = tensor.shape
        ggml_type, raw = tensor.ggml_type, tensor.raw()
        is_router = "ffn_gate_inp" in tensor.name
        if self._quantize and ggml_type in FLOAT_TYPES and columns % GROUP == 0 and not is_router:
            ggml_type, raw = GGMLType.Q8_0, encode_q8_0(tensor.dequantize())
        if not experts:
            return pack(ggml_type, raw, (rows, columns), self._arena)
        whole = padded(rows, LANES)
        if whole > rows:
            by_expert = raw.reshape(*experts, rows, -1)
            raw = np.zeros((*experts, whole, by_expert.shape[2]), np.uint8)
            raw[:, :rows] = by_expert
        return pack(ggml_type, raw.reshape(-1), (experts[0] * whole, columns), self._arena)

    def load_vector(self, tensor: Tensor) -> Vector:
        values = tensor.dequantize()
        out = aligned_empty((padded(len(values), GROUP),), np.float32)
        out[:] = 0
        out[: len(values)] = values
        return Vector(out, len(values))

    def new_storage(self, layout: KvLayout) -> CpuKvStorage:
        return CpuKvStorage(layout)

    # Running

    def prepare(self, forward_pass: ForwardPass, layout: KvLayout) -> None:
        with self._lock:
            if forward_pass not in self._programs:
                recording = self._record(forward_pass, layout)
                self._programs[forward_pass] = allocate(recording, self.threads, SMALLEST_PROGRAM, 1)
                if not len(self._cos) and recording.rope is not None:
                    self._rotations(recording.rope, LEAST_POSITIONS)

    def run(self, forward_pass: ForwardPass, batch: ForwardBatch, storage: CpuKvStorage) -> np.ndarray:
        with self._lock:
            self.prepare(forward_pass, storage.layout)
            pool = self._pool
            assert pool is not None, "recording a pass starts the threads"
            pool.finish()
            program = self._programs[forward_pass] = self._fitting(self._programs[forward_pass], batch)
            program.place_logits()
            self._fill(batch, storage)
            self._context.num_expert_rows = batch.num_rows * program.recording.experts_per_row
            if self._clock is None:
                single = self._runs_single_threaded(program, batch)
                pool.run(program.address, len(program.table), self._context_address, single_threaded=single)
            else:
                self._run_timed(program, pool, batch, self._clock)
            return program.take_logits(len(batch.logit_rows))

    def _runs_single_threaded(self, program: Program, batch: ForwardBatch) -> bool:
        """True if one thread finishes before several would have waited for each other.

        A barrier costs about 2 µs on two cores, and a forward has one per operation. Against that stands what the other
        threads would take off: their share of streaming the weights or, with more rows, of multiplying. With the
        bundled model (11 MB) one row takes 0.17 ms on one thread and 0.28 ms on two.
        """
        weight_bytes = self._weight_bytes
        seconds = max(weight_bytes / BYTES_PER_SECOND, batch.num_rows * weight_bytes / PRODUCTS_PER_SECOND)
        saved = seconds * (1 - 1 / self.threads)
        return saved < len(program.table) * BARRIER_SECONDS

    def _record(self, forward_pass: ForwardPass, layout: KvLayout) -> Recording:
        recorder = Recorder(layout.num_kv_heads, layout.head_dim)
        forward_pass(Fusion(recorder), None, None)
        recording = recorder.recording
        compile_all([*recording.kernels(), *POOL_KERNELS], self._on_compile)
        if self._pool is None:
            self._weight_bytes = sum(matrix.packed.nbytes for matrix in recording.matrices)
            self._start_threads(recording, layout)
        return recording

    def _start_threads(self, recording: Recording, layout: KvLayout) -> None:
        self._pool = ThreadPool(self.threads)
        weakref.finalize(self, self._pool.close)  # its threads end with the backend
        width, group = padded(layout.head_dim, LANES), recording.heads_per_kv_head
        queries = max(QUERIES_PER_BLOCK, ROWS_PER_BLOCK * group)
        # Laid out by `_attend_block`: rows of a chunk, its keys and values packed, their scales; of queries
        # their factors, sums, positions, numbers, weights, outputs, states; and 16 queries' sums of values by AMX.
        of_chunk = CHUNK * (4 + padded(2 * width, 64) // 4 + width // 2 + 7)
        of_attention = of_chunk + queries * (CHUNK + 2 * width + 7) + 2 * AMX_ROWS * width
        floats = max(of_attention, GLU_SCRATCH_FLOATS, recording.widest_without_values)
        scratch = aligned_empty((self.threads, padded(4 * floats, 4096)), np.uint8)
        self._inputs["scratch"] = scratch
        self._context.scratch, self._context.scratch_bytes = scratch.ctypes.data, scratch.shape[1]

    def _fitting(self, program: Program, batch: ForwardBatch) -> Program:
        """Return the program, placed for a larger batch if this one needs it. Extends the rotation tables likewise."""
        recording, rows, logit_rows = program.recording, batch.num_rows, len(batch.logit_rows)
        last = max(batch.context_lens.tolist())  # of a few, 1.5 µs faster than NumPy
        if last > len(self._cos) and recording.rope is not None:  # which a pass without attention lacks
            self._rotations(recording.rope, _doubled(len(self._cos), last))
        if rows <= program.max_rows and logit_rows <= program.max_logit_rows:
            return program
        most = _doubled(program.max_rows, rows), _doubled(program.max_logit_rows, logit_rows)
        return allocate(recording, self.threads, *most)

    def _rotations(self, rope: Rope, positions: int) -> None:
        """Compute cos and sin of every position and frequency in float64: float32 `[positions, head_dim / 2]`."""
        angles = np.arange(positions)[:, None] * rope.frequencies()
        scale = rope.attention_factor
        self._cos, self._sin = (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)
        self._context.rope_cos, self._context.rope_sin = self._cos.ctypes.data, self._sin.ctypes.data

    def _fill(self, batch: ForwardBatch, storage: CpuKvStorage) -> None:
        context = self._context
        context.cache = storage.description
        context.num_rows, context.num_logit_rows = batch.num_rows, len(batch.logit_rows)
        context.num_sequences, context.table_stride = batch.block_tables.shape
        for name in _BATCH_ARRAYS:
            self._input(name, getattr(batch, name))

    def _input(self, name: str, values: np.ndarray) -> None:
        """Copy a batch array to a buffer whose address is already known, because looking an address up takes longer."""
        room = self._inputs.get(name)
        if room is None or room.size < values.size:
            room = self._inputs[name] = np.zeros(_doubled(64, values.size), np.int32)
            setattr(self._context, name, room.ctypes.data)
        room[: values.size] = values.reshape(-1)

    # Keeping time

    def time_operations(self) -> None:
        self._clock = OperationClock()

    def operation_times(self) -> tuple[OperationTime, ...]:
        return self._clock.times() if self._clock is not None else ()

    def _run_timed(self, program: Program, pool: ThreadPool, batch: ForwardBatch, clock: OperationClock) -> None:
        """Run and time one operation at a time, each as a program of its own."""
        written = int((batch.slot_mapping >= 0).sum())
        traffic = Traffic(self._context, program.recording, int(batch.context_lens.sum()), written)
        single, layer = self._runs_single_threaded(program, batch), None
        for number, operation in enumerate(program.recording.operations):
            if operation.layer != layer:
                layer = operation.layer
                clock.begin_layer(layer)
            entry = program.table[number : number + 1].copy()
            structure(OPERATION).from_buffer(entry).waits = 1
            started = time.perf_counter()
            pool.run(entry.ctypes.data, 1, self._context_address, single_threaded=single)
            seconds = time.perf_counter() - started
            clock.add(operation.name, seconds, traffic.reads(operation), traffic.writes(operation))


def _zeros(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        return huge_pages(size + 1024)[:size].view(dtype).reshape(shape)  # AMX reads 16 lines at a time
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from None


def _doubled(start: int, least: int) -> int:
    """Double `start` until it is at least `least`."""
    while start < least:
        start *= 2
    return start
