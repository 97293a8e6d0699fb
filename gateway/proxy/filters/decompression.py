"""Compressed request bodies, decoded as they are read."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.decompress import Decompressor
from gateway.protocol.operations import Operation, OperationKind
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import CHUNK_SIZE, ClientBody
from gateway.proxy.filters.content_codings import content_coding, encoded
from gateway.proxy.interfaces import ClientRequest, Route

_OF_THE_CODED = ("Content-Encoding", "Content-Length")


async def decoded(
    request: ClientRequest,
    asked: Operation,
    route: Route,
    deadline: Deadline,
    holding: Reservation,
) -> ClientRequest:
    """Give a request as it would have come without a content coding, and without saying of one.

    ``holding`` counts what is held for that, while the request is used. What is asked for in ways
    that are not known here passes as it is. Raises GatewayError: 415 for a coding that is not
    known; for what is read at once, as reading what is left does.
    """
    if asked.kind is OperationKind.OTHER or "Content-Encoding" not in request.headers:
        return request
    if not encoded(request.headers):
        # Triton answers 501 where such a header is empty.
        request.headers = CIMultiDictProxy(_without(request.headers, "Content-Encoding"))
        return request
    if request.content_length == 0:
        return request
    coding = content_coding(request.headers)
    assert coding is not None
    made = DecodedRequest(request, coding, route, deadline, holding)
    await made.begin()
    return made


class DecodedRequest(ClientRequest):
    """A request whose body is decoded while it comes.

    Received and decoded, it is at most ``limits.request_bytes`` large. Reading raises GatewayError:
    413 over the caps, 400 for what is not of the coding, 408 where it comes too slowly, 503 where
    too much is held.
    """

    def __init__(
        self,
        request: ClientRequest,
        coding: str,
        route: Route,
        deadline: Deadline,
        holding: Reservation,
    ) -> None:
        self.method = request.method
        self.target = request.target
        self.headers = request.headers
        self.content_length: int | None = None
        self._received = ClientBody(request, route.limits.request_bytes, deadline)
        self._inflater = Decompressor(coding, route.limits.max_decompression_ratio)
        self._turns = route.scheduler
        self._holding = holding
        self._first = b""
        self._ended = False

    async def begin(self) -> None:
        """Decode the first chunk: where that is all, the body has a length, as others do."""
        pieces = []
        size = 0
        while size <= CHUNK_SIZE and (piece := await self._next()):
            pieces.append(piece)
            size += len(piece)
            self._holding.resize(self._inflater.buffered_bytes + size)
        self._first = b"".join(pieces)
        headers = _without(self.headers, *_OF_THE_CODED)
        if self._ended:
            self.content_length = size
            headers["Content-Length"] = str(size)
        self.headers = CIMultiDictProxy(headers)

    async def read(self) -> bytes:
        """Give the next piece of the decoded body."""
        first, self._first = self._first, b""
        return first or await self._next()

    async def read_within(self, deadline: Deadline) -> bytes:
        """Give the next piece: time is kept where it comes, as that is not what is read here."""
        return await self.read()

    async def _next(self) -> bytes:
        while not self._ended:
            piece = self._inflater.step()
            if piece is None:
                await self._receive()
                continue
            await self._turns.next()
            if piece:
                return piece
        return b""

    async def _receive(self) -> None:
        if self._inflater.last:
            self._ended = True
            return
        data = await self._received.read()
        self._inflater.feed(data, last=not data)
        self._holding.resize(self._inflater.buffered_bytes)


def _without(headers: CIMultiDictProxy[str], *names: str) -> CIMultiDict[str]:
    left = CIMultiDict(headers)
    for name in names:
        left.popall(name, None)
    return left
