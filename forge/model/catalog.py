"""The models that come with forge, and how a name or a path on the command line becomes a model on disk.

In a checkout the bundled files lie in `models/`; in an installed wheel the same folder is package data. Nothing is ever
downloaded here: what runs is a bundled model, a file or folder that the user pointed at, or what `forge models pull`
brought before, under the name that it was pulled by.
"""

import hashlib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from forge.errors import UsageError
from forge.model.pulled import find_pulled, is_pull_name

DEFAULT_MODEL = "tales"
HASH_MODEL = "hash"
"""A model without a file (`forge.model.hash_model`). `hash:0.8` is a draft for it, with 80% of its choices."""


@dataclass(frozen=True)
class BundledModel:
    """A model that ships with forge."""

    name: str
    aliases: tuple[str, ...]
    file_name: str
    description: str

    @property
    def path(self) -> Path:
        return models_folder() / self.file_name

    @property
    def present(self) -> bool:
        return self.path.is_file()

    @property
    def bytes(self) -> int:
        """Size of the file, 0 where it is missing."""
        return self.path.stat().st_size if self.present else 0


BUNDLED = (
    BundledModel("tales-q8_0", ("tales",), "tales-q8_0.gguf", "tells short stories and answers questions about them"),
    BundledModel("tales-q4_0", (), "tales-q4_0.gguf", "the same model in 4 bits"),
    BundledModel("tales-draft-q8_0", ("tales-draft",), "tales-draft-q8_0.gguf", "a small model that guesses ahead"),
    BundledModel("tales-bad-draft-q8_0", ("tales-bad-draft",), "tales-bad-draft-q8_0.gguf", "one that guesses badly"),
)


def models_folder() -> Path:
    """Return where the bundled models are: `models/` of a checkout, or the package data of an installation."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / "models"
    return installed if installed.is_dir() else package.parent / "models"


def bundled_models() -> tuple[BundledModel, ...]:
    return BUNDLED


def is_hash_model(name: str | Path) -> bool:
    """Return whether `name` means the model without a file, or a draft for it."""
    return str(name).partition(":")[0] == HASH_MODEL


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the file, or the Hugging Face folder, of the model called `name_or_path`.

    A bundled name or alias means that model; otherwise a path that exists is taken; otherwise the name of a pulled
    model (`owner/name:Q8_0`). Raises `UsageError`, naming the nearest bundled model, when it is none of them.
    """
    text = str(name_or_path)
    if not text:
        raise UsageError(f"the model's name is empty: give a .gguf file, or a bundled model: {_names()}")
    if is_hash_model(text):
        raise UsageError(f"{text}: this model is computed from the text so far: there is no file of it")
    for model in BUNDLED:
        if text in (model.name, *model.aliases):
            if not model.present:
                raise UsageError(f"{model.path}: the bundled model is missing; `make models` trains it again")
            return model.path
    try:
        path = Path(text).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
        is_model_folder = is_folder and (path / "config.json").is_file()
    except (OSError, RuntimeError) as error:  # a folder that may not be entered, a name too long, an unknown ~user
        raise UsageError(f"{text}: {getattr(error, 'strerror', None) or error}") from None
    if exists and (is_model_folder or not is_folder):
        return path
    pulled = find_pulled(text)
    if pulled is not None:
        return pulled
    if is_folder:
        raise UsageError(f"{text}: is a folder; give a .gguf file in it, or a bundled model: {_names()}")
    hint = f" (`forge models pull {text}` downloads it)" if is_pull_name(text) else _nearest(text)
    raise UsageError(f"{text}: no such file. Bundled models: {_names()}{hint}")


def model_name(path: Path) -> str:
    """Return what a model at `path` is called: the file's name without its ending, or the folder's name."""
    return path.resolve().name if path.is_dir() else path.stem


def sha256(path: Path) -> str:
    """Compute the file's digest in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _known_names() -> list[str]:
    return [name for model in BUNDLED for name in (*model.aliases, model.name)]


def _names() -> str:
    return ", ".join(model.aliases[0] if model.aliases else model.name for model in BUNDLED)


def _nearest(text: str) -> str:
    close = get_close_matches(Path(text).stem, _known_names(), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
