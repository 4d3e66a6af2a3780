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

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch

from forge.backends.cuda import warm_up
from forge.backends.cuda.graphs import Graphs
from forge.backends.cuda.inputs import InputBuffer, Shape, expected_shapes, shape_of
from forge.backends.cuda.network import Ending, Network, Recorder
from forge.backends.cuda.plain import DeviceBatch, TorchOperations
from forge.backends.cuda.results import LEAST_ROWS, Results
from forge.backends.cuda.sampling import list_draws
from forge.backends.cuda.shapes import DEFAULT_TUNING, MULTIPROCESSORS, Policy, Tuning
from forge.backends.cuda.storage import Rotations, TorchKvStorage
from forge.backends.cuda.weights import Matrix, load_matrix
from forge.backends.fusion import Fusion
from forge.backends.timed import StepClock, TimedOperations
from forge.cache.kv_storage import DEFAULT_KV_DTYPES, KvLayout
from forge.errors import UsageError
from forge.model.backend import Backend, ForwardPass, Tensor
from forge.model.forward_batch import ForwardBatch
from forge.model.model import Logits
from forge.model.operation_time import OperationTime
from forge.trace.records import Execution

if TYPE_CHECKING:
    from forge.backends.cuda.launches import Launcher, Launches  # defines the kernels, so only when they are wanted
    from forge.backends.cuda.warm_up import LaunchDescription

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARE_FOR_COPIES = 0.25
"""The share of the device's free memory that dense copies of packed weights may take."""
INTERPRETED_MULTIPROCESSORS = 2
"""The multiprocessors that shapes are chosen for under the interpreter, which takes a millisecond per program."""
WARM_CONTEXT = 4096
"""Kernels that steps up to so many tokens launch are compiled before the first step."""
DEPENDENT_LAUNCH = (9, 0)
"""The first compute capability whose kernels may start before the one before them has ended."""


class CudaBackend(Backend):
    """Runs a model on a GPU: fuses each forward pass into Triton kernels, and replays it as a CUDA graph
    where it can."""

    name = "cuda"
    default_kv_dtype = DEFAULT_KV_DTYPES[name]

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
        runs_ahead: bool | None = None,
        launcher: "Launcher | None" = None,
        on_compile: Callable[[int, int], None] | None = None,
        tuning: Tuning = DEFAULT_TUNING,
    ):
        """invariant: one tiling for every number of rows, so that a row's bits never depend on its batch (needs
        `triton`). graphs: whether to capture steps as CUDA graphs; None for where there is a GPU. dense_copies: whether
        packed weights are kept dense too, for batches of many rows; None asks the device's memory. runs_ahead: whether
        batches may name tokens that the step before has yet to choose; None for where steps are launched without
        waiting for them. launcher: who is handed every launch instead of Triton. on_compile: called with (kernels
        compiled, kernels in all) if any have to be. tuning: switches, for measuring what they are worth."""
        if invariant and kernels != "triton":
            raise UsageError("--invariant needs the triton kernels: torch's own products depend on the number of rows")
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        if self._on_gpu and self._device.index is None:  # whichever thread runs a step, it is this one's device
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._kernels, self._dtype, self._invariant, self._quantize = kernels, DTYPES[dtype], invariant, quantize
        self._dense_copies, self._launcher, self._on_compile = dense_copies, launcher, on_compile
        self._tuning = tuning
        self.can_capture = (self._on_gpu if graphs is None else graphs) and kernels == "triton"
        """Whether steps are padded to the shapes that graphs are captured for."""
        self.uses_graphs = self.can_capture
        """May be switched off and on between steps, to see what graphs are worth."""
        self.runs_ahead = (self._on_gpu if runs_ahead is None else runs_ahead) and kernels == "triton"
        self._steps: WeakKeyDictionary[TorchKvStorage, _Steps] = WeakKeyDictionary()
        self._output_heads: dict[object, Matrix | None] = {}
        self._rotations = Rotations(self._device)
        self._matrix_names: dict[int, str] = {}
        self._operations: TorchOperations | TimedOperations = TorchOperations(self._rotations)
        self._clock: StepClock | None = None
        self._launches: Launches | None = None
        self._buffer = InputBuffer(self._device)
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
        """Every matrix that a forward multiplies with, once, including the output head. Empty before `prepare`."""
        if self._launches is None:
            return []
        return [*self._launches.network.products(), *filter(None, self._output_heads.values())]

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
        if self._kernels == "triton" and self._launches is None:
            self._output_head_of(forward_pass)
            self._fuse(forward_pass, layout)
            if self._on_gpu and self._launcher is None:
                expected = self.expected_launches(forward_pass, layout, self._launches_dependent())
                warm_up.compile_missing(expected, self._on_compile or (lambda done, of: None))

    @torch.inference_mode()
    def run(self, forward_pass: ForwardPass, batch: ForwardBatch, storage: TorchKvStorage) -> Logits:
        """Start the pass. The result waits for the device only when its numbers are read."""
        if self._kernels == "torch":
            return forward_pass(self._operations, DeviceBatch.of(batch, self._device), storage)
        with torch.cuda.device(self._device) if self._on_gpu else nullcontext():
            out, num_logit_rows = self.launch(forward_pass, batch, storage), len(batch.logit_rows)
            if self._output_head_of(forward_pass) is None:
                return out[:num_logit_rows].cpu().numpy().copy()
            assert self.execution is not None, "launch says how it ran"
            return self._steps[storage].results.after_step(out, num_logit_rows, self.execution)

    def launch(self, forward_pass: ForwardPass, batch: ForwardBatch, storage: TorchKvStorage) -> torch.Tensor:
        """Launch a pass of the fused kernels. Returns its result on the device: float32, including padding rows."""
        self.prepare(forward_pass, storage.layout)
        run, buffer, steps = self._launches, self._buffer, self._steps.get(storage)
        assert run is not None, "prepare fuses"
        if steps is None:
            results = Results(self._device, run.launch)
            steps = self._steps[storage] = _Steps(Graphs(self._tuning.pause_gc), results)
        results, output_head = steps.results, self._output_head_of(forward_pass)
        shape = shape_of(batch, run.policy, storage.layout.block_size, run.attends_in_float32(storage))
        results.before_step()
        moved = buffer.reach(shape, batch.block_tables.size)
        moved |= self._rotations.reach(int(batch.context_lens.max()), run.network.rope)
        moved |= run.reserve(shape)
        for built in self._steps.values() if moved else ():
            built.graphs.drop()
        if results.reach(max(1, shape.num_logit_rows)):  # which are this storage's own
            steps.graphs.drop()
        buffer.fill(shape, batch)

        def compute() -> torch.Tensor:
            return run.forward(output_head, buffer.inputs(shape), storage, results.samples)

        why_eager = self._why_eager(shape)
        if why_eager is not None:
            self.execution = Execution("eager", why_eager, shape.num_rows)
            return compute()
        out, self.execution = steps.graphs.run((shape, output_head is None), shape.num_rows, compute)
        return out

    def last_graph(self, storage: TorchKvStorage) -> "torch.cuda.CUDAGraph | None":
        """Return the graph of the last step on `storage`; None if it ran kernel by kernel."""
        steps = self._steps.get(storage)
        if steps is None or self.execution is None or self.execution.mode != "graph":
            return None
        return steps.graphs.last

    def _why_eager(self, shape: Shape) -> str | None:
        """Return why a step of that shape must run eagerly; None if it may be a graph."""
        if self._clock is not None:
            return "time is kept per operation"
        if not self.uses_graphs:
            return "graphs are off"
        return None if shape.is_bucket else "more rows than graphs are captured for"

    def _output_head_of(self, forward_pass: ForwardPass) -> Matrix | None:
        """Return the output head of a pass; None if the pass ends in hidden states."""
        name = getattr(forward_pass, "__func__", forward_pass)  # a bound method is a new object every time
        if name not in self._output_heads:
            ending = Ending()
            forward_pass(ending, None, None)
            self._output_heads[name] = ending.output_head
        return self._output_heads[name]

    def _fuse(self, forward_pass: ForwardPass, layout: KvLayout) -> None:
        from forge.backends.cuda.launches import Launches, TritonLauncher

        recorder = Recorder(self._dtype, layout.num_kv_heads, layout.head_dim)
        forward_pass(Fusion(recorder), None, None)
        network = recorder.network
        assert network is not None, "a pass ends with `result`"
        self._copy_dense(network)
        sizes = network.num_heads, network.num_kv_heads, self._multiprocessors()
        policy = Policy(*sizes, invariant=self._invariant, buckets=self.can_capture, tuning=self._tuning)
        launcher = self._launcher or TritonLauncher(self._launches_dependent())
        self._launches = Launches(network, policy, self._rotations, self._device, self._dtype, launcher)
        self._time_steps()

    def _launches_dependent(self) -> bool:
        return self._on_gpu and torch.cuda.get_device_capability(self._device) >= DEPENDENT_LAUNCH

    @torch.inference_mode()
    def expected_launches(
        self, forward_pass: ForwardPass, layout: KvLayout, dependent: bool
    ) -> "list[LaunchDescription]":
        """List what steps up to `WARM_CONTEXT` are likely to launch, each specialization once. Launches no kernel."""
        from forge.backends.cuda.launches import ListingLauncher

        assert self._launches is not None, "prepare fuses"
        listing = ListingLauncher(dependent)
        run = copy(self._launches)
        run.launch, run.network = listing, run.network.distinct()
        storage = self.new_storage(replace(layout, num_layers=len(run.network.layers), num_blocks=1))
        self._rotations.reach(1, run.network.rope)
        samples = torch.zeros((LEAST_ROWS, 2), dtype=torch.int32, device=self._device)
        for shape in expected_shapes(run.policy, run.attends_in_float32(storage), WARM_CONTEXT):
            buffer = InputBuffer(self._device)
            buffer.reach(shape, 1)
            run.reserve(shape)
            run.forward(self._output_head_of(forward_pass), buffer.inputs(shape), storage, samples)
        if self.runs_ahead:
            list_draws(run.network.embedding.out_features, self._device, listing)
        return list(listing.found)

    def _copy_dense(self, network: Network) -> None:
        """Make dense copies of the packed matrices for products of many rows, all or none; the output head needs
        none."""
        packed = [matrix for matrix in network.products() if matrix.packed is not None]
        if self._dense_copies is None and self._on_gpu:
            free, _ = torch.cuda.mem_get_info(self._device)
            needed = sum(m.num_weights for m in packed) * self._dtype.itemsize
            copies = needed <= SHARE_FOR_COPIES * free
        else:
            copies = bool(self._dense_copies)
        for matrix in packed if copies else ():
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
            return self._operations.clock.times() if isinstance(self._operations, TimedOperations) else ()
        return self._clock.times() if self._clock is not None else ()

    def _time_steps(self) -> None:
        if self._launches is not None and self._clock is not None:
            self._launches.step = self._clock.step

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True)
class _Steps:
    """The graphs and results that the steps on one storage share."""

    graphs: Graphs
    results: Results
