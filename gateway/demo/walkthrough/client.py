"""The client of the show: makes calls, measures their time, and records both sides."""

import asyncio
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from gateway.demo.server import documents, tensors
from gateway.demo.server.errors import RequestError
from gateway.demo.server.recorder import RecordedCall, RecordedMessage
from gateway.demo.server.server import DemoServer
from gateway.demo.server.tensors import DTYPES, Array
from gateway.demo.walkthrough.grpc_client import (
    INFER,
    GrpcError,
    GrpcTensor,
    call,
    read_tensors,
    write_request,
)

TIMEOUT: Final = 30.0  # seconds for a call

_MAX_QUOTED: Final = 300  # characters of a response in an error message


class ShowError(Exception):
    """A failed call of the show; the message has the request and the response."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """A call as the client saw it; `server_call` is what the server saw, None if nothing."""

    method: str
    url: str
    request: RecordedMessage
    request_body: bytes
    status: int
    response: RecordedMessage
    response_body: bytes
    seconds: float
    server_call: RecordedCall | None

    @property
    def path(self) -> str:
        """The path of the request."""
        return urlsplit(self.url).path

    @property
    def request_text(self) -> str:
        """The JSON part of the request."""
        return self.request_body[: self.request.header_length].decode(errors="replace")

    @property
    def response_text(self) -> str:
        """The JSON part of the response."""
        return self.response_body[: self.response.header_length].decode(errors="replace")

    def expect_status(self, status: int) -> None:
        """Raise ShowError unless the response has this status."""
        if self.status != status:
            raise self.error(f"status {self.status}, expected {status}")

    def response_document(self) -> dict[str, Any]:
        """Parse the JSON part of the response."""
        try:
            return documents.parse_object(self.response_text.encode())
        except RequestError as error:
            raise self.error(error.message) from None

    def outputs(self) -> dict[str, Array]:
        """Parse the output tensors of an inference response, in binary or JSON."""
        offset = self.response.header_length or 0
        arrays: dict[str, Array] = {}
        try:
            for output in self.response_document()["outputs"]:
                name, datatype, shape = output["name"], output["datatype"], output["shape"]
                if "data" in output:
                    arrays[name] = np.array(output["data"], DTYPES[datatype]).reshape(shape)
                    continue
                end = offset + output["parameters"]["binary_data_size"]
                data = self.response_body[offset:end]
                arrays[name] = tensors.from_binary(name, datatype, shape, data).array
                offset = end
        except (RequestError, KeyError, TypeError, ValueError) as error:
            raise self.error(f"the response is not an inference response ({error!r})") from None
        return arrays

    def error(self, problem: str) -> ShowError:
        """Make an error that names the call, the problem and the response."""
        response = f"{self.status} {self.response.text[:_MAX_QUOTED]}"
        return ShowError(f"{self.method} {self.url}: {problem}; the response was {response}")


@dataclass(frozen=True, slots=True)
class GrpcResult:
    """A gRPC call as the client saw it; `server_call` is what the server saw, None if nothing."""

    url: str
    request: bytes
    response: bytes
    inputs: Sequence[GrpcTensor]
    tensors: Sequence[GrpcTensor]
    seconds: float
    server_call: RecordedCall | None

    @property
    def outputs(self) -> dict[str, Array]:
        """Return the output tensors."""
        return {tensor.name: tensor.array for tensor in self.tensors}

    def error(self, problem: str) -> ShowError:
        """Make an error that names the call, the problem and the response."""
        return _grpc_error(self.url, f"{problem}; the response was {self.response!r}")


def _grpc_error(url: str, problem: str) -> ShowError:
    return ShowError(f"{INFER} at {url}: {problem}")


def http_session() -> aiohttp.ClientSession:
    """Make an HTTP client with a timeout that asks for uncompressed responses."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT), headers={"Accept-Encoding": "identity"}
    )


class DemoClient:
    """Calls the gateway or the server, one call at a time."""

    def __init__(self, session: aiohttp.ClientSession, server: DemoServer) -> None:
        self._session = session
        self._server = server

    async def get(self, url: str) -> CallResult:
        """Send a GET."""
        return await self._send("GET", url, {}, b"")

    async def post_json(self, url: str, body: bytes) -> CallResult:
        """Send a POST with JSON."""
        return await self._send("POST", url, {"Content-Type": "application/json"}, body)

    async def post_raw(self, url: str, body: bytes) -> CallResult:
        """Send a raw binary inference request: only the bytes of a tensor."""
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": "0",
        }
        return await self._send("POST", url, headers, body)

    async def infer_grpc(self, url: str, model: str, arrays: Mapping[str, Array]) -> GrpcResult:
        """Send an inference request with FP32 inputs over gRPC."""
        request = write_request(model, arrays, "FP32")
        before = self._server.last_call
        started = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT):
                response = await call(url, INFER, request)
            seconds = time.perf_counter() - started
            tensors_of_response = read_tensors(response, outputs=True)
        except (GrpcError, TimeoutError) as error:
            raise _grpc_error(url, str(error) or "no response in time") from None
        server_call = self._server.last_call
        return GrpcResult(
            url=url,
            request=request,
            response=response,
            inputs=read_tensors(request, outputs=False),
            tensors=tensors_of_response,
            seconds=seconds,
            server_call=None if server_call is before else server_call,
        )

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> CallResult:
        before = self._server.last_call
        started = time.perf_counter()
        try:
            async with self._session.request(
                method, url, headers=headers, data=io.BytesIO(body) if body else None
            ) as response:
                response_body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ShowError(f"{method} {url}: no response ({error!r})") from None
        seconds = time.perf_counter() - started
        server_call = self._server.last_call
        return CallResult(
            method=method,
            url=url,
            request=RecordedMessage.from_http(headers, body),
            request_body=body,
            status=response.status,
            response=RecordedMessage.from_http(response.headers, response_body),
            response_body=response_body,
            seconds=seconds,
            server_call=None if server_call is before else server_call,
        )
