"""The client of the show: it calls, takes the time, and tells what the server behind saw."""

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from gateway.demo.server import documents, tensors
from gateway.demo.server.errors import RequestError
from gateway.demo.server.recorder import Exchange, Message
from gateway.demo.server.server import DemoServer
from gateway.demo.server.tensors import DTYPES, Array

TIMEOUT: Final = 30.0  # seconds for a whole call

_SHOWN_ANSWER: Final = 300  # characters of a failed call's answer in its error


class ShowError(Exception):
    """Report a call that failed; the message says which call, and what was answered."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Hold a call and its answer; `behind` is what the server saw of it, None if nothing."""

    method: str
    url: str
    sent: Message
    sent_body: bytes
    status: int
    got: Message
    body: bytes
    seconds: float
    behind: Exchange | None

    @property
    def path(self) -> str:
        """Return the path of the call."""
        return urlsplit(self.url).path

    @property
    def sent_text(self) -> str:
        """Return the JSON part of what was sent."""
        return self.sent_body[: self.sent.header_length].decode(errors="replace")

    @property
    def text(self) -> str:
        """Return the JSON part of the answer."""
        return self.body[: self.got.header_length].decode(errors="replace")

    def expect(self, status: int) -> None:
        """Raise ShowError unless the answer has this status."""
        if self.status != status:
            raise self.failure(f"answered {self.status}, not {status}")

    def document(self) -> dict[str, Any]:
        """Return the JSON part of the answer."""
        try:
            return documents.parse_object(self.text.encode())
        except RequestError as error:
            raise self.failure(error.message) from None

    def outputs(self) -> dict[str, Array]:
        """Return the output tensors of an inference, binary or JSON."""
        at = self.got.header_length or 0
        arrays: dict[str, Array] = {}
        try:
            for output in self.document()["outputs"]:
                name, datatype, shape = output["name"], output["datatype"], output["shape"]
                if "data" in output:
                    arrays[name] = np.array(output["data"], DTYPES[datatype]).reshape(shape)
                    continue
                end = at + output["parameters"]["binary_data_size"]
                data = self.body[at:end]
                arrays[name] = tensors.from_binary(name, datatype, shape, data).array
                at = end
        except (RequestError, KeyError, TypeError, ValueError) as error:
            raise self.failure(f"no inference response ({error!r})") from None
        return arrays

    def failure(self, problem: str) -> ShowError:
        """Return an error that tells the call, the problem and the answer."""
        answer = self.got.text[:_SHOWN_ANSWER]
        return ShowError(
            f"{self.method} {self.url}: {problem}; the answer was {self.status} {answer}"
        )


def client_session() -> aiohttp.ClientSession:
    """Return an HTTP client with a timeout, whose answers come uncompressed."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT), headers={"Accept-Encoding": "identity"}
    )


class Caller:
    """Call the gateway or the server, one call at a time."""

    def __init__(self, session: aiohttp.ClientSession, server: DemoServer) -> None:
        self._session = session
        self._server = server

    async def get(self, url: str) -> Reply:
        """Send a GET."""
        return await self._send("GET", url, {}, b"")

    async def post_json(self, url: str, body: bytes) -> Reply:
        """Send a POST with JSON."""
        return await self._send("POST", url, {"Content-Type": "application/json"}, body)

    async def post_raw(self, url: str, body: bytes) -> Reply:
        """Send a raw binary inference request: a tensor's bytes and nothing else."""
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": "0",
        }
        return await self._send("POST", url, headers, body)

    async def _send(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        before = self._server.last_exchange
        started = time.perf_counter()
        try:
            async with self._session.request(
                method, url, headers=headers, data=io.BytesIO(body) if body else None
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ShowError(f"{method} {url}: no answer ({error!r})") from None
        seconds = time.perf_counter() - started
        behind = self._server.last_exchange
        return Reply(
            method=method,
            url=url,
            sent=Message.of(headers, body),
            sent_body=body,
            status=response.status,
            got=Message.of(response.headers, answer),
            body=answer,
            seconds=seconds,
            behind=None if behind is before else behind,
        )
