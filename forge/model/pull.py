"""`forge models pull`: a model from the Hugging Face hub, by way of huggingface_hub, into the user's cache folder.

A repository of GGUF files gives one file; any other gives what `forge.model.hf_directory` reads. The hub's own library
finds files, sends the token (HF_TOKEN, or what `hf auth login` stored), speaks to HF_ENDPOINT and fetches. Only the
steps of its `hf_hub_download` (2.4) are written here, because that deletes what an interrupted download brought,
compares no checksum, and cannot look at a header before gigabytes have followed it.

- A file arrives as `.<name>.<digest>.partial` beside its final name. An interrupted pull leaves it, and the next one
  goes on from there: the digest says that it is still the same file.
- It gets its name only after its SHA-256 was found to be the one that the hub states, or for a small file its git
  hash. A file that is not is removed.
- config.json gets its name last, so a folder that has one is whole.
- What forge does not run is refused before its weights arrive: by its name, by config.json, by a GGUF file's header.
- Everything is taken from one commit, whatever is pushed meanwhile.

Files are fetched over plain HTTP, also those that the hub keeps in its Xet storage: that is what can be resumed.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from forge.errors import ForgeError, UsageError
from forge.gguf.reader import MAX_HEADER_BYTES, parse_beginning
from forge.model.catalog import (
    PulledModel,
    PullName,
    choices,
    choose_gguf,
    is_one_gguf,
    is_unsupported,
    pulled_folder,
    quant_label,
    sha256,
)
from forge.model.config import why_unsupported
from forge.model.hf_directory import CONFIG, GENERATION_CONFIG, INDEX, POOLING, TOKENIZER, check_supported

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer
    from huggingface_hub.errors import HfHubHTTPError

PullProgress = Callable[[str, int, int], None]
"""Called with (file name, bytes of it that are here, bytes in all)."""

BESIDE_WEIGHTS = (TOKENIZER, "tokenizer_config.json", "chat_template.jinja", GENERATION_CONFIG, POOLING)
TIMEOUT_SECONDS = 15.0
_CHUNK = 1 << 16
_NEVER = 1 << 62


class PullError(ForgeError):
    """A model could not be pulled. The message says why, and what to do."""


class _UnsupportedModel(PullError):
    """The beginning of a file shows that it will not run."""


@dataclass(frozen=True)
class _RemoteFile:
    """A file of a repository as the hub describes it; `bytes` is -1 where it does not say.

    `digest` is a SHA-256, or `git:` and the SHA-1 of a git blob; None if the server states neither."""

    name: str
    bytes: int
    digest: str | None


@dataclass(frozen=True)
class _Repository:
    """One commit of a repository on one server."""

    name: str
    commit: str
    endpoint: str
    files: dict[str, _RemoteFile]


def pull(name: str, *, endpoint: str | None = None, on_progress: PullProgress | None = None) -> PulledModel:
    """Pull the model called `owner/name` or `owner/name:QUANT`; what is here already is not fetched again.

    endpoint: None takes HF_ENDPOINT, as huggingface_hub does. Raises `UsageError` for a name that means no model, or
    several, and `PullError` for whatever else goes wrong; Ctrl-C passes through. A partial file stays for the next
    time, except a damaged one.
    """
    pull_name = PullName.parse(name)
    if find_spec("huggingface_hub") is None:
        raise PullError("pulling models needs huggingface_hub, which is not installed: pip install huggingface_hub")
    target = pulled_folder() / pull_name.repo
    with _plain_errors(pull_name, endpoint), _quiet_hub():
        repository = _list(pull_name.repo, _endpoint(endpoint))
        chosen = [_described(repository, file) for file in _choose(repository, pull_name)]
        target.mkdir(parents=True, exist_ok=True)
        with _lock(target, pull_name):
            _check_room(target, chosen)
            if chosen[-1].name == CONFIG:
                _check_config(repository, chosen[-1], target)
            for file in chosen:
                _fetch(repository, file, target, on_progress)
    total = sum(file.bytes for file in chosen)
    if len(chosen) == 1:
        path = target / Path(chosen[0].name).name
        return PulledModel(f"{pull_name.repo}:{quant_label(path.name)}", path, total)
    return PulledModel(pull_name.repo, target, total)


def _list(repo: str, endpoint: str) -> _Repository:
    """List the files that the repository holds now."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=endpoint).model_info(repo, files_metadata=True, timeout=TIMEOUT_SECONDS)
    files = {}
    for entry in info.siblings or ():
        sha256 = entry.lfs["sha256"] if entry.lfs else None
        digest = sha256 or (f"git:{entry.blob_id}" if entry.blob_id else None)
        files[entry.rfilename] = _RemoteFile(entry.rfilename, entry.size if entry.size is not None else -1, digest)
    return _Repository(repo, info.sha or "main", endpoint, files)


def _choose(repository: _Repository, pull_name: PullName) -> list[_RemoteFile]:
    """Choose the files to bring, in that order: one GGUF file, or a whole Hugging Face folder."""
    names = sorted(repository.files)
    gguf = [name for name in names if is_one_gguf(name) and _is_plain(Path(name).name)]
    if gguf:
        matching = choose_gguf(gguf, pull_name.quant)
        supported = [name for name in gguf if not is_unsupported(name)]
        if not matching:
            raise UsageError(f"{pull_name.repo} has no {pull_name.quant}; it has {_listed(supported)}")
        if len(matching) > 1:
            runnable = choices(pull_name.repo, [name for name in matching if name in supported])
            raise UsageError(f"{pull_name} fits {len(matching)} files; name one: {_shortened(runnable)}")
        if matching[0] not in supported:
            hint = f"it has {_listed(supported)}" if supported else "take another repository"
            raise UsageError(f"forge does not compute with {quant_label(matching[0])}, as in {matching[0]}; {hint}")
        return [repository.files[matching[0]]]
    weights = [name for name in names if name.endswith(".safetensors") and _is_plain(name)]
    if not weights or CONFIG not in repository.files:
        split = " but split GGUF files, which forge does not read" if any(n.endswith(".gguf") for n in names) else ""
        nothing = f"holds nothing that forge can run{split}: it needs a GGUF file, or safetensors"
        raise UsageError(f"{pull_name.repo} {nothing}")
    if pull_name.quant is not None:
        none_of_gguf = f"has no GGUF files to choose {pull_name.quant} from; pull it as {pull_name.repo}"
        raise UsageError(f"{pull_name.repo} {none_of_gguf}")
    beside = [name for name in (INDEX, *BESIDE_WEIGHTS) if name in repository.files]
    return [repository.files[name] for name in (*beside, *weights, CONFIG)]


def _check_config(repository: _Repository, file: _RemoteFile, target: Path) -> None:
    """Look at config.json before the weights are downloaded. It gets its name last all the same."""
    if _is_here(file, target):
        return
    partial = _partial(repository, file, target)
    _download(_url(repository, file.name), partial, file, None)
    try:
        check_supported(partial)
    except ForgeError as error:
        partial.unlink()
        problem = str(error).replace(str(partial), CONFIG)
        raise PullError(f"{repository.name}: {problem}; nothing was downloaded") from None


def _place(file: _RemoteFile, target: Path) -> Path:
    """Return where a file will lie: a GGUF file's folder in the repository is not kept."""
    return target / (file.name if file.name in BESIDE_WEIGHTS else Path(file.name).name)


def _is_here(file: _RemoteFile, target: Path) -> bool:
    path = _place(file, target)
    return path.is_file() and path.stat().st_size == file.bytes and _digest_of(path, file.digest) == file.digest


def _partial(repository: _Repository, file: _RemoteFile, target: Path) -> Path:
    """Return where a file lies until it is whole: each version of it has another place."""
    version = (file.digest or repository.commit).removeprefix("git:")[:16]
    path = _place(file, target)
    return path.with_name(f".{path.name}.{version}.partial")


def _fetch(repository: _Repository, file: _RemoteFile, target: Path, on_progress: PullProgress | None) -> None:
    """Bring one file, unless it is here: from where an earlier attempt stopped, verified, under its name at the end."""
    path = _place(file, target)
    if _is_here(file, target):
        return
    path.parent.mkdir(exist_ok=True)
    partial = _partial(repository, file, target)
    if partial.exists() and partial.stat().st_size > file.bytes:
        partial.unlink()
    try:
        _download(_url(repository, file.name), partial, file, on_progress)
    except _UnsupportedModel:
        partial.unlink()
        raise
    digest = _digest_of(partial, file.digest)
    if digest != file.digest:
        partial.unlink()
        checksums = f"its checksum is {_brief(digest)}, and {repository.endpoint} states {_brief(file.digest)}"
        raise PullError(f"{file.name}: damaged on the way: {checksums}; it was removed, pull it again")
    os.replace(partial, path)
    for stale in path.parent.glob(f".{path.name}.*.partial"):
        stale.unlink(missing_ok=True)


def _download(url: str, partial: Path, file: _RemoteFile, on_progress: PullProgress | None) -> None:
    """Append to `partial` what it lacks, taking up a broken connection as long as each attempt brings something."""
    from huggingface_hub.file_download import http_get

    headers = import_module("huggingface_hub.utils").build_hf_headers(library_name="forge")
    headers["Accept-Encoding"] = "identity"  # a compressed answer has other positions than the file
    with _WatchedFile(partial, file, on_progress) as stream:
        here = stream.tell()
        while here < file.bytes:
            try:
                http_get(url, stream, resume_size=here, headers=headers, expected_size=file.bytes)
                return
            except _transport_errors():
                before, here = here, stream.tell()
                if here <= before:
                    raise
            except OSError:
                if not here or stream.tell() <= file.bytes:
                    raise
                stream.truncate(0)  # a server that does not resume sent all of it, and an older library appended it
                here = 0


class _WatchedFile(BufferedWriter):
    """A file open for appending that reports its size as it grows.

    Of a GGUF file it reads the header as soon as that has arrived, and ends the download of one that would not run."""

    def __init__(self, path: Path, file: _RemoteFile, on_progress: PullProgress | None):
        super().__init__(FileIO(path, "a"))
        self._path, self._file, self._on_progress = path, file, on_progress
        self._header_expected = 0 if file.name.endswith(".gguf") else _NEVER
        self._notice_growth()

    def write(self, data: "Buffer") -> int:
        written = super().write(data)
        self._notice_growth()
        return written

    def _notice_growth(self) -> None:
        """Parse the header each time that twice as much has arrived, and report the size."""
        size = self.tell()
        if size >= self._header_expected:
            self._look_at_header(size)
        if self._on_progress is not None:
            self._on_progress(self._file.name, size, self._file.bytes)

    def _look_at_header(self, size: int) -> None:
        self.flush()
        with self._path.open("rb") as beginning:
            header = parse_beginning(Path(self._file.name), beginning.read(MAX_HEADER_BYTES))
        self._header_expected = max(_CHUNK, 2 * size) if header is None and size < MAX_HEADER_BYTES else _NEVER
        problem = why_unsupported(*header) if header is not None else None
        if problem is not None:
            raise _UnsupportedModel(f"{self._file.name}: {problem}; the download was ended after its header")


def _described(repository: _Repository, file: _RemoteFile) -> _RemoteFile:
    """Return `file`, with size and digest from its own headers if the listing did not say."""
    from huggingface_hub import get_hf_file_metadata

    if file.bytes >= 0 and file.digest is not None:
        return file
    url = _url(repository, file.name)
    stated = get_hf_file_metadata(url, timeout=TIMEOUT_SECONDS)
    etag = (stated.etag or "").lower()
    is_hexadecimal = not set(etag) - set("0123456789abcdef")
    digest = {64: etag, 40: f"git:{etag}"}.get(len(etag)) if is_hexadecimal else None
    size = stated.size if file.bytes < 0 else file.bytes
    if size is None:
        raise PullError(f"{file.name}: the server does not say how large it is; is HF_ENDPOINT a Hugging Face hub?")
    return _RemoteFile(file.name, size, file.digest or digest)


def _digest_of(path: Path, like: str | None) -> str | None:
    """Compute the digest of a file on disk, of the same kind as `like`."""
    if like is None:
        return None
    from huggingface_hub.utils.sha import git_hash

    return f"git:{git_hash(path.read_bytes())}" if like.startswith("git:") else sha256(path)


def _check_room(target: Path, files: Sequence[_RemoteFile]) -> None:
    """Refuse a download for which there is no room."""
    here = sum(part.stat().st_size for part in target.glob(".*.partial"))
    missing = [file.bytes for file in files if file.bytes > 0 and not (target / Path(file.name).name).is_file()]
    needed, free = sum(missing) - here, shutil.disk_usage(target).free
    if missing and needed > free:
        problem = f"{needed / 1e9:.1f} GB are still to come, and the disk has {free / 1e9:.1f} GB left"
        raise PullError(f"{target}: {problem}; make room, or set XDG_CACHE_HOME to a larger disk")


@contextmanager
def _lock(target: Path, pull_name: PullName) -> Iterator[None]:
    """Lock the folder: two pulls into it would write into the same partial file."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(target / ".pull.lock", timeout=0):
            yield
    except Timeout:
        raise PullError(f"{pull_name.repo} is being pulled by another process; wait for it to end") from None


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Turn off the library's own bars and warnings, as forge shows progress and errors in its own way; write at once
    what arrives, as a broken connection loses what the library has not handed on (by default 10 MB)."""
    from huggingface_hub import constants

    hub: Any = import_module("huggingface_hub.utils")  # which does not say what it exports
    verbosity, had_bars = hub.logging.get_verbosity(), not hub.are_progress_bars_disabled()
    chunk = constants.DOWNLOAD_CHUNK_SIZE
    hub.logging.set_verbosity_error()
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK
    if had_bars:
        hub.disable_progress_bars()
    try:
        yield
    finally:
        hub.logging.set_verbosity(verbosity)
        constants.DOWNLOAD_CHUNK_SIZE = chunk
        if had_bars:
            hub.enable_progress_bars()


@contextmanager
def _plain_errors(pull_name: PullName, endpoint: str | None) -> Iterator[None]:
    """Turn what the hub's library and the system raise into one line that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except ForgeError:
        raise
    except HfHubHTTPError as error:
        raise PullError(_refusal(error, pull_name, _endpoint(endpoint))) from error
    except Exception as error:
        problem = _trouble(error, _endpoint(endpoint))
        if problem is None:
            raise
        raise PullError(f"{pull_name.repo}: {problem}") from error


def _refusal(error: "HfHubHTTPError", pull_name: PullName, endpoint: str) -> str:
    """Explain a refusal of the server."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    status = error.response.status_code if error.response is not None else 0
    if isinstance(error, GatedRepoError):
        return f"{pull_name.repo} is gated: accept its terms at {endpoint}/{pull_name.repo}, then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        hint = "(then set HF_TOKEN to a token that may read it)"
        return f"{pull_name.repo}: {endpoint} has no such model, or it is private {hint}"
    if status in (401, 403):
        return (
            f"{pull_name.repo}: {endpoint} refused the token ({status}): set HF_TOKEN to one that may read this model"
        )
    if status == 429:
        return f"{pull_name.repo}: {endpoint} asks for fewer requests (429): wait a while, or set HF_TOKEN"
    return f"{pull_name.repo}: {endpoint} answered with status {status}; try again later"


def _trouble(error: Exception, endpoint: str) -> str | None:
    """Explain what is wrong with the network or the disk; None for an exception that is about neither."""
    from huggingface_hub.errors import FileMetadataError, HFValidationError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and pulling needs the network: unset it"
    if isinstance(error, HFValidationError):
        return "is not a name that the hub allows"
    if isinstance(error, FileMetadataError):
        return f"{endpoint} does not answer like a Hugging Face hub; check HF_ENDPOINT"
    if isinstance(error, _transport_errors()):
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        return f"cannot reach {endpoint} ({reason}): check the network and HF_ENDPOINT; what has come is kept"
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENOSPC:
        return "the disk is full; make room and pull again, it goes on where it stopped"
    if "Consistency check failed" in str(error):
        return "the server ended the download early; pull again, it goes on where it stopped"
    return f"{error.filename or 'the file'}: {error.strerror}" if error.strerror else None


def _transport_errors() -> tuple[type[BaseException], ...]:
    """Return the base errors of the HTTP libraries that releases of huggingface_hub have used, as far as they are
    loaded."""
    names = {"httpx2": "HTTPError", "httpx": "HTTPError", "requests": "RequestException"}
    loaded = ((sys.modules.get(module), error) for module, error in names.items())
    errors = [getattr(module, error) for module, error in loaded if module is not None and hasattr(module, error)]
    return (ConnectionError, TimeoutError, *errors)


def _endpoint(endpoint: str | None) -> str:
    from huggingface_hub import constants

    return (endpoint or constants.ENDPOINT).rstrip("/")


def _url(repository: _Repository, file_name: str) -> str:
    return f"{repository.endpoint}/{repository.name}/resolve/{repository.commit}/{quote(file_name)}"


def _is_plain(name: str) -> bool:
    """Return whether a server's file name may be a file's name here."""
    return name.isprintable() and not name.startswith(".") and "/" not in name and "\\" not in name and ":" not in name


def _listed(names: Sequence[str]) -> str:
    return _shortened(", ".join(quant_label(name) for name in names))


def _shortened(text: str) -> str:
    return text if len(text) <= 600 else f"{text[:600]}…"


def _brief(digest: str | None) -> str:
    return f"{digest[:16]}…" if digest else "unknown"
