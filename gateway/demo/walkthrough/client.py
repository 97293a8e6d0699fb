"""The client of the show: makes calls, measures their time, and records both sides."""

import asyncio
import io
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from google.protobuf.message import DecodeError
from multidict import CIMultiDict

from gateway.demo.server import tensors
from gateway.demo.server.server import DemoServer, RecordedCall, RecordedMessage
from gateway.demo.server.tensors import DTYPES, Array, RequestError
from gateway.demo.server.wire import HEADER_LENGTH, parse_object
from gateway.errors import GatewayError
from gateway.protocol.grpc.descriptors import message_class
from gateway.protocol.grpc.framing import PREFIX_SIZE, frame
from gateway.upstream.address import TcpAddress
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamRequest

TIMEOUT: Final = 30.0  # seconds for a call
INFER: Final = "/inference.GRPCInferenceService/ModelInfer"

_CONNECT_TIMEOUT: Final = 5.0  # seconds
_GRPC_HEADERS: Final = {"Content-Type": "application/grpc", "TE": "trailers"}
_MAX_QUOTED: Final = 300  # characters of a response in an error message


class ShowError(Exception):
    """A failed call of the show; the message has the request and the response."""


@dataclass(frozen=True)
class CallResult:
    """A call as the client saw it; `server_call` is what the server saw, None if nothing."""

    method: str
    url: str
    request: RecordedMessage
    status: int
    response: RecordedMessage
    seconds: float
    server_call: RecordedCall | None

    @property
    def path(self) -> str:
        """The path of the request."""
        return urlsplit(self.url).path

    def expect_status(self, status: int) -> None:
        """Raise ShowError unless the response has this status."""
        if self.status != status:
            raise self.error(f"status {self.status}, expected {status}")

    def response_document(self) -> dict[str, Any]:
        """Parse the JSON part of the response."""
        try:
            return parse_object(self.response.text.encode())
        except RequestError as error:
            raise self.error(error.message) from None

    @property
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
                data = self.response.body[offset:end]
                arrays[name] = tensors.from_binary(name, datatype, shape, data).array
                offset = end
        except (RequestError, KeyError, TypeError, ValueError) as error:
            raise self.error(f"the response is not an inference response ({error!r})") from None
        return arrays

    def error(self, problem: str) -> ShowError:
        """Make an error that names the call, the problem and the response."""
        response = f"{self.status} {self.response.text[:_MAX_QUOTED]}"
        return ShowError(f"{self.method} {self.url}: {problem}; the response was {response}")


@dataclass(frozen=True)
class GrpcResult:
    """A gRPC call as the client saw it; `server_call` is what the server saw, None if nothing."""

    url: str
    inputs: Mapping[str, Array]
    request: bytes
    response: bytes
    seconds: float
    server_call: RecordedCall | None

    @cached_property
    def outputs(self) -> dict[str, Array]:
        """The tensors of the response."""
        try:
            message = message_class("inference.ModelInferResponse").FromString(self.response)
            return {
                spec.name: np.frombuffer(data, DTYPES[spec.datatype]).reshape(spec.shape)
                for spec, data in zip(message.outputs, message.raw_output_contents, strict=True)
            }
        except (DecodeError, KeyError, ValueError) as error:
            raise self.error(f"the message has no tensors ({error!r})") from None

    def error(self, problem: str) -> ShowError:
        """Make an error that names the call, the problem and the response."""
        return ShowError(f"{INFER} at {self.url}: {problem}; the response was {self.response!r}")


@dataclass(eq=False)
class DemoClient:
    """Calls the gateway or the server, one call at a time, while its context is open."""

    server: DemoServer

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(TIMEOUT), headers={"Accept-Encoding": "identity"}
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post_json(self, url: str, body: bytes) -> CallResult:
        """Send a POST with JSON."""
        return await self.send("POST", url, {"Content-Type": "application/json"}, body)

    async def post_raw(self, url: str, body: bytes) -> CallResult:
        """Send a raw binary inference request: only the bytes of a tensor."""
        headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: "0"}
        return await self.send("POST", url, headers, body)

    async def send(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> CallResult:
        """Make a call over HTTP."""
        before = self.server.last_call
        started = time.perf_counter()
        try:
            async with self._session.request(
                method, url, headers=headers, data=io.BytesIO(body) if body else None
            ) as response:
                response_body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ShowError(f"{method} {url}: no response ({error!r})") from None
        return CallResult(
            method,
            url,
            RecordedMessage(headers or {}, body),
            response.status,
            RecordedMessage(response.headers, response_body),
            time.perf_counter() - started,
            self._seen_since(before),
        )

    async def infer_grpc(self, url: str, model: str, arrays: Mapping[str, Array]) -> GrpcResult:
        """Send an inference request with FP32 inputs over gRPC, as tritonclient does."""
        inputs = [
            {"name": name, "datatype": "FP32", "shape": array.shape}
            for name, array in arrays.items()
        ]
        contents = [array.tobytes() for array in arrays.values()]
        request: bytes = message_class("inference.ModelInferRequest")(
            model_name=model, inputs=inputs, raw_input_contents=contents
        ).SerializeToString()
        before = self.server.last_call
        started = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT):
                response = await _call_grpc(url, request)
        except (GatewayError, TimeoutError) as error:
            reason = str(error) or "no response in time"
            raise ShowError(f"{INFER} at {url}: {reason}") from None
        seconds = time.perf_counter() - started
        return GrpcResult(url, arrays, request, response, seconds, self._seen_since(before))

    def _seen_since(self, before: RecordedCall | None) -> RecordedCall | None:
        last = self.server.last_call
        return None if last is before else last


async def _call_grpc(url: str, message: bytes) -> bytes:
    """Send a message and return the response. Raises GatewayError and ShowError."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    endpoint = Http2Endpoint(
        TcpAddress(address.hostname, address.port), EndpointOptions(_CONNECT_TIMEOUT)
    )
    body = (frame(len(message)) + message,)
    request = UpstreamRequest("POST", INFER, CIMultiDict(_GRPC_HEADERS), body, is_grpc=True)
    try:
        with closing(await endpoint.send(request)) as response:
            received = b""
            while chunk := await response.read():
                received += chunk
            problem = response.error
    finally:
        await endpoint.close()
    if problem or len(received) < PREFIX_SIZE:
        raise ShowError(f"{INFER} at {url}: {problem or 'the response has no message'}")
    return received[PREFIX_SIZE:]
