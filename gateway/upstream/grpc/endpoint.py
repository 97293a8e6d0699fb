"""An endpoint over gRPC, which takes requests as they are over HTTP, too; one with both addresses.

So health checks, discovery and every operation beside inference work as with other endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from contextlib import closing

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.documents import read_response, write_request
from gateway.errors import (
    ErrorKind,
    GatewayError,
    ServerName,
    bad_request,
    bad_response,
    replace_surrogates,
    shorten,
)
from gateway.http1.head import ResponseHead
from gateway.protocol.dialects import GrpcForm
from gateway.protocol.grpc.framing import PREFIX_SIZE, frame, is_one_message
from gateway.protocol.grpc.headers import (
    GRPC_TYPE,
    STATUS,
    is_grpc_field,
    is_grpc_type,
    read_status,
)
from gateway.protocol.grpc.headers import read_message as read_error_text
from gateway.protocol.grpc.rpcs import RpcRequest, rpc_of
from gateway.protocol.grpc.status import GrpcStatus, http_status
from gateway.sizes import MAX_MODEL_DOCUMENT, QUOTED_NAME
from gateway.upstream.content_decoding import MAX_RATIO, decompress_message
from gateway.upstream.exchange import decode_fields
from gateway.upstream.transport import (
    Body,
    FieldLines,
    ReservedConnection,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)

_JSON = CIMultiDictProxy(CIMultiDict((("Content-Type", "application/json"),)))

_UNKNOWN_METHODS = ("method not found", "unknown method", "unknown service")
"""How servers on Python, Java and Go say that they do not know a method; in C++ they say nothing.

Any other text is about the call: Triton refuses to change the file of traces so.
"""


class GrpcEndpoint(UpstreamEndpoint):
    """An endpoint over gRPC; ``transport`` sends the calls over HTTP/2.

    A gRPC call is sent as it is. Any other request, whatever its headers say, is sent as the RPC
    that asks for the same, and its response is returned as JSON; GatewayError (501) if there is
    none.
    ``form`` tells how the server speaks, as far as it is known.
    """

    speaks_grpc = True

    def __init__(
        self, transport: UpstreamEndpoint, form: Callable[[], GrpcForm] = GrpcForm
    ) -> None:
        self.url = transport.url
        self.name = transport.name
        self.own_request_headers = transport.own_request_headers
        self.drain_counters = transport.drain_counters
        self._transport = transport
        self._form = form

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        if request.is_grpc:
            return await self._transport.send(request)
        asked = rpc_of(request.method, request.target)
        if asked is None:
            path = request.target.partition("?")[0]
            raise GatewayError(
                ErrorKind.UNSUPPORTED,
                f"{self.name.url} is reached over gRPC, which has nothing like "
                f"{request.method} {path}",
                server=self.name,
            )
        form = self._form()
        body = await _read_json(request.body)
        by_first = form.loads_by_first_field
        message = write_request(asked.rpc, asked.path, body, loads_by_first_field=by_first)
        headers = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in ("content-type", "content-length", "accept-encoding")
            and not is_grpc_field(name)
        )
        headers.update({"Content-Type": GRPC_TYPE, "TE": "trailers"})
        rpc_request = UpstreamRequest(
            "POST", f"/{form.service}/{asked.rpc}", headers, (frame(len(message)) + message,)
        )
        with closing(await self._transport.send(rpc_request)) as response:
            return await _as_http(response, asked, self.name)

    def after_timeout(self) -> None:
        """Use the connection of a call that has timed out no more; see UpstreamEndpoint."""
        self._transport.after_timeout()

    def try_reserve_stream(self) -> ReservedConnection | None:
        """Take a stream for a gRPC call; see UpstreamEndpoint."""
        return self._transport.try_reserve_stream()

    async def close(self) -> None:
        """Close the connections, after the lane of shared memory."""
        if self.shared_memory is not None:
            await self.shared_memory.close()
        await self._transport.close()


class DualEndpoint(UpstreamEndpoint):
    """A server that is reached over HTTP and over gRPC.

    gRPC calls go to its gRPC address, all others to its HTTP address. The
    latter is its URL. Errors name the address that failed.
    """

    def __init__(self, http: UpstreamEndpoint, grpc: UpstreamEndpoint) -> None:
        self.url = http.url
        self.name = http.name
        self.own_request_headers = http.own_request_headers
        self.drain_counters = grpc.drain_counters
        self._http = http
        self._grpc = grpc
        self._lacks_grpc = False

    @property
    def addresses(self) -> tuple[UpstreamEndpoint, ...]:
        """Return the endpoints of its addresses: HTTP, then gRPC."""
        return self._http, self._grpc

    @property
    def probe_targets(self) -> tuple[UpstreamEndpoint, ...]:
        """Return its HTTP address, and the gRPC one if the last call could not connect there.

        A gRPC address that nobody uses need not respond.
        """
        return self.addresses if self._lacks_grpc else (self._http,)

    def server_for(self, *, is_grpc: bool) -> ServerName:
        """Return the name of the address that a request goes to."""
        return (self._grpc if is_grpc else self._http).name

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        endpoint = self._grpc if request.is_grpc else self._http
        if endpoint is self._http:
            return await endpoint.send(request)
        try:
            response = await endpoint.send(request)
        except GatewayError as error:
            self._lacks_grpc = error.kind is ErrorKind.UNREACHABLE
            raise
        self._lacks_grpc = False
        return response

    def after_timeout(self) -> None:
        """Use the connection of a call that has timed out no more; see UpstreamEndpoint."""
        for endpoint in self.addresses:
            endpoint.after_timeout()

    def try_reserve(self) -> ReservedConnection | None:
        """Take a connection over HTTP; see UpstreamEndpoint."""
        return self._http.try_reserve()

    def try_reserve_stream(self) -> ReservedConnection | None:
        """Take a stream over gRPC; see UpstreamEndpoint."""
        return self._grpc.try_reserve_stream()

    async def close(self) -> None:
        """Close the connections to both addresses, after the lane of shared memory."""
        if self.shared_memory is not None:
            await self.shared_memory.close()
        await asyncio.gather(self._http.close(), self._grpc.close())


async def _read_json(body: Body) -> object:
    if body is None:
        return None
    if isinstance(body, AsyncIterable):
        text = b"".join([bytes(chunk) async for chunk in body])
    else:
        text = b"".join(body)
    if not text:
        return None
    try:
        return orjson.loads(text)
    except ValueError as error:
        raise bad_request(f"the request is no JSON: {error}") from None


async def _as_http(
    response: UpstreamResponse, asked: RpcRequest, server: ServerName
) -> UpstreamResponse:
    """Read a response, and return it as it would be over HTTP."""
    message = await read_message(response, MAX_MODEL_DOCUMENT, server)
    if message is None:
        return DocumentResponse(*error_of_rpc(asked.rpc, response, server))
    document = read_response(asked.rpc, message, MAX_MODEL_DOCUMENT)
    if asked.rpc in ("ServerLive", "ServerReady", "ModelReady") and not any(document.values()):
        return DocumentResponse(400, _error_body("not ready"))
    return DocumentResponse(200, b"" if document is None else orjson.dumps(document))


def check_grpc_head(status: int, headers: CIMultiDictProxy[str], server: ServerName) -> None:
    """Refuse a response of 200 that is of another protocol, such as a page.

    Raises GatewayError (502) that names the server and the content type. A response without one
    is judged by its status.
    """
    content_type = headers.get("Content-Type", "").strip().lower()
    if status != 200 or not content_type or is_grpc_type(content_type) or STATUS in headers:
        return
    raise bad_response(
        f"{server.url} did not respond in gRPC: the response has the Content-Type "
        f"{shorten(content_type, QUOTED_NAME)!r}",
        server,
    )


def read_outcome(head: ResponseHead, trailers: FieldLines) -> tuple[int, str]:
    """Return the HTTP status that stands for that of a complete response, and its message.

    A response without trailers has them in its head, or is not of gRPC.
    """
    fields = decode_fields(trailers) or list(head.headers.items())
    code = read_status(fields)
    return (head.status, "") if code is None else (http_status(code), read_error_text(fields))


def check_one_message(start: bytes | memoryview, size: int, server: ServerName) -> None:
    """Refuse a unary response of status OK that is not one message of gRPC.

    ``start`` are the first bytes of its body, ``size`` counts all. Raises GatewayError: 502, and
    INTERNAL over gRPC, as clients may retry UNAVAILABLE although the model has inferred.
    """
    if not is_one_message(start, size):
        text = f"{server.url} did not respond with one gRPC message"
        raise GatewayError(ErrorKind.NOT_ONE_MESSAGE, text, server=server)


async def read_message(
    response: UpstreamResponse,
    cap: int,
    server: ServerName,
    reserve: Callable[[int], None] = lambda size: None,
    max_ratio: int = MAX_RATIO,
) -> bytes | None:
    """Read the one message of a unary response, decompressed; None if it is an error.

    ``reserve`` gets the size of each piece before it is kept. Raises GatewayError (502) for
    anything else, and above ``cap`` bytes or the ratio of ``decompress_message``; and what
    ``reserve`` raises.
    """
    check_grpc_head(response.status, response.headers, server)
    body = bytearray()
    while chunk := await response.read():
        reserve(len(chunk))
        body += chunk
        if len(body) > cap + PREFIX_SIZE:
            raise bad_response(f"the response of {server.url} is larger than {cap} bytes", server)
    if response.grpc_status != GrpcStatus.OK:
        return None
    check_one_message(memoryview(body), len(body), server)
    message = memoryview(body)[PREFIX_SIZE:]
    if body[0]:
        return await decompress_message(message, response, server, cap, max_ratio, reserve)
    return bytes(message)


def error_of_rpc(rpc: str, response: UpstreamResponse, server: ServerName) -> tuple[int, bytes]:
    """Return the error as ``error_of``; a method that the server does not have is named."""
    why = response.grpc_error(server.public)
    is_unimplemented = response.grpc_status == GrpcStatus.UNIMPLEMENTED
    if not is_unimplemented or (why and not why.lower().startswith(_UNKNOWN_METHODS)):
        return error_of(response, server)
    text = f"{server.public} does not serve {rpc} over gRPC"
    return 501, _error_body(f"{text}: {why}" if why else text)


def error_of(response: UpstreamResponse, server: ServerName) -> tuple[int, bytes]:
    """Return the HTTP status and body for the error of a gRPC response.

    Raises GatewayError (502) for a response without a status.
    """
    code = response.grpc_status
    if code is None:
        raise bad_response(f"{server.url} ended its response without grpc-status", server)
    text = response.grpc_error(server.public) or f"the server responded with gRPC status {code}"
    return http_status(code), _error_body(text)


def _error_body(text: str) -> bytes:
    return orjson.dumps({"error": replace_surrogates(text)})


class DocumentResponse(UpstreamResponse):
    """A response that is complete."""

    def __init__(
        self, status: int, body: bytes, headers: CIMultiDictProxy[str] | None = None
    ) -> None:
        self.status = status
        self.reason = ""
        fields = CIMultiDict(_JSON if headers is None else headers)
        fields["Content-Length"] = str(len(body))
        self.headers = CIMultiDictProxy(fields)
        self._size = len(body)
        self._body = body

    @property
    def received_bytes(self) -> int:
        """Return the bytes of the body."""
        return self._size

    async def read(self) -> bytes | memoryview:
        """Return the body, then nothing."""
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """Drop the body."""
        self._body = b""
