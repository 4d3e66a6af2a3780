"""What stands before every endpoint: host, key, the size and the time of a body, and a server that is closing.

`Gate` is an ASGI application around another. It reads the whole body, so that what is behind it never waits for one.
`Keys` are the API keys that open it: one from `--api-key`, and those of a file, which may have names.

# a key to a line, with a name before it where the access log is to say whose it is
sk-3f9a…
alice sk-77c1…
"""

import asyncio
import hashlib
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge.errors import ForgeError, UsageError
from forge.server.errors import ApiError, ShuttingDown, error_response
from forge.server.exchange import current_exchange
from forge.server.settings import Settings, is_loopback

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
"""Paths that need no key."""
_DISCARDED = 16
"""Times the largest body: of a larger one as much is read, so that its client sees the answer."""


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
            names |= _read_keys(Path(self._file))
        self._names = names
        return len(names)

    def opens(self, key: bytes) -> bool:
        return _digest(key) in self._names

    def name_of(self, key: bytes) -> str | None:
        """Return the name of an accepted key, if it has one."""
        return self._names[_digest(key)]


def _read_keys(path: Path) -> dict[bytes, str | None]:
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


class Gate:
    """Admission control: refuses connections and requests beyond the server's limits."""

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys, draining: asyncio.Event):
        """draining: set when the server is closing: it finishes the requests that it has and takes no new ones."""
        self._app, self._keys = app, keys
        self._limits = settings.limits
        self._hosts = None
        if not keys.are_needed and is_loopback(settings.host):
            self._hosts = {"localhost", settings.host, *settings.allowed_hosts}
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if scope["path"] not in OPEN_PATHS:
                headers = dict(scope["headers"])
                self._check_host(headers.get(b"host", b"").decode("latin-1"))
                self._check_key(headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b""))
            if self._draining.is_set() and scope["method"] == "POST":
                raise ShuttingDown
            receive = await self._with_body(scope, receive)
        except ForgeError as error:
            response = error_response(error)
            if response.status_code in (400, 413):
                response.headers["connection"] = "close"  # what is left of the body is not read
            await response(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server beneath sends no body for it
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)

    def _check_host(self, header: str) -> None:
        """Refuse a foreign `Host`: a page whose own name resolves to this machine (DNS rebinding) sends that name. A
        server that any machine may reach is reached by other names, and one with a key is not open to a page."""
        if self._hosts is None or not header:
            return
        try:
            name = urlsplit(f"//{header}").hostname or ""
            ip_address(name)
        except ValueError:
            if name not in self._hosts:
                message = f"this server is not known as {name[:80]}: start it with --allowed-host {name[:80]}"
                raise ApiError(message, 403, code="host_not_allowed") from None

    def _check_key(self, header: bytes) -> None:
        scheme, _, key = header.partition(b" ")
        if not self._keys.are_needed:
            return
        if scheme.lower() != b"bearer" or not self._keys.opens(key.strip()):
            raise ApiError("a valid API key is needed: Authorization: Bearer KEY", 401, code="invalid_api_key")
        if (exchange := current_exchange()) is not None:
            exchange.key = self._keys.name_of(key.strip())

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive:
        """Return a `receive` that gives the whole body at once, and from then on what the real one gives."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            return receive
        most = self._limits.max_body_bytes * (1 if b"expect" in headers else _DISCARDED)
        if length is not None and length.isdigit() and int(length) > most:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                body = await self._read(receive)
        except TimeoutError:
            raise ApiError("the body did not come in time", code="body_timeout") from None
        is_delivered = False

        async def replay() -> Message:
            nonlocal is_delivered
            if is_delivered:
                return await receive()
            is_delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _read(self, receive: Receive) -> bytes:
        """Read the body. One that is too large is read and discarded before it is refused, because a client that still
        writes while its connection closes does not see the answer."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError("the client left before its body was here")
            size += len(message.get("body", b""))
            if size <= self._limits.max_body_bytes:
                parts.append(message.get("body", b""))
            if size > self._limits.max_body_bytes * _DISCARDED:
                raise self._too_large()
            if not message.get("more_body"):
                break
        if size > self._limits.max_body_bytes:
            raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(f"the body is larger than {self._limits.max_body_bytes} bytes", 413, code="body_too_large")
