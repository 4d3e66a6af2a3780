"""Measurements for the model card, all on documents that training never saw, for models as their files hold them.

Loss on stories in nats per byte; accuracy of one-token answers by kind of question, in phrasings of training and in one that is held out;
consistency of the stories that a model tells; agreement of draft and target on the target's own text, which decides what speculative
decoding accepts; the cost of one forward pass.

`python -m models.evaluate models/tales-q8_0.gguf models/tales-draft-q8_0.gguf` prints all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .consistency import consistency
from .corpus.conversations import plain_story, question_prompt
from .corpus.documents import HELD_OUT, document
from .corpus.questions import ASKERS
from .corpus.stories import draw_world, tell
from .data import Rows
from .export import load
from .network import Qwen3, parameter_count
from .sampling import Cache, extend, last_logits

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Agreement:
    """How often the draft says what the target says, on text that the target wrote greedily and at `TEMPERATURE`.

    `accepted` is, for every K, the mean share of K guesses that speculation accepts: the draft's most likely tokens, over rounds laid
    end to end on greedy text. `sampled` is the same for one guess of rejection sampling on sampled text: the sum of min(p, q).
    """

    rate: float
    accepted: dict[int, float]
    sampled: float


@torch.no_grad()
def held_out_loss(model: Qwen3, tokenizer: Tokenizer, count: int = 200) -> float:
    """Mean loss on held-out stories in nats per byte of text, which compares models with different tokenizers."""
    total, size = 0.0, 0
    for number in range(HELD_OUT, HELD_OUT + count):
        text = document(number, {plain_story: 1.0})
        tokens = torch.tensor([[tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(text).ids]])
        total += F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="sum").item()
        size += len(text.encode())
    return total / size


@torch.no_grad()
def answer_accuracy(
    model: Qwen3, tokenizer: Tokenizer, per_kind: int = 300, held_out: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """The share of held-out decision questions of each kind that the model answers right, counted in two ways.

    First, its answer is the most likely token of the whole vocabulary; second, the more likely of the question's two options, as
    `forge classify` chooses.
    """
    of_all, of_two = {}, {}
    for kind in ASKERS:
        rng = Random(f"held-out {kind}")
        right = right_of_two = 0
        for _ in range(per_kind):
            prompt, question = question_prompt(rng, kind, held_out)
            hidden = model.hidden(torch.tensor([tokenizer.encode(prompt).ids]))[0, -1]
            logits = model.token_embd.weight @ hidden
            right += tokenizer.decode([int(logits.argmax())]) == question.answer
            labels = [tokenizer.encode(option).ids[0] for option in question.options]
            right_of_two += question.options[int(logits[labels].argmax())] == question.answer
        of_all[kind], of_two[kind] = right / per_kind, right_of_two / per_kind
    return of_all, of_two


def stories(
    model: Qwen3, tokenizer: Tokenizer, count: int, temperature: float, length: int = 300, start: int = 8
) -> list[str]:
    """Stories of up to `length` tokens that begin with the first `start` tokens of held-out stories."""
    ends = {tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")}
    prompts = []
    for number in range(count):
        rng = Random(f"story {number}")
        prompts.append(tokenizer.encode(tell(draw_world(rng), rng).text).ids[:start])
    texts = []
    for first in range(0, count, 100):
        rows = torch.tensor(prompts[first : first + 100])
        written = extend(
            model, rows, start + length, torch.full((len(rows),), temperature), torch.Generator().manual_seed(first)
        )
        for ids in written.tolist():
            end = next((i for i, token in enumerate(ids) if token in ends), len(ids))
            texts.append(tokenizer.decode(ids[:end]))
    return texts


def story_consistency(model: Qwen3, tokenizer: Tokenizer, count: int = 500) -> dict[str, dict[str, float]]:
    """The share of right mentions in stories told greedily and at `TEMPERATURE`, all together and by kind; see `consistency`."""
    figures = {}
    for name, temperature in (("greedy", 0.0), ("sampled", TEMPERATURE)):
        found = consistency(stories(model, tokenizer, count, temperature))
        figures[name] = {"all": found.share} | {
            kind: found.right[kind] / found.total[kind] for kind in sorted(found.total)
        }
    return figures


def target_texts(target: Qwen3, tokenizer: Tokenizer, temperature: float, start: int, rows: int, length: int) -> Tensor:
    """[rows, length]: the first `start` tokens of held-out documents, continued by the target."""
    prompts = Rows(tokenizer, HELD_OUT + 10_000).batch(rows, start - 1)
    return extend(target, prompts, length, torch.full((rows,), temperature), torch.Generator().manual_seed(0))


@torch.no_grad()
def agreement(
    target: Qwen3, draft: Qwen3, tokenizer: Tokenizer, start: int = 8, rows: int = 64, length: int = 136
) -> Agreement:
    """Compare the choices of both after `start` tokens, position by position, on the target's own text."""
    texts = target_texts(target, tokenizer, 0.0, start, rows, length)
    same = draft(texts[:, :-1])[:, start - 1 :].argmax(-1) == texts[:, start:]
    texts = target_texts(target, tokenizer, TEMPERATURE, start, rows, length)
    p, q = ((model(texts[:, :-1])[:, start - 1 :] / TEMPERATURE).softmax(-1) for model in (target, draft))
    accepted = {k: accepted_share(same.tolist(), k) for k in (2, 4, 5, 8)}
    return Agreement(same.float().mean().item(), accepted, torch.minimum(p, q).sum(-1).mean().item())


def accepted_share(rows: list[list[bool]], k: int) -> float:
    """Accepted over proposed guesses: a round stops at its first wrong guess, and the target adds one token of its own."""
    proposed = accepted = 0
    for row in rows:
        position = 0
        while position < len(row):
            guesses = row[position : position + k]
            good = guesses.index(False) if False in guesses else len(guesses)
            proposed += len(guesses)
            accepted += good
            position += good + 1
    return accepted / proposed


def seconds_per_token(model: Qwen3, context: int = 128, count: int = 64) -> float:
    """Median time of one decode step of this PyTorch code for one sequence; only ratios of it mean anything."""
    cache = Cache(model, 1, context + count + 1)
    token = torch.zeros(1, 1, dtype=torch.long)
    last_logits(model, token.expand(1, context), cache)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        last_logits(model, token, cache)
        times.append(time.perf_counter() - started)
    return median(times)


def measure_target(path: Path, small: bool = False) -> dict[str, object]:
    """Everything about one target. `small` measures a little of it, to try it out."""
    model, tokenizer = load(path)
    questions, told, read = (10, 20, 10) if small else (300, 500, 200)
    answers, of_two = answer_accuracy(model, tokenizer, questions)
    held_out, held_out_of_two = answer_accuracy(model, tokenizer, questions, held_out=True)
    return {
        "parameters": parameter_count(model),
        "held_out_loss": held_out_loss(model, tokenizer, read),
        "answers": answers,
        "answers_of_two": of_two,
        "answers_held_out_phrasing": held_out,
        "answers_held_out_phrasing_of_two": held_out_of_two,
        "consistency": story_consistency(model, tokenizer, told),
    }


def measure_draft(target_path: Path, path: Path) -> dict[str, object]:
    """Everything about a draft of one target."""
    (target, tokenizer), (draft, _) = load(target_path), load(path)
    return {
        "parameters": parameter_count(draft),
        "held_out_loss": held_out_loss(draft, tokenizer),
        "agreement": asdict(agreement(target, draft, tokenizer)),
        "cost": seconds_per_token(draft) / seconds_per_token(target),
    }


def existing_file(text: str) -> Path:
    """An argument that is the path of a file. Raises `ArgumentTypeError`."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return Path(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=existing_file)
    parser.add_argument("drafts", type=existing_file, nargs="*")
    parser.add_argument("--small", action="store_true", help="a few questions and stories only")
    arguments = parser.parse_args()
    figures = {arguments.target.name: measure_target(arguments.target, arguments.small)}
    figures |= {path.name: measure_draft(arguments.target, path) for path in arguments.drafts}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
