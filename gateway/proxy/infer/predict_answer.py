"""The client of a predict exchange, as one that takes the answer of an infer exchange."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.v1.response import PredictResponseConverter
from gateway.errors import bad_response
from gateway.protocol.v1 import V1ResponseLayout, error_document
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import CHUNK_SIZE, write
from gateway.proxy.headers import with_body
from gateway.proxy.infer.convert_response import stated_header_size
from gateway.proxy.interfaces import ClientResponse, Route
from gateway.sizes import ENCODE_CHUNK


class PredictAnswer(ClientResponse):
    """Takes a binary answer, or a server's error; tells the client of it the V1 way.

    ``holding`` counts what is held of it. A small answer goes out as a whole, a larger one as it
    is converted.
    """

    def __init__(
        self,
        answer: ClientResponse,
        predicted: V1ResponseLayout,
        route: Route,
        deadline: Deadline,
        holding: Reservation,
    ) -> None:
        self.request_id = answer.request_id
        self._answer = answer
        self._predicted = predicted
        self._route = route
        self._deadline = deadline
        self._holding = holding
        self._codec: PredictResponseConverter | None = None
        self._waiting = bytearray()
        self._worked = 0
        self._status = 0
        self._reason = ""
        self._headers = CIMultiDict[str]()

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Learn what is to come; the client is told when there is something to tell."""
        self.started = True
        self._status, self._reason = status, reason
        passed = CIMultiDictProxy(headers)
        self._headers = with_body(passed, {"Content-Type": "application/json"})
        if status == 200:
            header_size = stated_header_size(passed, self._route.limits.header_bytes)
            if header_size is not None:
                self._codec = self._codec_of(header_size)

    async def write(self, data: bytes | memoryview) -> None:
        """Convert what came next of the answer."""
        if self._codec is None:
            # A server's error, or an answer without a tensor behind it, as all of them are empty.
            self._waiting += data
            self._holding.resize(len(self._waiting))
            cap = self._route.limits.header_bytes
            if self._status == 200 and len(self._waiting) > cap:
                raise bad_response(
                    f"the server's response has more than {cap} bytes of JSON "
                    "(limits.header_bytes) and no binary tensors behind it"
                )
            del self._waiting[cap:]
            return
        for start in range(0, len(data), ENCODE_CHUNK):
            piece = data[start : start + ENCODE_CHUNK]
            text = self._codec.feed(piece)
            self._holding.resize(self._codec.buffered_bytes + len(self._waiting))
            await self._tell(text, len(piece))

    async def finish(self) -> None:
        """Give the client what is left."""
        if self._status != 200:
            document = error_document(bytes(self._waiting), self._reason)
            await self._send(document)
            return
        codec = self._codec
        if codec is None:
            document = bytes(self._waiting)
            self._waiting.clear()
            codec = self._codec = self._codec_of(len(document))
            await self.write(document)
        for text in codec.finish():
            await self._tell(text, len(text))
        if not self._answer.started:
            await self._send(bytes(self._waiting))
            return
        await write(self._answer, bytes(self._waiting), self._deadline)
        await self._answer.finish()

    def abort(self) -> None:
        """Drop the client's connection."""
        self._answer.abort()

    def _codec_of(self, header_size: int) -> PredictResponseConverter:
        cap = self._route.limits.spool_bytes
        return PredictResponseConverter(header_size, self._predicted, self._route.policies, cap)

    async def _tell(self, text: bytes, work: int) -> None:
        """Write text, once there is more than goes out as a whole.

        It was made of ``work`` bytes, by which others get their turn: rows that are held give no
        text for a long time, and what the server has sent by then is there without a pause.
        """
        self._waiting += text
        if len(self._waiting) > CHUNK_SIZE:
            if not self._answer.started:
                await self._answer.start(self._status, self._reason, self._headers)
            text = bytes(self._waiting)
            self._waiting.clear()
            await write(self._answer, text, self._deadline)
        self._worked += work
        if self._worked >= ENCODE_CHUNK:
            self._worked = 0
            await self._route.scheduler.next()

    async def _send(self, body: bytes) -> None:
        self._deadline.expect_client()
        await self._answer.send(self._status, self._reason, self._headers, body)
