"""What the steps on one storage gave, while the device may already be at the next: the timeline of a GPU's one stream.

    stream   words·[ step 1 ]·copy·draw·copy·words·[ step 2 ]·copy·draw·copy·words·[ step 3 ]·copy
    host     launch 1 · draw 1, launch 2 · read 1 · draw 2, launch 3 · read 2 · …

    words    the step's inputs, from pinned memory (`inputs.py`): two buffers of the host's take turns
    step     the forward pass, a graph's replay or kernel by kernel, and the argmax of each logit row into `samples`
    draw     only where a request draws its token: the drawn tokens into `samples`, over the argmax (`sampling.py`)
    copy     `samples` to memory of the host's, 8 bytes a row, marked by an event: two buffers take turns

The stream does all of it in order. So step 2 takes its tokens from `samples`, at an address that never changes, after
step 1 and its draw wrote them and before the host has seen them; and the host waits for the event of one copy, never
for a later step.

Logits stay where they are. Those of a replayed graph lie where the next replay writes; if a caller still holds them
when the next step comes, they are set aside on the device (600 KB a row: 0.3 µs each). A result that is not read when
its buffer's turn comes is read then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np
import torch

from forge.backends.cuda.sampling import SamplingRows, sample_into
from forge.backends.cuda.shapes import next_power_of_2
from forge.backends.cuda.storage import HostBuffer
from forge.model.model import Draw
from forge.trace.records import Execution

if TYPE_CHECKING:
    from forge.backends.cuda.launches import Launcher

LEAST_ROWS = 1024
MOST_PINNED_BYTES = 64 << 20
"""Copies of logits up to this size go through memory that the device writes directly, and that takes long to make."""


class TorchLogits:
    """One step's logits: `forge.model.model.DeviceLogits`."""

    def __init__(
        self,
        rows: torch.Tensor,
        samples: torch.Tensor,
        turn: "_Turn",
        execution: Execution,
        launch: "Launcher",
    ):
        """rows: float32 `[R, vocab]` on the device, which the next step overwrites if a graph wrote them. samples:
        where the next step takes its tokens from."""
        passing = execution.mode == "graph"
        self._launch = launch
        self._rows, self._samples, self._turn, self._passing = rows, samples, turn, passing
        self._argmax: tuple[list[int], list[float]] | None = None
        self.sampled = False
        self.shape = (rows.shape[0], rows.shape[1])
        self.execution = execution
        """How the logits were computed."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice) -> np.ndarray:
        if isinstance(rows, slice):
            return self._on_host(self._rows[rows])
        number = range(len(self))[rows]  # an IndexError is what ends an iteration
        return self._on_host(self._rows[number : number + 1])[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self[:])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:].astype(dtype or np.float32, copy=False)

    def argmax_rows(self) -> tuple[list[int], list[float]]:
        if self._argmax is None:
            self._argmax = self._turn.read(len(self))
        return self._argmax

    @torch.inference_mode()
    def sample(self, draws: Sequence[Draw]) -> None:
        """Draw each row's token after the step, in place of its argmax."""
        assert self._argmax is None and not self.sampled, "its tokens were read already"
        with torch.cuda.device(self._rows.device) if self._rows.device.type == "cuda" else nullcontext():
            rows = SamplingRows.of(draws, self.shape[1], self._rows.device)
            sample_into(self._rows, rows, self._samples, self._launch)
        self._turn.fetch(self._samples[: len(self)])
        self.sampled = True

    def release(self) -> None:
        self._rows, self._passing = self._rows[:0], False

    def set_aside(self) -> None:
        """Copy the logits before a step overwrites them."""
        if self._passing:
            self._rows, self._passing = self._rows.clone(), False

    @torch.inference_mode()
    def _on_host(self, rows: torch.Tensor) -> np.ndarray:
        if rows.device.type != "cuda":
            return rows.numpy().copy()
        if rows.nbytes > MOST_PINNED_BYTES:
            return rows.cpu().numpy()
        host = torch.empty(rows.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        torch.cuda.current_stream(rows.device).synchronize()
        return host.numpy()


class Results:
    """Holds the results of consecutive steps on one storage."""

    def __init__(self, device: torch.device, launch: "Launcher"):
        """launch: for the kernel that draws tokens."""
        self._device, self._launch = device, launch
        self._turns: list[_Turn] = []
        self._count = 0
        self._last: Callable[[], TorchLogits | None] = lambda: None
        self.samples = torch.zeros((0, 2), dtype=torch.int32, device=device)
        """The token of each logit row of the last step (its argmax, unless it was drawn), and the bits of its logit:
        int32 `[R or more, 2]`."""

    def reach(self, num_rows: int) -> bool:
        """Make room for the samples of so many rows. Returns whether they moved, which invalidates every graph."""
        if num_rows <= len(self.samples):
            return False
        capacity = max(LEAST_ROWS, next_power_of_2(num_rows))
        samples = torch.zeros((capacity, 2), dtype=torch.int32, device=self._device)
        samples[: len(self.samples)] = self.samples  # the next step may take its tokens from there
        self.samples = samples
        self._turns = [_Turn((capacity, 2), self._device) for _ in range(2)]  # a reader of an old one keeps it
        return True

    def before_step(self) -> None:
        """Set aside what the next step would overwrite, if a caller still holds it."""
        if (last := self._last()) is not None:
            last.set_aside()

    def after_step(self, logits: torch.Tensor, num_rows: int, execution: Execution) -> TorchLogits:
        """Return the result of the step just launched, whose first `num_rows` rows are not padding."""
        turn = self._turns[self._count % 2]
        self._count += 1
        turn.clear()
        turn.fetch(self.samples[:num_rows])
        step_logits = TorchLogits(logits[:num_rows], self.samples, turn, execution, self._launch)
        turn.holder = self._last = ref(step_logits)
        return step_logits


class _Turn(HostBuffer):
    """A host buffer for the samples of every other step."""

    holder: "Callable[[], TorchLogits | None]" = staticmethod(lambda: None)

    def fetch(self, samples: torch.Tensor) -> None:
        """Start the copy of a step's samples."""
        self.copy(self.tensor[: len(samples)], samples)

    def read(self, count: int) -> tuple[list[int], list[float]]:
        """Wait for the last copy and return it."""
        self.wait()
        numbers = self.numbers[:count]
        return numbers[:, 0].tolist(), numbers[:, 1].view(np.float32).tolist()

    def clear(self) -> None:
        """Have the holder of the last copy read it, because the buffer will be overwritten."""
        if (holder := self.holder()) is not None:
            holder.argmax_rows()
