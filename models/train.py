"""Training on the corpus: next-token prediction, one pass, within a budget of time.

Matrices are updated by Muon (Jordan et al. 2024), embeddings and norms by AdamW. The learning rate rises over the first steps, stays,
and falls linearly to zero over the last part of the budget, which is counted in seconds of training (pauses do not count), so a slower
machine trains on fewer tokens but always ends on a finished schedule. With `steps` the budget is counted in steps instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .corpus.documents import QUESTIONS, STORIES, Shares
from .data import Rehearsal, Rows, Weigher
from .network import Qwen3

SEED = 20
ANSWER_WEIGHT, COPY_WEIGHT = 5.0, 4.0  # see data.Weigher
CHECKPOINT_SECONDS = 240.0
LONGEST_STEP = 12.0  # seconds of one step that count against the budget; what is longer was a pause


@dataclass(frozen=True)
class Phase:
    """A stretch of training that ends at `until`, a fraction of the budget: rows per batch, and tokens per row."""

    until: float
    rows: int
    length: int
    shares: Shares = field(default_factory=lambda: STORIES)
    """Which documents."""


TARGET_PHASES = (Phase(0.5, 4, 512), Phase(0.8, 8, 512), Phase(0.97, 8, 512, QUESTIONS), Phase(1.0, 2, 2048))


@dataclass(frozen=True)
class Schedule:
    """The budget (in seconds, or in steps if `steps` is not zero), the phases, and the shape of the learning rate."""

    seconds: float
    steps: int = 0
    phases: tuple[Phase, ...] = TARGET_PHASES
    matrix_rate: float = 4e-3
    other_rate: float = 2e-3
    warmup_steps: int = 60
    decay_from: float = 0.45
    weight_decay: float = 0.05
    rehearse_until: float = 0.2
    weigh_copies_until: float = 0.88

    def progress(self, step: int, elapsed: float) -> float:
        """The used fraction of the budget."""
        return min(1.0, step / self.steps if self.steps else elapsed / self.seconds)

    def rate(self, step: int, progress: float) -> float:
        """The factor on both learning rates."""
        decay = min(1.0, (1.0 - progress) / (1.0 - self.decay_from))
        return min((step + 1) / self.warmup_steps, max(decay, 0.0))

    def phase(self, progress: float) -> Phase:
        return next(phase for phase in self.phases if progress < phase.until or phase is self.phases[-1])


@dataclass
class State:
    """Where a run stands; saved with every checkpoint."""

    step: int = 0
    elapsed: float = 0.0
    tokens: int = 0
    next_document: int = 0


def make_optimizers(model: Qwen3, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            matrices, lr=schedule.matrix_rate, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=schedule.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def weighted_loss(model: Qwen3, tokens: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """The loss to minimize, a mean with weights [batch, length], and the plain mean in nats per token."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum(), losses.detach().mean().item()


LossFunction = Callable[[Qwen3, Tensor, Tensor], tuple[Tensor, float]]


class Workers:
    """Computes gradients on `count` threads, each with its own share of the rows and one core.

    Shares meet once per step. Splitting every operation over the cores instead makes them meet thousands of times per step, which on a
    machine that does other work at the same time costs a third of the speed.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))

    def gradients(self, model: Qwen3, loss_function: LossFunction, tokens: Tensor, weights: Tensor) -> float:
        """Set the gradients of `model` to the mean over the shares; returns the mean plain loss."""
        parameters = list(model.parameters())

        def work(rows: Tensor, marks: Tensor) -> tuple[tuple[Tensor, ...], float]:
            loss, plain = loss_function(model, rows, marks)
            return torch.autograd.grad(loss, parameters), plain

        shares = list(self.pool.map(work, tokens.chunk(self.count), weights.chunk(self.count)))
        for parameter, *parts in zip(parameters, *(gradients for gradients, _ in shares), strict=True):
            parameter.grad = torch.stack(parts).mean(0) if len(parts) > 1 else parts[0]
        return sum(plain for _, plain in shares) / len(shares)


def train(
    model: Qwen3,
    tokenizer: Tokenizer,
    schedule: Schedule,
    folder: Path,
    loss_function: LossFunction = weighted_loss,
    after_checkpoint: Callable[[Qwen3, State], None] = lambda model, state: None,
    threads: int = os.cpu_count() or 1,
) -> State:
    """Train `model` in place until the budget is used; resume from `folder` if it holds a checkpoint."""
    torch.manual_seed(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    optimizers = make_optimizers(model, schedule)
    state = resume(model, optimizers, folder / "checkpoint.pt")
    rows, weigher = Rows(tokenizer, state.next_document), Weigher(tokenizer, ANSWER_WEIGHT, COPY_WEIGHT)
    rehearsal = Rehearsal(tokenizer, seed=state.step)
    workers = Workers(threads)
    last_save = time.monotonic()
    while (progress := schedule.progress(state.step, state.elapsed)) < 1.0:
        started = time.monotonic()
        phase = schedule.phase(progress)
        rows.shares = phase.shares
        tokens = rows.batch(phase.rows, phase.length)
        if progress < schedule.rehearse_until:
            tokens[1::2] = rehearsal.batch(len(tokens[1::2]), phase.length)
        plain = workers.gradients(
            model, loss_function, tokens, weigher.weights(tokens, progress < schedule.weigh_copies_until)
        )
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        step_optimizers(optimizers, schedule.rate(state.step, progress))
        seconds = time.monotonic() - started
        state.step += 1
        state.elapsed += min(seconds, LONGEST_STEP)
        state.tokens += tokens[:, 1:].numel()
        state.next_document = rows.next_document
        if state.step % 20 == 0:
            speed = tokens[:, 1:].numel() / seconds
            print(
                f"step {state.step:5d}  {100 * progress:5.1f} %  tokens {state.tokens / 1e6:6.2f} M  loss {plain:.4f}"
                f"  gradient {gradient_norm:.2f}  {speed:.0f} tokens/s  {time.strftime('%H:%M:%S')}",
                flush=True,
            )
        if time.monotonic() - last_save > CHECKPOINT_SECONDS:
            save(model, optimizers, state, folder / "checkpoint.pt")
            after_checkpoint(model, state)
            last_save = time.monotonic()
    save(model, optimizers, state, folder / "checkpoint.pt")
    after_checkpoint(model, state)
    return state


def step_optimizers(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """One update with every learning rate scaled by `factor`, then clear the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("full_rate", group["lr"])
            group["lr"] = group["full_rate"] * factor
        optimizer.step()
        optimizer.zero_grad()


def save(model: Qwen3, optimizers: list[torch.optim.Optimizer], state: State, path: Path) -> None:
    """Write a checkpoint; the file at `path` is always a whole one."""
    temporary = path.with_suffix(".tmp")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "state": vars(state),
        },
        temporary,
    )
    os.replace(temporary, path)


def resume(model: Qwen3, optimizers: list[torch.optim.Optimizer], path: Path) -> State:
    """Load the checkpoint at `path` into model and optimizers, or start from the beginning."""
    if not path.exists():
        return State()
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return State(**saved["state"])


def load_weights(model: Qwen3, path: Path) -> Qwen3:
    """The weights of a checkpoint, without its optimizers."""
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model.eval()


@torch.no_grad()
def continue_greedily(model: Qwen3, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The prompt and `count` greedy tokens (fewer if the text ends), all recomputed for each: slow and simple."""
    tokens = tokenizer.encode(prompt).ids
    stops = {tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")}
    for _ in range(count):
        hidden = model.hidden(torch.tensor([tokens]))[0, -1]
        token = int((model.token_embd.weight @ hidden).argmax())
        if token in stops:
            break
        tokens.append(token)
    return tokenizer.decode(tokens, skip_special_tokens=False)
