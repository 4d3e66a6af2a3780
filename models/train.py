"""Training on the corpus: next-token prediction, one pass, within a budget of tokens.

Matrices are updated by Muon, embeddings and norms by AdamW (`optimizer.py`). The learning rate rises over the first steps, stays, and
falls linearly to zero over the last part of the budget. A checkpoint holds all that the next step depends on, so a run that is stopped
at any moment and started again ends with the same weights as one that is not, on the same machine.

Speed, in tokens per CPU second of a Zen 4 with AVX512-BF16, gradients of the target in rows of 512 tokens: 1,340 with autocast, 1,410
with a bfloat16 twin and attention in halves, 1,910 compiled. With the update, two cores train 3,200 tokens/s in batches of 4,096 tokens
and 3,500 of 8,192. What bounds it: matrix products, at 210 GFLOP/s and core, are 60 % of a step; attention is 20 %. Settings of the
allocator save page faults, and 1 % of the time: compiled code allocates little.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .corpus.documents import FACTS, STORIES, Shares, document
from .data import AnswerKinds, Rehearsal, Rows, Weigher
from .network import Qwen3
from .optimizer import Optimizer

CHECKPOINT_SECONDS = 240.0
LOG_STEPS = 20


@dataclass(frozen=True)
class Phase:
    """A stretch of training: its tokens, rows per batch, tokens per row, and what is in them."""

    tokens: int
    rows: int
    length: int
    shares: Shares = field(default_factory=lambda: STORIES)
    """Which documents."""
    rehearsal: float = 0.0
    """Share of the rows that only teach copying."""
    text_weight: float = 1.0
    copy_weight: float = 1.0
    answer_weight: float = 5.0
    """What a target weighs in the loss; see `data.Weigher`."""


MILLION = 1_000_000
TARGET_PHASES = (
    Phase(2 * MILLION, 8, 128, FACTS, rehearsal=1.0),
    Phase(8 * MILLION, 16, 128, FACTS, rehearsal=0.25, text_weight=0.1),
    Phase(8 * MILLION, 8, 512, copy_weight=3.0),
    Phase(9 * MILLION // 2, 16, 512, copy_weight=2.0),
    Phase(3 * MILLION // 2, 4, 2048),
)
"""To copy; to look up and to compare, in short documents; stories; more of them per step; long conversations."""


@dataclass(frozen=True)
class Schedule:
    """The phases, and the shape of the learning rate."""

    phases: tuple[Phase, ...] = TARGET_PHASES
    matrix_rate: float = 4e-3
    other_rate: float = 2e-3
    warmup_steps: int = 60
    decay_from: float = 0.45
    weight_decay: float = 0.05

    @property
    def tokens(self) -> int:
        """The whole budget."""
        return sum(phase.tokens for phase in self.phases)

    def rate(self, step: int, tokens: int) -> float:
        """The factor on both learning rates."""
        decay = min(1.0, (1.0 - tokens / self.tokens) / (1.0 - self.decay_from))
        return min((step + 1) / self.warmup_steps, max(decay, 0.0))

    def phase(self, tokens: int) -> Phase:
        """The phase after so many tokens."""
        for phase in self.phases:
            if tokens < phase.tokens:
                return phase
            tokens -= phase.tokens
        return self.phases[-1]


@dataclass
class State:
    """Where a run stands; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    next_document: int = 0
    waiting: list[int] = field(default_factory=list)
    seconds: float = 0.0


class Part(NamedTuple):
    """What a loss function returns for some rows: the weighted sum to minimize, the plain sum, and its choices for the answers."""

    loss: Tensor
    plain: Tensor
    chosen: Tensor


LossFunction = Callable[[Qwen3, Tensor, Tensor, Tensor], Part]
"""(model, tokens [batch, length + 1], weights [batch, length], answered [batch, length]) -> Part."""


def compiled(function: Callable) -> Callable:
    """`function` by way of PyTorch's compiler, where there is a C++ compiler for it, else as it is: slower by a third.

    The code is for one thread, since every worker has a core of its own.
    """
    if not (shutil.which("g++") or shutil.which("clang++")):
        return function
    import torch._dynamo.config
    import torch._inductor.config

    torch._inductor.config.cpp.threads = 1
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function)


@compiled
def _cross_entropy(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum(), losses.detach().sum()


def next_token_loss(model: Qwen3, tokens: Tensor, weights: Tensor, answered: Tensor) -> Part:
    """The cross-entropy of every next token."""
    hidden = model.hidden(tokens[:, :-1])
    loss, plain = _cross_entropy(
        hidden.flatten(0, 1), model.token_embd.weight, tokens[:, 1:].flatten(), weights.flatten()
    )
    with torch.no_grad():
        chosen = F.linear(hidden[answered], model.token_embd.weight.to(hidden.dtype)).argmax(-1)
    return Part(loss, plain, chosen)


def half_precision(model: Qwen3) -> Qwen3:
    """A twin that computes in bfloat16, its blocks compiled. It shares the embedding, in float32, whose gradient is a long sum."""
    twin = copy.deepcopy(model)
    twin.token_embd = model.token_embd
    twin.blocks.bfloat16()
    twin.output_norm.bfloat16()
    for block in twin.blocks:
        block.forward = compiled(block.forward)
    return twin


class Workers:
    """Computes gradients on `count` threads, each with its own share of the rows and one core.

    Shares meet once per step. Splitting every operation over the cores instead makes them meet thousands of times per step, which on a
    machine that does other work at the same time costs a third of the speed.
    """

    def __init__(self, model: Qwen3, loss_function: LossFunction, count: int) -> None:
        self.model, self.loss_function, self.count = model, loss_function, count
        self.twin = half_precision(model)
        self.pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        self.shapes: set[torch.Size] = set()

    def gradients(self, tokens: Tensor, weights: Tensor, answered: Tensor) -> tuple[float, Tensor]:
        """Set the gradients of the model; returns the mean plain loss and the choices for the answers."""
        with torch.no_grad():
            torch._foreach_copy_(self._parameters(self.twin), self._parameters(self.model))
        total = weights.sum()

        def work(rows: Tensor, marks: Tensor, asked: Tensor) -> tuple[tuple[Tensor, ...], Part]:
            part = self.loss_function(self.twin, rows, marks, asked)
            return torch.autograd.grad(part.loss / total, list(self.twin.parameters())), part

        shares = list(zip(tokens.chunk(self.count), weights.chunk(self.count), answered.chunk(self.count), strict=True))
        for share in shares:
            if share[0].shape not in self.shapes:  # compiles, which must not happen on two threads at once
                work(*share)
                self.shapes.add(share[0].shape)
        results = list(self.pool.map(lambda share: work(*share), shares))
        for parameter, *parts in zip(self.model.parameters(), *(gradients for gradients, _ in results), strict=True):
            parameter.grad = sum(part.float() for part in parts)
        plain = sum(part.plain.item() for _, part in results) / weights.numel()
        return plain, torch.cat([part.chosen for _, part in results])

    @staticmethod
    def _parameters(model: Qwen3) -> list[Tensor]:
        """All but the embedding, which both share."""
        return [*model.blocks.parameters(), *model.output_norm.parameters()]


def train(
    model: Qwen3,
    tokenizer: Tokenizer,
    schedule: Schedule,
    folder: Path,
    loss_function: LossFunction = next_token_loss,
    prepare: Callable[[Tensor, int], None] = lambda tokens, step: None,
    first_document: int = 0,
    threads: int = os.cpu_count() or 1,
    stop_at: int | None = None,
) -> State:
    """Train `model` in place until the budget is used (or `stop_at` tokens are); resume from `folder` if it holds a checkpoint.

    `prepare` may change the tokens of a batch, given the number of the step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the cores belong to the workers: see `Workers`
    optimizer = Optimizer(model, schedule.matrix_rate, schedule.other_rate, schedule.weight_decay)
    checkpoint = Checkpoint(folder / "checkpoint.pt", fingerprint(model, schedule, tokenizer))
    state = checkpoint.load(model, optimizer) or State(next_document=first_document)
    log = Log(folder / "log.jsonl", state.step)
    rows = Rows(tokenizer, state.next_document, state.waiting, schedule.phase(state.tokens).shares)
    weigher, rehearsal, kinds = Weigher(tokenizer), Rehearsal(tokenizer), AnswerKinds(tokenizer)
    workers = Workers(model, loss_function, threads)
    counts: dict[str, list[int]] = {}
    last_save, losses = time.monotonic(), []
    while state.tokens < (stop_at or schedule.tokens):
        started = time.monotonic()
        phase = schedule.phase(state.tokens)
        if phase.shares is not rows.shares:
            rows = Rows(tokenizer, state.next_document, state.waiting, phase.shares)
        tokens = rows.batch(phase.rows, phase.length)
        prepare(tokens, state.step)
        answered, weights = (
            weigher.answers(tokens),
            weigher.weights(tokens, phase.text_weight, phase.copy_weight, phase.answer_weight),
        )
        if rehearsed := round(phase.rehearsal * phase.rows):
            chosen = slice(None, None, phase.rows // rehearsed)
            tokens[chosen] = rehearsal.batch(len(tokens[chosen]), phase.length, state.step)
            weights[chosen], answered[chosen] = 1.0, False
        plain, choices = workers.gradients(tokens, weights, answered)
        answers = tokens[:, 1:][answered]
        kinds.count(answers, choices == answers, counts)
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step(schedule.rate(state.step, state.tokens), workers.pool, workers.count)
        losses.append(plain)
        state.step += 1
        state.tokens += tokens[:, 1:].numel()
        state.seconds += time.monotonic() - started
        state.next_document, state.waiting = rows.next_document, rows.waiting
        if state.step % LOG_STEPS == 0:
            log.write(state, schedule, sum(losses) / len(losses), gradient_norm, counts)
            counts, losses = {}, []
        if time.monotonic() - last_save > CHECKPOINT_SECONDS and state.step % LOG_STEPS == 0:
            checkpoint.save(model, optimizer, state)
            last_save = time.monotonic()
    checkpoint.save(model, optimizer, state)
    return state


class Log:
    """One JSON object per line and one line on the terminal, every `LOG_STEPS` steps. Lines of steps to be done again are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = (
            [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
            if path.exists()
            else []
        )
        path.write_text("".join(f"{line}\n" for line in kept))
        self.started: tuple[float, int] | None = None

    def write(
        self, state: State, schedule: Schedule, loss: float, gradient: float, counts: dict[str, list[int]]
    ) -> None:
        now = time.monotonic()
        elapsed, done = (now - self.started[0], state.tokens - self.started[1]) if self.started else (0.0, 0)
        self.started = (now, state.tokens)
        speed = done / elapsed if elapsed else 0.0
        right = {kind: round(hits / total, 3) for kind, (hits, total) in sorted(counts.items())}
        line = {
            "step": state.step,
            "tokens": state.tokens,
            "loss": round(loss, 4),
            "gradient": round(gradient, 3),
            "rate": round(schedule.rate(state.step, state.tokens), 4),
            "right": right,
            "tokens_per_second": round(speed),
            "hours": round(state.seconds / 3600, 3),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        left = (schedule.tokens - state.tokens) / speed / 3600 if speed else 0.0
        answers = "  ".join(f"{kind} {100 * share:.0f}" for kind, share in right.items())
        print(
            f"{time.strftime('%H:%M:%S')}  step {state.step}  {state.tokens / 1e6:.2f} of {schedule.tokens / 1e6:.0f} M tokens"
            f"  loss {loss:.3f}  right in %: {answers}  {speed:.0f} tokens/s, {left:.1f} h left",
            flush=True,
        )


def fingerprint(model: Qwen3, schedule: Schedule, tokenizer: Tokenizer) -> str:
    """Changes with the network, the schedule, the tokenizer or the corpus: a run must not go on with another recipe."""
    sample = [document(number, shares) for shares in (FACTS, STORIES) for number in range(50)]
    phases = [
        asdict(phase) | {"shares": [[f.__name__, share] for f, share in phase.shares.items()]}
        for phase in schedule.phases
    ]
    parts = [asdict(model.config), phases, {**vars(schedule), "phases": None}, tokenizer.to_str(), sample]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Checkpoint:
    """A file that is always whole, with everything that the next step depends on."""

    def __init__(self, path: Path, recipe: str) -> None:
        self.path, self.recipe = path, recipe

    def save(self, model: Qwen3, optimizer: Optimizer, state: State) -> None:
        temporary = self.path.with_suffix(".tmp")
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state": vars(state),
            "recipe": self.recipe,
        }
        torch.save(saved, temporary)
        os.replace(temporary, self.path)

    def load(self, model: Qwen3, optimizer: Optimizer) -> State | None:
        """Fill model and optimizer; None if there is no checkpoint yet. SystemExit if it belongs to another recipe."""
        if not self.path.exists():
            return None
        saved = torch.load(self.path, weights_only=True)
        if saved["recipe"] != self.recipe:
            raise SystemExit(f"{self.path} comes from another recipe: remove its folder to train from the beginning")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return State(**saved["state"])


def load_weights(model: Qwen3, path: Path) -> Qwen3:
    """The weights of a checkpoint, without its optimizer."""
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model.eval()
