"""Reads what the screen shows of the admin address; what goes wrong is said in one sentence."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from gateway.settings.values.addresses import UnixAddress, parse_address
from gateway.top import formatting
from gateway.top.document import Document, number, text
from gateway.top.plain_text import cut, plain
from gateway.top.view import CALLS, ENDPOINTS, MODELS, OVERVIEW

TIMEOUT = 5.0
"""Seconds to wait for the gateway."""
_MOST_BYTES = 4 * 1024 * 1024
"""Bytes of a document. Read as JSON, it may take a hundred times as much memory."""
_MOST_SENTENCE = 300
_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "User-Agent": "tensorgate-top",
}
_NO_GATEWAY = "no gateway has its admin address at {shown}"
_CLOSED = "{shown} closed the connection before it answered"
_LOGIN = "wants a login, which this program does not have"
_STATUSES = {401: _LOGIN, 403: "refuses to answer: {said}", 407: _LOGIN}
_FAILURES = (
    (aiohttp.ClientConnectorDNSError, "the host of {shown} is not known: {reason}"),
    (aiohttp.ClientSSLError, "no TLS connection to {shown}: {reason}"),
    (ConnectionRefusedError, f"{_NO_GATEWAY}: the connection was refused"),
    (FileNotFoundError, f"{_NO_GATEWAY}: there is no such socket"),
    (aiohttp.ClientConnectorError, "cannot connect to {shown}: {reason}"),
    (TimeoutError, "{shown} did not answer within {seconds:g} s"),
    (OSError, _CLOSED),
    (aiohttp.ServerDisconnectedError, _CLOSED),
    (Exception, "{shown} does not speak HTTP as expected"),
)
"""What is said of an error, or of the error of the system below it; the first row holds."""


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the admin address is; a proxy before it may have it below a path."""

    shown: str
    """As the operator knows it."""
    url: str
    socket: str | None = None


def parse_admin_address(value: str) -> AdminAddress:
    """Return the address of ``HOST:PORT``, ``http://HOST/PATH`` or ``unix:/PATH``.

    Raises ValueError.
    """
    url = value if value.startswith(("http://", "https://")) else f"http://{value}"
    shown = value
    if url == value:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError("a user name or password in the URL is not supported")
        if parts.query:
            raise ValueError(f"expected no query in the URL, got {parts.query!r}")
        default = "" if parts.port is not None else f":{443 if parts.scheme == 'https' else 80}"
        address = parse_address(f"{parts.netloc}{default}")
        shown = url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    elif isinstance(address := parse_address(value), UnixAddress):
        return AdminAddress(value, "http://localhost", address.path)
    assert not isinstance(address, UnixAddress)
    if address.port == 0:
        raise ValueError("expected a port from 1 to 65535, got 0")
    return AdminAddress(shown, url)


class AdminError(Exception):
    """Why a document could not be read, as a sentence for operators."""


class AdminClient:
    """Reads documents of an admin address while its context is open."""

    def __init__(self, address: AdminAddress, seconds: float = TIMEOUT) -> None:
        self._address = address
        self._seconds = seconds

    async def __aenter__(self) -> Self:
        socket = self._address.socket
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket) if socket else aiohttp.TCPConnector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(self._seconds),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, name: str, query: Mapping[str, str] | None = None) -> Document:
        """Return a document of the API. Raises AdminError."""
        url = f"{self._address.url}/api/{name}"
        try:
            async with self._session.get(url, params=query, allow_redirects=False) as response:
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > _MOST_BYTES:
                        break
        except (OSError, aiohttp.ClientError) as error:
            raise AdminError(self._sentence(error)) from None
        if len(body) > _MOST_BYTES:
            raise AdminError(f"{self._address.shown} answers with more than {_MOST_BYTES} bytes")
        return self._document(response.status, bytes(body))

    def _document(self, status: int, body: bytes) -> Document:
        shown = self._address.shown
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if status == 200 and isinstance(document, dict):
            return document
        said = cut(plain(text(document, "error")), _MOST_SENTENCE)
        if sentence := _STATUSES.get(status):
            raise AdminError(f"{shown} {sentence.format(said=said or 'it gives no reason')}")
        kind = "another kind of document" if status == 200 else f"status {status}"
        reason = f": {said}" if said else ""
        question = "; is it the admin address of a Tensorgate?" if status < 500 else ""
        raise AdminError(f"{shown} answers with {kind}{reason}{question}")

    def _sentence(self, error: Exception) -> str:
        cause = getattr(error, "os_error", error)
        reason = getattr(cause, "reason", None) or getattr(cause, "strerror", None) or cause
        sentence = next(
            text for kind, text in _FAILURES if isinstance(error, kind) or isinstance(cause, kind)
        )
        return sentence.format(shown=self._address.shown, reason=reason, seconds=self._seconds)


_NOTICE_SECONDS = 15.0
RETRY_SECONDS = 5.0
"""If the gateway cannot be read, it is asked again after this time at most."""
_LIMITS = {OVERVIEW: 100, CALLS: 300}
"""The events and the calls that are read: the newest."""
_TOPICS = {OVERVIEW: "journal", ENDPOINTS: "topology", MODELS: "models", CALLS: "calls"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read: a panel, and which part of its rows."""

    panel: str = OVERVIEW
    search: str = ""
    offset: int = 0
    limit: int = 200
    follows: bool = True

    def query(self) -> dict[str, str]:
        """Return the query of the panel's document."""
        limit = _LIMITS.get(self.panel, self.limit)
        query = {"limit": str(limit), "offset": str(self.offset or ""), "search": self.search}
        return {name: value for name, value in query.items() if value}


@dataclass(frozen=True, slots=True)
class Reading:
    """A document, and what was wanted."""

    document: Document
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of the gateway."""

    overview: Document | None = None
    panels: Mapping[str, Reading] = field(default_factory=dict)
    read_at: float = 0.0
    """The Unix time of the overview."""
    failure: str = ""
    """Why the last reading failed; empty if it did not."""
    failing_since: float = 0.0
    notice: str = ""
    """That another gateway answers than before."""
    notice_until: float = 0.0


class Poller:
    """Reads the overview and a panel in each interval; another panel at once."""

    def __init__(
        self, client: AdminClient, interval: float, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._client = client
        self._interval = interval
        self._on_change = on_change
        self._wanted = Wanted()
        self._others_wanted = asyncio.Event()
        self.snapshot = Snapshot()
        """What was read last."""

    def want(self, wanted: Wanted) -> None:
        """Set what is to be read."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._others_wanted.set()

    async def run(self) -> None:
        """Read until cancelled."""
        due = time.monotonic()
        while True:
            everything = time.monotonic() >= due
            if everything:
                due = time.monotonic() + self._interval
            self._others_wanted.clear()
            await self.read(self._wanted, everything=everything)
            self._on_change()
            if self.snapshot.failure:
                due = min(due, time.monotonic() + RETRY_SECONDS)
            try:
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._others_wanted.wait()
            except TimeoutError:
                pass

    async def read(self, wanted: Wanted, *, everything: bool = True) -> None:
        """Read what is wanted; ``everything`` is with the overview."""
        old = self.snapshot
        try:
            overview = old.overview
            if everything or overview is None:
                overview = await self._client.get("overview")
            known = old.panels.get(wanted.panel)
            is_paused = wanted.panel == CALLS and not wanted.follows
            panels = old.panels
            if known is None or known.wanted != wanted or not is_paused:
                panels = {**panels, wanted.panel: Reading(await self._read(wanted), wanted)}
        except AdminError as error:
            since = old.failing_since if old.failure else time.time()
            self.snapshot = replace(old, failure=str(error), failing_since=since)
            return
        now = time.time()
        new = replace(old, overview=overview, panels=panels, read_at=now, failure="")
        if notice := _difference(old.overview, overview, now):
            new = replace(new, notice=notice, notice_until=now + _NOTICE_SECONDS)
        self.snapshot = new

    async def _read(self, wanted: Wanted) -> Document:
        try:
            return await self._client.get(_TOPICS[wanted.panel], wanted.query())
        except AdminError:
            if wanted.panel != OVERVIEW:
                raise
            return {}  # an older gateway has no journal


def _difference(old: Document | None, new: Document, now: float) -> str:
    """Return that another gateway answers than before; empty if it is the same."""
    if old is None:
        return ""
    versions = text(old, "version"), text(new, "version")
    if versions[0] != versions[1]:
        return f"version {versions[1]} of the gateway has replaced version {versions[0]}"
    if number(old, "started_at") != number(new, "started_at"):
        at = formatting.clock(number(new, "started_at"), now)
        return f"this is another gateway process than before: it started at {at}"
    return ""
