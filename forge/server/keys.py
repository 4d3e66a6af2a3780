"""Which API keys open the server: one from `--api-key`, and those of a file, which may have names.

# a key to a line, with a name before it where the access log is to say whose it is
sk-3f9a…
alice sk-77c1…
"""

import hashlib
from pathlib import Path

from forge.errors import UsageError


class Keys:
    """The API keys as digests, so that comparing one takes as long whatever it has in common with others."""

    def __init__(self, key: str | None = None, file: str | None = None):
        """Raises `UsageError` for a file that cannot be read, or that has a line of more than a name and a key."""
        self._key, self._file = key, file
        self._names: dict[bytes, str | None] = {}
        self.load()

    @property
    def are_needed(self) -> bool:
        return self._key is not None or self._file is not None

    def load(self) -> int:
        """Read the file, again if it has been read before; return the number of keys. Changes nothing if it raises."""
        names: dict[bytes, str | None] = {} if self._key is None else {_digest(self._key.encode()): None}
        if self._file is not None:
            names |= _read(Path(self._file))
        self._names = names
        return len(names)

    def opens(self, key: bytes) -> bool:
        return _digest(key) in self._names

    def name_of(self, key: bytes) -> str | None:
        """Return the name of an accepted key, if it has one."""
        return self._names[_digest(key)]


def _read(path: Path) -> dict[bytes, str | None]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or error}") from None
    names: dict[bytes, str | None] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise UsageError(f"--api-key-file {path}: line {number} has more than a name and a key")
        names[_digest(words[-1].encode())] = words[0] if len(words) == 2 else None
    if not names:
        raise UsageError(f"--api-key-file {path} has no keys: give one to a line")
    return names


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
