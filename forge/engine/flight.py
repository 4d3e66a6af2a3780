"""A step on its way, from the launch of its forward pass until its logits are read."""

from dataclasses import dataclass

import numpy as np

from forge.engine.answers import OneShotResult
from forge.engine.oneshot import OneShotItem
from forge.engine.step_plan import StepPlan
from forge.model.forward_batch import ForwardBatch
from forge.speculation.speculator import StepGuesses


@dataclass
class Flight:
    plan: StepPlan
    guesses: StepGuesses
    joining: list[OneShotItem]
    """Requests that keep nothing and have rows in the batch."""
    batch: ForwardBatch | None
    logits: np.ndarray | None
    answers: dict[int, OneShotResult]
    """Of requests that have passes of their own."""
    schedule_ms: float
    forward_ms: float
