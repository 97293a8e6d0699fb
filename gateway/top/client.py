"""Read documents from the admin address; what goes wrong is said in one sentence."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlencode

from gateway.system.request_deadline import request_deadline
from gateway.top.address import AdminAddress
from gateway.top.document import Document, text
from gateway.top.plain_text import cut, plain

TIMEOUT = 5.0
"""Seconds to wait for the gateway."""
_MOST_BYTES = 4 * 1024 * 1024
"""Bytes of a document. Read as JSON, it may take a hundred times as much memory."""
_MOST_SENTENCE = 300
_HEADERS = {"Accept": "application/json", "User-Agent": "tensorgate-top"}


class AdminError(Exception):
    """Why a document could not be read, as a sentence for operators."""


class AdminClient:
    """Reads documents over one connection, which it opens anew when it is lost."""

    def __init__(self, address: AdminAddress, timeout: float = TIMEOUT) -> None:
        self._address = address
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None

    def get(self, name: str, query: Mapping[str, str] | None = None) -> Document:
        """Return a document of the API. Raises AdminError."""
        path = f"{self._address.prefix}/api/{name}{f'?{urlencode(query)}' if query else ''}"
        try:
            status, body = self._request(path)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise AdminError(self._sentence(error)) from None
        return self._document(status, body)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, path: str) -> tuple[int, bytes]:
        if self._connection is not None:
            try:
                return self._send(self._connection, path)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                self.close()  # the gateway has closed it meanwhile
        self._connection = self._connect()
        return self._send(self._connection, path)

    def _send(self, connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
        with request_deadline(connection, self._timeout):
            connection.request("GET", path, headers=_HEADERS)
            response = connection.getresponse()
            body = response.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            self.close()
            raise AdminError(f"{self._address.shown} answers with more than {_MOST_BYTES} bytes")
        return response.status, body

    def _connect(self) -> http.client.HTTPConnection:
        address = self._address
        if address.socket is not None:
            return _UnixConnection(address.socket, self._timeout)
        if address.tls:
            return http.client.HTTPSConnection(address.host, address.port, timeout=self._timeout)
        return http.client.HTTPConnection(address.host, address.port, timeout=self._timeout)

    def _document(self, status: int, body: bytes) -> Document:
        shown = self._address.shown
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if status == 200 and isinstance(document, dict):
            return document
        said = cut(plain(text(document, "error")), _MOST_SENTENCE)
        if status == 403:
            raise AdminError(f"{shown} refuses to answer: {said or 'it gives no reason'}")
        if status in (401, 407):
            raise AdminError(f"{shown} wants a login, which this program does not have")
        kind = "another kind of document" if status == 200 else f"status {status}"
        reason = f": {said}" if said else ""
        question = "; is it the admin address of a Tensorgate?" if status < 500 else ""
        raise AdminError(f"{shown} answers with {kind}{reason}{question}")

    def _sentence(self, error: Exception) -> str:
        shown = self._address.shown
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            reason = "the connection was refused"
            if isinstance(error, FileNotFoundError):
                reason = "there is no such socket"
            return f"no gateway has its admin address at {shown}: {reason}"
        if isinstance(error, TimeoutError):
            return f"{shown} did not answer within {self._timeout:g} s"
        if isinstance(error, ssl.SSLError):
            return f"no TLS connection to {shown}: {error.reason or error}"
        if isinstance(error, socket.gaierror):
            return f"the host of {shown} is not known: {error.strerror}"
        if isinstance(error, ConnectionError | http.client.RemoteDisconnected):
            return f"{shown} closed the connection before it answered"
        if isinstance(error, http.client.HTTPException):
            return f"{shown} does not speak HTTP as expected"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"cannot connect to {shown}: {reason}"


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path
        self._seconds = timeout

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._seconds)
        self.sock.connect(self._path)
