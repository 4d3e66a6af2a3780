"""Everything from nothing, in one command: `python -m models.build` (or `make models`) writes the GGUF files of this folder.

Steps: the tokenizer, the target, a draft distilled from it, a deliberately bad draft, the files, and the figures of the card beside those
of the files that were there before. It may be stopped at any moment and started again: work in progress lies in `models/build/`, and
the run goes on from the last checkpoint, at most a few minutes back. Budgets are tokens, so the files are the same on the same machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .card import write_card
from .distil import (
    BAD_DRAFT_SCHEDULE,
    COPYING_SCHEDULE,
    DRAFT_SCHEDULE,
    FIRST_DOCUMENT,
    Distillation,
    project_embedding,
)
from .evaluate import measure_draft, measure_target
from .export import export
from .network import BAD_DRAFT, DRAFT, TARGET, Qwen3
from .tokenizer import load_tokenizer
from .train import Schedule, train

TARGET_SEED, DRAFT_SEED, BAD_DRAFT_SEED = 1, 2, 3
HERE = Path(__file__).parent
TARGETS = ("tales-q8_0.gguf", "tales-q4_0.gguf")
DRAFTS = ("tales-draft-q8_0.gguf", "tales-bad-draft-q8_0.gguf")


def train_target(tokenizer: Tokenizer, folder: Path, stop_at: int | None = None) -> Qwen3:
    """The target, trained on the corpus."""
    model = Qwen3(TARGET, TARGET_SEED)
    train(model, tokenizer, Schedule(), folder / "target", stop_at=stop_at)
    return model.eval()


def distil_draft(target: Qwen3, tokenizer: Tokenizer, folder: Path, stop_at: int | None = None) -> Qwen3:
    """The draft: it learns to copy, then to say what the target says."""
    draft = Qwen3(DRAFT, DRAFT_SEED)
    project_embedding(target, draft)
    train(draft, tokenizer, COPYING_SCHEDULE, folder / "draft-copying", stop_at=stop_at)
    distillation = Distillation(target, tokenizer, DRAFT_SCHEDULE.phases[0].length)
    train(
        draft,
        tokenizer,
        DRAFT_SCHEDULE,
        folder / "draft",
        distillation.loss,
        distillation.prepare,
        FIRST_DOCUMENT,
        stop_at=stop_at,
    )
    return draft.eval()


def train_bad_draft(tokenizer: Tokenizer, folder: Path, stop_at: int | None = None) -> Qwen3:
    """A tiny model that has seen a little of the corpus and nothing of the target: a draft to lose with."""
    draft = Qwen3(BAD_DRAFT, BAD_DRAFT_SEED)
    train(draft, tokenizer, BAD_DRAFT_SCHEDULE, folder / "bad-draft", first_document=FIRST_DOCUMENT, stop_at=stop_at)
    return draft.eval()


def keep_old_files(output: Path, folder: Path) -> Path:
    """Copy the files that this run replaces to `folder`/before, once, so that they can be measured beside the new ones."""
    before = folder / "before"
    if not before.exists():
        temporary = folder / "before.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for path in output.glob("tales-*.gguf"):
            shutil.copy2(path, temporary)
        temporary.rename(before)
    return before


def measure(folders: tuple[Path, ...], cache: Path, small: bool) -> list[dict[str, object]]:
    """The figures of every file in each of `folders`, by its name, a process per processor measuring.

    `cache` keeps them, by SHA-256, from one start to the next.
    """
    known = json.loads(cache.read_text()) if cache.exists() else {}
    keys = {
        folder / name: f"{sha256(folder / name)} {sha256(folder / TARGETS[0])} {small}"
        for folder in folders
        for name in (*TARGETS, *DRAFTS)
        if (folder / name).exists()
    }
    with ProcessPoolExecutor(None, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = {
            pool.submit(measure_target, path, small)
            if path.name in TARGETS
            else pool.submit(measure_draft, path.parent / TARGETS[0], path): path
            for path, key in keys.items()
            if key not in known
        }
        for done in as_completed(running):
            known[keys[running[done]]] = done.result()
            print(f"measured {running[done]}", flush=True)
            cache.write_text(json.dumps(known))
    return [
        {
            path.name: {**known[key], "sha256": key.partition(" ")[0], "bytes": path.stat().st_size}
            for path, key in keys.items()
            if path.parent == folder
        }
        for folder in folders
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def gather_logs(folder: Path, path: Path) -> None:
    """All logs of the run, one after another, each line with the name of its model."""
    lines = []
    for name in ("target", "draft-copying", "draft", "bad-draft"):
        for line in (folder / name / "log.jsonl").read_text().splitlines():
            lines.append(json.dumps({"model": name, **json.loads(line)}))
    path.write_text("".join(f"{line}\n" for line in lines))


def positive_int(text: str) -> int:
    """An argument that counts something. Raises `ArgumentTypeError`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a number of tokens from 1, got {text}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=HERE / "build", help="folder for work in progress")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the GGUF files, the log and the card")
    parser.add_argument(
        "--try",
        dest="stop_at",
        type=positive_int,
        metavar="TOKENS",
        help="train every model for this many tokens only, to try it out",
    )
    arguments = parser.parse_args()
    for folder in (arguments.build, arguments.output):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{folder} cannot be a folder: {error.strerror}")
    try:
        build(arguments.build, arguments.output, arguments.stop_at)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from the last checkpoint") from None


def build(folder: Path, output: Path, stop_at: int | None = None) -> None:
    """Every step, with work in progress in `folder`; the files, the log and the card go to `output`."""
    before = keep_old_files(output, folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    target = train_target(tokenizer, folder, stop_at)
    draft = distil_draft(target, tokenizer, folder, stop_at)
    bad_draft = train_bad_draft(tokenizer, folder, stop_at)
    models = (target, target, draft, bad_draft)
    for model, name in zip(models, (*TARGETS, *DRAFTS), strict=True):
        export(model, tokenizer, output / name, name.removesuffix(".gguf").rpartition("-")[2])
    gather_logs(folder, output / "training_log.jsonl")
    new, old = measure((output, before), folder / "figures.json", small=stop_at is not None)
    (folder / "evaluation.json").write_text(json.dumps({"new": new, "old": old}, indent=2) + "\n")
    write_card(output / "README.md", new, old)
    print(f"done: {', '.join(new)} in {output}, figures in {output / 'README.md'}")


if __name__ == "__main__":
    main()
