"""`--device cuda`: the same forward pass on an NVIDIA GPU.

What makes it fast is told where it is done: kernels that fuse what belongs together (`kernels/`, `launches.py`), graphs
that launch a whole step at once (`graphs.py`), inputs that a graph reads from memory (`inputs.py`), weights in the form
in which they are read (`weights.py`).

Two ways of computing: `triton`, the above, and `torch`, every operation by itself (`plain.py`), which the first is held
against. Both run on any torch device, so all of it is tested without a GPU, Triton under its interpreter.

Arithmetic: weights and activations in bfloat16 (or float32, to check exactness), products accumulated in float32, norms
and softmax in float32, keys and values in the storage's dtype. The kernels' shapes follow the number of rows, so a
row's last bits may depend on its batch; with `invariant` they do not, and neither do its tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch

from forge.backends.backend import Backend, ForwardPass, OperationTime, Tensor
from forge.backends.cuda.graphs import Execution, Graphs
from forge.backends.cuda.inputs import InputBuffer, Policy, shape_of
from forge.backends.cuda.network import Network, Recorder
from forge.backends.cuda.plain import DeviceBatch, TorchOperations
from forge.backends.cuda.rotations import Rotations
from forge.backends.cuda.shapes import MULTIPROCESSORS
from forge.backends.cuda.storage import TorchKvStorage
from forge.backends.cuda.timing import StepClock
from forge.backends.cuda.weights import Matrix, load_matrix
from forge.backends.timed import TimedOperations
from forge.cache.kv_storage import KvLayout
from forge.errors import UsageError
from forge.model.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from forge.backends.cuda.launches import Launcher, Launches  # defines the kernels, so only when they are wanted

KERNELS = ("triton", "torch")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARE_FOR_COPIES = 0.25
"""Of the device's free memory, what dense copies of packed weights may take."""
INTERPRETED_MULTIPROCESSORS = 2
"""What shapes are chosen for under the interpreter, which takes a millisecond per program."""
DEPENDENT_LAUNCH = (9, 0)
"""The first compute capability whose kernels may start before the one before them has ended."""


class CudaBackend(Backend):
    name = "cuda"
    default_kv_dtype = "bfloat16"

    def __init__(
        self,
        device: str = "cuda",
        *,
        kernels: str = "triton",
        dtype: str = "bfloat16",
        invariant: bool = False,
        graphs: bool | None = None,
        quantize: str | None = None,
        dense_copies: bool | None = None,
        launcher: "Launcher | None" = None,
    ):
        """invariant: one tiling for every number of rows, so that a row's bits never depend on its batch (needs
        `triton`). graphs: whether to capture steps as CUDA graphs; None for where there is a GPU. dense_copies: whether
        packed weights are kept dense too, for batches of many rows; None asks the device's memory. launcher: who is
        handed every launch instead of Triton."""
        if kernels not in KERNELS:
            raise UsageError(f"unknown kernels {kernels!r}; there are {', '.join(KERNELS)}")
        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}; there are {', '.join(DTYPES)}")
        if invariant and kernels != "triton":
            raise UsageError("--invariant needs the triton kernels: torch's own products depend on the number of rows")
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._kernels, self._dtype, self._invariant, self._quantize = kernels, DTYPES[dtype], invariant, quantize
        self._dense_copies, self._launcher = dense_copies, launcher
        self.uses_graphs = (self._on_gpu if graphs is None else graphs) and kernels == "triton"
        """May be switched off and on between steps, to see what graphs are worth."""
        self._graphs: WeakKeyDictionary[TorchKvStorage, Graphs] = WeakKeyDictionary()
        self._rotations = Rotations(self._device)
        self._matrix_names: dict[int, str] = {}
        self._operations: TorchOperations | TimedOperations = TorchOperations(self._rotations)
        self._clock: StepClock | None = None
        self._fused: _Fused | None = None
        self.execution: Execution | None = None
        """How the last step ran; None before the first, and for `torch`."""

    @property
    def description(self) -> str:
        where = torch.cuda.get_device_name(self._device) if self._on_gpu else f"torch on {self._device.type}"
        parts = [where, str(self._dtype).removeprefix("torch."), f"{self._kernels} kernels"]
        parts += [f"floats quantized to {self._quantize}"] if self._quantize else []
        parts += ["one tiling"] if self._invariant else []
        return ", ".join(parts)

    @property
    def matrices(self) -> list[Matrix]:
        """What a forward multiplies with: every matrix once, the output head included. Empty before `prepare`."""
        return self._fused.network.products() if self._fused is not None else []

    # Loading

    def load_matrix(self, tensor: Tensor) -> Matrix:
        keep_packed = self._kernels == "triton"
        matrix = load_matrix(tensor, self._device, self._dtype, keep_packed=keep_packed, quantize=self._quantize)
        self._matrix_names[id(matrix)] = tensor.name
        return matrix

    def load_vector(self, tensor: Tensor) -> torch.Tensor:
        return torch.from_numpy(np.array(tensor.dequantize(), np.float32)).to(self._device)

    def new_storage(self, layout: KvLayout) -> TorchKvStorage:
        return TorchKvStorage(layout, self._device)

    # Running

    def prepare(self, forward_pass: ForwardPass, layout: KvLayout) -> None:
        if self._kernels == "triton" and self._fused is None:
            self._fuse(forward_pass, layout)

    @torch.inference_mode()
    def run(self, forward_pass: ForwardPass, batch: ForwardBatch, storage: TorchKvStorage) -> np.ndarray:
        if self._kernels == "torch":
            return forward_pass(self._operations, DeviceBatch.of(batch, self._device), storage)
        self.prepare(forward_pass, storage.layout)
        return self._on_host(self._run_fused(batch, storage), len(batch.logit_rows))

    def _run_fused(self, batch: ForwardBatch, storage: TorchKvStorage) -> torch.Tensor:
        from forge.backends.cuda.forward import forward

        fused = self._fused
        shape = shape_of(batch, fused.policy, storage.layout.block_size)
        network = fused.network
        moved = fused.buffer.reach(shape, batch)
        moved |= self._rotations.reach(int(batch.context_lens.max()), network.head_dim, network.theta)
        moved |= fused.launches.reserve(shape)
        fused.buffer.fill(shape, batch)
        if moved:
            for graphs in self._graphs.values():
                graphs.drop()

        def compute() -> torch.Tensor:
            return forward(network, fused.launches, fused.buffer.inputs(shape), storage)

        if not self.uses_graphs or self._clock is not None:
            why = "time is kept per operation" if self._clock is not None else "graphs are off"
            self.execution = Execution("eager", why, shape.num_rows)
            return compute()
        graphs = self._graphs.setdefault(storage, Graphs())
        logits, self.execution = graphs.run(shape, compute)
        return logits

    def _on_host(self, logits: torch.Tensor, wanted: int) -> np.ndarray:
        """The rows that are not padding, in memory that is the caller's. Waits for the step only if there are any."""
        if wanted == 0:
            return np.empty((0, logits.shape[1]), np.float32)
        if not self._on_gpu:
            return logits[:wanted].numpy().copy()
        host = torch.empty((wanted, logits.shape[1]), dtype=torch.float32, pin_memory=True)
        host.copy_(logits[:wanted], non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return host.numpy()

    def _fuse(self, forward_pass: ForwardPass, layout: KvLayout) -> None:
        from forge.backends.cuda.kernels.parts import INTERPRETED
        from forge.backends.cuda.launches import Launches, TritonLauncher

        recorder = Recorder(self._dtype, layout.num_kv_heads, layout.head_dim)
        forward_pass(recorder, None, None)
        network = recorder.network
        self._copy_dense(network)
        policy = Policy(
            heads=network.num_heads,
            kv_heads=network.num_kv_heads,
            multiprocessors=self._multiprocessors(),
            invariant=self._invariant,
            buckets=self.uses_graphs,
        )
        dependent = self._on_gpu and torch.cuda.get_device_capability(self._device) >= DEPENDENT_LAUNCH
        launcher = self._launcher or TritonLauncher(dependent)
        exact = INTERPRETED or self._dtype == torch.float32
        launches = Launches(network, policy, self._rotations, self._device, self._dtype, launcher, exact)
        launches.make_scratch()
        self._fused = _Fused(network, policy, launches, InputBuffer(self._device))
        self._time_steps()

    def _copy_dense(self, network: Network) -> None:
        """Dense copies of packed matrices for products of many rows, all or none; the head needs none."""
        packed = [matrix for matrix in network.products()[:-1] if matrix.packed is not None]
        if self._dense_copies is None and self._on_gpu:
            free, _ = torch.cuda.mem_get_info(self._device)
            needed = sum(m.rows * m.columns for m in packed) * self._dtype.itemsize
            wanted = needed <= SHARE_FOR_COPIES * free
        else:
            wanted = bool(self._dense_copies)
        for matrix in packed if wanted else ():
            matrix.make_dense(self._dtype)

    def _multiprocessors(self) -> int:
        if self._device.type == "cpu":
            return INTERPRETED_MULTIPROCESSORS
        if not self._on_gpu:
            return MULTIPROCESSORS
        return torch.cuda.get_device_properties(self._device).multi_processor_count

    # Keeping time

    def time_operations(self) -> None:
        self._operations = TimedOperations(TorchOperations(self._rotations), self._matrix_names)
        self._clock = StepClock(self._synchronize)
        self._time_steps()

    def operation_times(self) -> tuple[OperationTime, ...]:
        if self._kernels == "torch":
            return self._operations.times() if isinstance(self._operations, TimedOperations) else ()
        return self._clock.times() if self._clock is not None else ()

    def _time_steps(self) -> None:
        if self._fused is not None and self._clock is not None:
            self._fused.launches.step = self._clock.step

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


@dataclass
class _Fused:
    """What the fused kernels run on."""

    network: Network
    policy: Policy
    launches: "Launches"
    buffer: InputBuffer
