"""The models that come with forge, and how a name or a path on the command line becomes a model on disk.

In a checkout the bundled files lie in `models/`; in an installed wheel the same folder is package data. Nothing is ever
downloaded here: what runs is a bundled model, a file or folder that the user pointed at, or what `forge models pull`
brought before, under the name that it was pulled by.

The name of a pulled model is `owner/name`, or `owner/name:QUANT` where a repository holds one GGUF file per
quantization. Its files lie under the user's cache folder as `forge/models/<owner>/<name>/<file>`, each under its final
name only once it is whole and verified. Nothing here uses the network, or imports anything that does.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from forge.errors import UsageError

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+))?", re.ASCII)
_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}$")
_QUANT_LABEL = re.compile(r"(?:^|[.-])((?:UD-)?(?:[IT]?Q\d\w*|B?F16|F32|MXFP4\w*))$", re.IGNORECASE)

_UNSUPPORTED_LABEL = re.compile(r"(?:UD-)?(?:IQ[12]_|TQ|MXFP4|NVFP4|Q1_0)", re.IGNORECASE)


@dataclass(frozen=True)
class PullName:
    """What to pull: a repository, and which of its GGUF files. `quant` None means the only one there is."""

    repo: str
    quant: str | None = None

    @classmethod
    def parse(cls, text: str) -> "PullName":
        """Parse `owner/name` or `owner/name:QUANT`. Raises `UsageError` for anything else."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text or match["repo"].endswith((".git", "-", ".")):
            raise UsageError(f"{text!r:.100} is not a model's name on the hub, such as Qwen/Qwen3-0.6B-GGUF:Q8_0")
        return cls(match["repo"], match["quant"])

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


@dataclass(frozen=True)
class PulledModel:
    """A model in the cache folder: `name` is what `--model` takes, `bytes` what its files take."""

    name: str
    path: Path
    bytes: int


def is_pull_name(text: str) -> bool:
    """Return whether `text` could be the name of a model on the hub, and is no path to a file."""
    try:
        PullName.parse(text)
    except UsageError:
        return False
    return not text.lower().endswith((".gguf", ".safetensors", ".json"))


def pulled_folder() -> Path:
    """Return where pulled models lie: `forge/models` under XDG_CACHE_HOME, by default `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"  # as the XDG specification has it
    return base / "forge" / "models"


def find_pulled(name: str | Path) -> Path | None:
    """Return the file or folder of the pulled model called `name`; None if there is none.

    Raises `UsageError`, listing them, where `name` fits several files that were pulled."""
    if not is_pull_name(str(name)):
        return None
    pull_name = PullName.parse(str(name))
    try:
        folder = pulled_folder() / pull_name.repo
        files = _gguf_files(folder)
        if pull_name.quant is None and not files:
            return folder if is_model_folder(folder) else None
    except (OSError, RuntimeError):
        return None
    names = choose_gguf([file.name for file in files], pull_name.quant)
    if len(names) > 1:
        raise UsageError(f"{pull_name} fits {len(names)} pulled files; give one of {choices(pull_name.repo, names)}")
    return folder / names[0] if names else None


def pulled_models() -> tuple[PulledModel, ...]:
    """List what is in the cache folder, by name."""
    try:
        folders = sorted(folder for folder in pulled_folder().glob("*/*") if folder.is_dir())
        return tuple(model for folder in folders for model in _models_in(folder))
    except (OSError, RuntimeError):
        return ()


def is_model_folder(folder: Path) -> bool:
    """Return whether `folder` holds a whole pulled Hugging Face model: config.json is what a pull brings last."""
    return (folder / "config.json").is_file()


def choose_gguf(file_names: Sequence[str], quant: str | None) -> list[str]:
    """Return the files of `file_names` that `quant` means, in any case: named so exactly, or else with it somewhere in
    the name.

    `F16` means model-F16.gguf and not model-BF16.gguf; `Q4_K` fits both model-Q4_K_M.gguf and model-Q4_K_S.gguf.
    """
    if quant is None:
        return list(file_names)
    exact = [name for name in file_names if quant_label(name).lower() == quant.lower()]
    return exact or [name for name in file_names if quant.lower() in name.rpartition("/")[2].lower()]


def quant_label(file_name: str) -> str:
    """Return the quantization that a GGUF file's name states: `Q4_K_M` of `Qwen3-0.6B-Q4_K_M.gguf`; the whole name if
    it states none."""
    stem = file_name.rpartition("/")[2].removesuffix(".gguf")
    match = _QUANT_LABEL.search(stem)
    return match[1] if match else stem


def is_unsupported(file_name: str) -> bool:
    """Return whether a GGUF file's name says that its tensors are of a type that forge does not compute with."""
    return _UNSUPPORTED_LABEL.match(quant_label(file_name)) is not None


def choices(repo: str, file_names: Sequence[str]) -> str:
    """Return the names that pull each of these files, in words."""
    return ", ".join(f"{repo}:{quant_label(name)}" for name in file_names)


def is_one_gguf(file_name: str) -> bool:
    """Return whether this is a whole model in GGUF: not a part of a split one, not the vision half of another."""
    stem, _, ending = file_name.rpartition(".")
    return ending.lower() == "gguf" and not _SPLIT_FILE.search(stem) and not Path(stem).name.startswith("mmproj")


def _gguf_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.gguf") if file.is_file() and is_one_gguf(file.name))


def _models_in(folder: Path) -> list[PulledModel]:
    repo = f"{folder.parent.name}/{folder.name}"
    files = _gguf_files(folder)
    models = [PulledModel(f"{repo}:{quant_label(file.name)}", file, file.stat().st_size) for file in files]
    if is_model_folder(folder) and not files:
        nbytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        models.append(PulledModel(repo, folder, nbytes))
    return models


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


BUNDLED_MODELS = (
    BundledModel("tales-q8_0", ("tales",), "tales-q8_0.gguf", "tells short stories and answers questions about them"),
    BundledModel("tales-q4_0", (), "tales-q4_0.gguf", "the same model in 4 bits"),
    BundledModel("tales-draft-q8_0", ("tales-draft",), "tales-draft-q8_0.gguf", "a small model that drafts for it"),
    BundledModel("tales-bad-draft-q8_0", ("tales-bad-draft",), "tales-bad-draft-q8_0.gguf", "a bad draft"),
)


def models_folder() -> Path:
    """Return where the bundled models are: `models/` of a checkout, or the package data of an installation."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / "models"
    return installed if installed.is_dir() else package.parent / "models"


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
    for model in BUNDLED_MODELS:
        if text in (model.name, *model.aliases):
            if not model.present:
                raise UsageError(f"{model.path}: the bundled model is missing; `make models` trains it again")
            return model.path
    try:
        path = Path(text).expanduser()
        is_folder, exists, holds_model = path.is_dir(), path.exists(), is_model_folder(path)
    except (OSError, RuntimeError) as error:  # a folder that may not be entered, a name too long, an unknown ~user
        raise UsageError(f"{text}: {getattr(error, 'strerror', None) or error}") from None
    if exists and (holds_model or not is_folder):
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


def _names() -> str:
    return ", ".join(model.aliases[0] if model.aliases else model.name for model in BUNDLED_MODELS)


def _nearest(text: str) -> str:
    names = [name for model in BUNDLED_MODELS for name in (*model.aliases, model.name)]
    close = get_close_matches(Path(text).stem, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
