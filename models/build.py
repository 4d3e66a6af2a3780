"""Everything from nothing: `python -m models.build` writes the three GGUF files of this folder.

Steps: train the tokenizer, train the target on the corpus, distil the draft from it, export, measure. Work in progress lives in the build
folder; run the same command again to go on after an interruption. Budgets are times of training, so a faster machine sees more text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from .distil import DRAFT_PHASES, DistillationLoss, project_embedding
from .evaluate import agreement, answer_accuracy, held_out_loss, seconds_per_token
from .export import export, quantized_copy
from .network import DRAFT, TARGET, Qwen3, parameter_count
from .tokenizer import load_tokenizer
from .train import Schedule, State, continue_greedily, train

TARGET_SEED, DRAFT_SEED = 1, 2
HERE = Path(__file__).parent
PROMPTS = (
    "Once upon a time",
    "The fox and the lantern",
    "<|im_start|>user\nTell me a story about a mouse and a bell.<|im_end|>\n<|im_start|>assistant\n",
)
FILES = {"target q8_0": "tales-q8_0.gguf", "target q4_0": "tales-q4_0.gguf", "draft q8_0": "tales-draft-q8_0.gguf"}


def train_target(tokenizer: Tokenizer, seconds: float, folder: Path) -> Qwen3:
    """The target, trained on the corpus."""
    model = Qwen3(TARGET, TARGET_SEED)

    def show(model: Qwen3, state: State) -> None:
        print("  >>", continue_greedily(model, tokenizer, PROMPTS[0], 60), flush=True)

    train(model, tokenizer, Schedule(seconds), folder / "target", after_checkpoint=show)
    return model.eval()


def distil_draft(target: Qwen3, tokenizer: Tokenizer, seconds: float, folder: Path) -> Qwen3:
    """The draft, distilled from the target."""
    draft = Qwen3(DRAFT, DRAFT_SEED)
    project_embedding(target, draft)
    schedule = Schedule(seconds, phases=DRAFT_PHASES, decay_from=0.3, rehearse_until=0.0)
    train(draft, tokenizer, schedule, folder / "draft", DistillationLoss(target, tokenizer, DRAFT_SEED))
    return draft.eval()


def measure(target: Qwen3, draft: Qwen3, tokenizer: Tokenizer) -> dict[str, object]:
    """The figures of the model card, for the weights as the files hold them."""
    models = {
        "target q8_0": quantized_copy(target, "q8_0"),
        "target q4_0": quantized_copy(target, "q4_0"),
        "draft q8_0": quantized_copy(draft, "q8_0"),
    }
    small = models["draft q8_0"]
    return {
        "parameters": {"target": parameter_count(target), "draft": parameter_count(draft)},
        "held_out_loss": {name: held_out_loss(model, tokenizer) for name, model in models.items()},
        "answer_accuracy": {
            name: answer_accuracy(model, tokenizer) for name, model in models.items() if name != "draft q8_0"
        },
        "agreement": {
            name: asdict(agreement(models[name], small, tokenizer)) for name in ("target q8_0", "target q4_0")
        },
        "seconds_per_token": {"target": seconds_per_token(target), "draft": seconds_per_token(draft)},
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.5, help="time for all training (default 1.5)")
    parser.add_argument("--draft-share", type=float, default=0.17, help="share of it for the draft (default 0.17)")
    parser.add_argument("--build", type=Path, default=HERE / "build", help="folder for work in progress")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the GGUF files")
    arguments = parser.parse_args()
    seconds = arguments.hours * 3600
    tokenizer = load_tokenizer(arguments.build / "tokenizer.json")
    target = train_target(tokenizer, seconds * (1 - arguments.draft_share), arguments.build)
    export(target, tokenizer, arguments.output / FILES["target q8_0"], "q8_0")
    export(target, tokenizer, arguments.output / FILES["target q4_0"], "q4_0")
    draft = distil_draft(target, tokenizer, seconds * arguments.draft_share, arguments.build)
    export(draft, tokenizer, arguments.output / FILES["draft q8_0"], "q8_0")
    figures = measure(target, draft, tokenizer)
    figures["sha256"] = {file: sha256(arguments.output / file) for file in FILES.values()}
    text = json.dumps(figures, indent=2)
    (arguments.build / "evaluation.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
