"""A gRPC call's request: its messages pass as they came, and tell which model they are for."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

from multidict import CIMultiDictProxy

from gateway.codec.decompress import Decompressor
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.framing import MessagePiece, MessageReader, frame
from gateway.protocol.grpc.headers import ENCODING, is_grpc_type
from gateway.protocol.grpc.methods import GrpcMethod
from gateway.protocol.grpc.model_scanner import ModelScanner, ScannedModel
from gateway.protocol.grpc.wire import LENGTH, MAX_MESSAGE, Buffer, bytes_field
from gateway.protocol.json_errors import quote_value
from gateway.protocol.operations import OperationKind
from gateway.proxy.admission.conversion_scheduler import TimeSliceWaiter
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.destination import Limits
from gateway.proxy.interfaces import ClientRequest
from gateway.sizes import CONVERT_CHUNK
from gateway.system.sockets.body_stream import RelayedChunks, RelaySteps

_CAP_NAME: Final = "limits.max_request_bytes"
_BUFFER_CAP_NAME: Final = "limits.max_buffered_body_bytes"

_ENCODINGS: Final = ("gzip", "deflate")
_TIME_SLICE: Final = 1024
"""Fields that are scanned before other calls get a time slice: about a millisecond."""
_MESSAGE_WORK: Final = 16
_CHUNK_WORK: Final = 256
"""What a message, or a decompressed chunk, costs in fields."""
_MIN_PIECE: Final = 1024
"""Bytes of a piece that is kept as it came: an object takes some fifty bytes more."""
_SCAN_STEP: Final = 4 * 1024
"""Bytes that are scanned at once: at most so many fields as take one or two milliseconds."""

_NOTHING: Final = memoryview(b"")

NamedModel = tuple[ScannedModel, tuple[str, ...]]
"""The model that a message names, and all names that servers may take for the model's."""

ModelCheck = Callable[[NamedModel], None]
"""Raises GatewayError if a further message of a stream must not go where the first one went."""

MarkedOutputs = tuple[ScannedModel, list[bytes]]
"""A message's model, and its requested outputs that may want classification."""


def is_grpc(request: ClientRequest) -> bool:
    """Tell whether a request is a gRPC call: "Requests" of PROTOCOL-HTTP2.md."""
    if not request.carries_trailers or request.method != "POST":
        return False
    return is_grpc_type(request.headers.get("Content-Type", ""))


class GrpcRequest(ClientRequest):
    """Reads the messages of a call, and finds the models that they name.

    ``read`` gives the body as it came, unless its route rewrites the model; what ``find_model``
    has read ahead comes again. Of the limits ``max_request_bytes`` is for a message, and
    ``max_buffered_body_bytes`` for what is read ahead. A message with many fields is scanned in
    time slices, which ``next_slice`` gives. ``scanner`` scans infer requests.
    """

    def __init__(
        self,
        request: ClientRequest,
        method: GrpcMethod,
        limits: Limits,
        next_slice: TimeSliceWaiter,
        scanner: type[ModelScanner] = ModelScanner,
    ) -> None:
        self.method = request.method
        self.target = request.target
        self.headers = request.headers
        self.added_headers = request.added_headers
        self.content_length: int | None = None
        """The bytes of a body that was read ahead to its end; None for any other."""
        self.carries_trailers = True
        self.rpc = method
        self.has_ended = False
        """Whether the client has sent its last message."""
        self.marks_outputs = True
        """Whether ``take_marked`` will be called; it is told of what was read ahead anyhow."""
        self._marked: list[MarkedOutputs] = []
        self._marked_error: GatewayError | None = None
        self._is_complete = False
        self._check_model: ModelCheck | None = None
        self._rewriter: ModelRewriter | None = None
        self._message_size = 0
        self._request = request
        self.reader = MessageReader(limits.max_request_bytes, _CAP_NAME, REQUEST)
        self._scanner = _new_scanner(method, scanner)
        self._decompressor: MessageDecompressor | None = None
        self._limits = limits
        self._ready: deque[bytes | memoryview] = deque()
        """What the next reads return."""
        self._checked: dict[int, str] | None = None
        """The values of the last message that was checked, by the fields that name its model."""
        self._next_slice = next_slice
        self._left_scan: Iterator[bool] | None = None
        """The rest of a scan that takes long."""
        self._work = 0
        """What was done since other calls had a time slice; a field counts 1."""

    async def find_model(self, deadline: Deadline, reservation: Reservation) -> NamedModel:
        """Read until it is known which model the first message is for.

        A small body is read to its end, and the first message of a stream. A larger one is read
        until it has named a model: ``read`` raises GatewayError (400) if it names another one
        later. Raises GatewayError: 400 for what is no gRPC message, 413, 503.
        """
        size = 0
        while not self._knows_model():
            cap = self._limits.max_buffered_body_bytes
            if size > cap:
                raise GatewayError(
                    ErrorKind.TOO_LARGE,
                    f"the request names no model in its first {cap} bytes ({_BUFFER_CAP_NAME})",
                )
            piece = await self._receive(deadline)
            if not piece:
                self._is_complete = True
                self.content_length = size
                break
            size += len(piece)
            reservation.grow(len(piece))
            self._keep(piece)
        self.marks_outputs = False
        scanner = self._scanner
        return scanner.model if scanner.ended else scanner.take(), scanner.names

    def _keep(self, piece: bytes | memoryview) -> None:
        """Keep a piece that was read ahead; small ones are joined, as each object costs memory."""
        ready = self._ready
        if ready and len(ready[-1]) < _MIN_PIECE:
            ready[-1] = b"".join((ready[-1], piece))
        else:
            ready.append(bytes(piece))  # a memoryview would pin its whole slab

    async def route(
        self, cap: int, check_model: ModelCheck, rewriter: ModelRewriter | None = None
    ) -> None:
        """Apply what the call's route says: the bytes of a message, and where others may go.

        With a rewriter, all messages get the model of the route. Raises GatewayError: 413 if a
        message that was read ahead is larger, and what the check and the rewriter raise.
        """
        self.reader.cap = cap
        self.reader.check_size(self._message_size)
        self._check_model = check_model
        self.marks_outputs = True  # all that was read ahead is marked
        if not self._begin_scan():
            await self._end_scan()
        self.marks_outputs = False
        self._rewriter = rewriter
        if rewriter is not None:
            read_ahead, self._ready = self._ready, deque()
            for piece in read_ahead:
                self._ready.extend(await rewriter.feed(piece, self._name_field))
            if self._is_complete:
                self.content_length = sum(map(len, self._ready))

    async def read(self) -> bytes | memoryview:
        """Return the next piece of the body; see ClientRequest."""
        return await self._read(None)

    def read_within(self, deadline: Deadline) -> Awaitable[bytes | memoryview]:
        """Read as ``read`` does, with the client expected; see ClientRequest."""
        if self._ready:  # else the inner request does so
            deadline.expect_client()
        return self._read(deadline)

    async def _read(self, deadline: Deadline | None) -> bytes | memoryview:
        while not self._ready:
            if self._is_complete:
                return b""
            piece = await self._receive(deadline)
            if not piece or self._rewriter is None:
                return piece
            self._ready.extend(await self._rewriter.feed(piece, self._name_field))
        if self._left_scan is not None:
            await self._end_scan()
        return self._ready.popleft()

    async def relay_within(self, deadline: Deadline, steps: RelaySteps) -> None:
        """Let each piece pass these steps, with the client expected; a refused one comes next.

        Pieces that are rewritten, or that take long to scan, can only be read.
        """
        if not (self._ready or self._is_complete) and self._rewriter is None:
            piece = await deadline.relay(self._request, (self._scan_piece, *steps))
            if piece:
                self._ready.append(piece)

    async def _receive(self, deadline: Deadline | None) -> bytes | memoryview:
        """Receive and scan the next piece of the body."""
        request = self._request
        piece = await (request.read() if deadline is None else request.read_within(deadline))
        if not piece:
            self.has_ended = True
            self.reader.end()
        elif not self._scan_piece(piece):
            await self._end_scan()
        return piece

    def _scan_piece(self, piece: bytes | memoryview) -> bool:
        """Scan the next piece of the body; False if ``_end_scan`` must do the rest."""
        self.reader.feed(piece)
        return self._begin_scan()

    def _begin_scan(self) -> bool:
        scan = self._scan_rest()
        is_scanned = next(scan, True)
        self._left_scan = None if is_scanned else scan
        return is_scanned

    async def _end_scan(self) -> None:
        """Scan the rest in time slices."""
        assert self._left_scan is not None
        await self._next_slice()
        while not next(self._left_scan, True):
            await self._next_slice()
        self._left_scan = None

    def _scan_rest(self) -> Iterator[bool]:
        """Scan what was received; until there is a route, stop at what tells it.

        Yields False whenever other calls should have a time slice.
        """
        while (part := self.reader.next_piece()) is not None:
            if part.begins:
                self._begin_message(part)
            for data in self._content(part):
                if self._decompressor is not None:
                    self._work += _CHUNK_WORK
                while data:
                    data = self._scan(data)
                    if self._is_turn_over():
                        yield False
            if part.ends and self.rpc.name_fields:
                self._end_message()
            if self._is_turn_over():
                yield False
            if self._check_model is None and self._knows_model():
                return

    @property
    def has_marked(self) -> bool:
        """Whether ``take_marked`` has something to tell."""
        return bool(self._marked) or self._marked_error is not None

    def take_marked(self) -> list[MarkedOutputs]:
        """Return what messages that ended since the last call may want to be classified.

        The model is the one that the server gets. Raises GatewayError (400) if that is too much.
        """
        if self._marked_error is not None:
            raise self._marked_error
        marked, self._marked = self._marked, []
        if self._rewriter is None:
            return marked
        return [(self._rewriter.rewrite(model), outputs) for model, outputs in marked]

    @property
    def _name_field(self) -> int:
        """Return the field that has the name of the model in the message that was scanned last.

        All messages of a stream have it in the same one.
        """
        return self._scanner.name_field or self.rpc.name_fields[0]

    def _knows_model(self) -> bool:
        rpc = self.rpc
        if self._message_size > CONVERT_CHUNK:
            scanner = self._scanner
            # The version may come in the next piece.
            return not rpc.name_fields or bool(scanner.names and scanner.is_past_names)
        # A unary call is read to its end, so that it can be retried.
        return rpc.request_streams and (not rpc.name_fields or self._scanner.ended)

    def _content(self, part: MessagePiece) -> Iterable[Buffer]:
        """Return the data of a part of a message to look for the model in, decompressed."""
        if not self.rpc.name_fields:
            return ()
        if self._decompressor is None:
            return (part.data,)
        return self._decompressor.feed(part.data, last=part.ends)

    def _scan(self, data: Buffer) -> Buffer:
        """Scan so much of a message as takes a short time; return the rest."""
        scanner = self._scanner
        before = scanner.fields
        size = max(_SCAN_STEP, scanner.free_size)
        if len(data) <= size:
            step, rest = data, _NOTHING
        else:
            view = memoryview(data)
            step, rest = view[:size], view[size:]
        scanner.feed(step)
        self._work += scanner.fields - before
        return rest

    def _is_turn_over(self) -> bool:
        """Whether other calls get a time slice: after about a millisecond."""
        if self._work < _TIME_SLICE:
            return False
        self._work = 0
        return True

    def _end_message(self) -> None:
        """Check the model of a message that has ended, and note what it has marked."""
        scanner = self._scanner
        scanner.end()
        if scanner.marked and self.marks_outputs:
            self._marked.append((scanner.model, scanner.marked))
        if self.marks_outputs:
            self._marked_error = self._marked_error or scanner.marked_error
        if self.reader.messages > 1 and self._check_model and scanner.values != self._checked:
            self._check_model((scanner.model, scanner.names))
            self._checked = scanner.values

    def _begin_message(self, part: MessagePiece) -> None:
        self._work += _MESSAGE_WORK
        self._message_size = part.size
        rpc = self.rpc
        if self.reader.messages > 1:
            if not rpc.request_streams:
                raise bad_request(f"{rpc.name} takes one message, and the request has more")
            self._scanner.begin()
        self._decompressor = None
        if part.is_compressed and rpc.name_fields:
            ratio, cap = self._limits.max_decompression_ratio, self.reader.cap
            self._decompressor = MessageDecompressor(self.headers, cap, _CAP_NAME, ratio)


class RequestChunks(RelayedChunks):
    """Yields a request's body as it arrives, its messages checked at their ends.

    ``check`` is awaited before the chunk that ends a message with marked outputs, which it may
    refuse by an error. Only a GrpcRequest has such messages.
    """

    def __init__(
        self,
        request: ClientRequest,
        deadline: Deadline,
        check: Callable[[GrpcRequest], Awaitable[None]] | None = None,
    ) -> None:
        self._request = request
        self._deadline = deadline
        self._check = check

    def __aiter__(self) -> RequestChunks:
        """Return itself."""
        return self

    async def __anext__(self) -> bytes | memoryview:
        """Return the next chunk."""
        request, check = self._request, self._check
        chunk = await request.read_within(self._deadline)
        if not chunk:
            raise StopAsyncIteration
        if check is not None:
            assert isinstance(request, GrpcRequest)
            if request.has_marked:
                await check(request)
        return chunk

    async def relay(self, steps: RelaySteps) -> None:
        """Let each chunk that needs no check pass these steps; see RelayedChunks."""
        if isinstance(self._request, GrpcRequest):  # any other might not keep what is refused
            await self._request.relay_within(self._deadline, (self._is_unmarked, *steps))

    def _is_unmarked(self, chunk: bytes | memoryview) -> bool:
        assert isinstance(self._request, GrpcRequest)
        return self._check is None or not self._request.has_marked


def _new_scanner(rpc: GrpcMethod, scanner: type[ModelScanner]) -> ModelScanner:
    if rpc.kind is not OperationKind.INFER:
        return ModelScanner(rpc.name_fields, rpc.version_field)
    return scanner(
        rpc.name_fields, rpc.version_field, fields.REQUESTED_OUTPUTS >> 3, fields.CLASSIFICATION
    )


# ------------------------------------------------------------------------ compressed messages


class MessageDecompressor:
    """Decompresses one message as it arrives; ``cap`` limits what it becomes, in bytes.

    Beyond the first MiB it may grow to ``max_ratio`` times its size. Gzip may have several members,
    as some servers read all of them. Raises GatewayError: 501 for an unknown grpc-encoding, which
    the message names.
    """

    def __init__(
        self, headers: CIMultiDictProxy[str], cap: int, cap_name: str, max_ratio: int
    ) -> None:
        encoding = headers.get(ENCODING, "identity")
        if encoding not in _ENCODINGS:
            raise GatewayError(
                ErrorKind.UNSUPPORTED,
                f"a compressed message with grpc-encoding {quote_value(encoding)}; "
                f"the gateway reads {' and '.join(_ENCODINGS)}",
            )
        self._decompressor = Decompressor(encoding, max_ratio)
        self._left = cap
        self._cap = cap
        self._cap_name = cap_name

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes that wait to be decompressed, and the memory of zlib."""
        return self._decompressor.buffered_bytes

    def feed(self, data: bytes | memoryview, *, last: bool = False) -> Iterator[bytes]:
        """Yield what the next bytes decompress to, in chunks; iterate to the end.

        ``last`` marks the end of the message. Raises GatewayError: 400 for broken data, 413 above
        the cap, or the ratio.
        """
        self._decompressor.feed(data, last=last)
        while (chunk := self._decompressor.step()) is not None:
            self._left -= len(chunk)
            if self._left < 0:
                raise GatewayError(
                    ErrorKind.TOO_LARGE,
                    f"the request has a compressed message that becomes larger than {self._cap} "
                    f"bytes ({self._cap_name})",
                )
            yield chunk


# ------------------------------------------------------------------------------- rewritten


class ModelRewriter:
    """Gives each message of a request another model, and another version unless that is empty.

    Of a field that occurs twice the last counts, so the new names are appended to a message while
    it streams: https://protobuf.dev/programming-guides/encoding/#last-one-wins
    The size precedes a message: a compressed one is buffered within the limits, and is sent
    uncompressed. ``next_slice`` waits for a time slice.
    """

    def __init__(
        self,
        method: GrpcMethod,
        model: str,
        version: str,
        headers: CIMultiDictProxy[str],
        limits: Limits,
        reservation: Reservation,
        next_slice: TimeSliceWaiter,
    ) -> None:
        self._renamed: Final = ScannedModel(model, version)
        self._model: Final = model.encode()
        number = method.version_field
        self._version: Final = (
            bytes_field(number << 3 | LENGTH, version.encode()) if number and version else b""
        )
        # The names have the same size in each field, as its number is below 16.
        self._added: Final = len(self._names(1))
        self._headers: Final = headers
        self._cap: Final = limits.max_buffered_body_bytes
        self._max_ratio: Final = limits.max_decompression_ratio
        self._reservation: Final = reservation
        self._next_slice: Final = next_slice
        # Whoever reads the request has checked the sizes.
        self._messages: Final = MessageReader(MAX_MESSAGE, "the most of protobuf", REQUEST)
        self._decompressor: MessageDecompressor | None = None
        self._text = bytearray()
        self._reserved = 0

    def rewrite(self, model: ScannedModel) -> ScannedModel:
        """Return the model that the server gets for a client's."""
        return ScannedModel(self._renamed.name, self._renamed.version or model.version)

    async def feed(self, piece: bytes | memoryview, name_field: int) -> list[bytes | memoryview]:
        """Return what to send for the next piece of the body, nothing while that is buffered.

        ``name_field`` is the number of the field that has the model's name in the message that
        ends in this piece. Other calls have their turn between the chunks of a compressed message.
        Raises GatewayError: 400 for a broken compressed message, 413, 503.
        """
        if self._decompressor is None:
            self._reserve(0)  # that message was sent
        chunks: list[bytes | memoryview] = []
        self._messages.feed(piece)
        while (part := self._messages.next_piece()) is not None:
            if part.is_compressed:
                await self._decompress(part)
                if part.ends:
                    chunks += (self._prefix(len(self._text)), memoryview(self._text))
                    self._text = bytearray()
            else:
                if part.begins:
                    chunks.append(self._prefix(part.size))
                chunks.append(part.data)
            if part.ends:
                chunks.append(self._names(name_field))
        if sum(map(len, chunks)) <= CONVERT_CHUNK:
            return [b"".join(chunks)] if chunks else []
        return [chunk for chunk in chunks if chunk]  # an empty one would end the body

    async def _decompress(self, part: MessagePiece) -> None:
        if part.begins:
            self._decompressor = MessageDecompressor(
                self._headers, self._cap, _BUFFER_CAP_NAME, self._max_ratio
            )
        decompressor, text = self._decompressor, self._text
        assert decompressor is not None
        for chunk in decompressor.feed(part.data, last=part.ends):
            self._reserve(len(text) + len(chunk) + decompressor.buffered_bytes)
            text += chunk
            await self._next_slice()
        self._reserve(len(text) + decompressor.buffered_bytes)
        if part.ends:
            self._decompressor = None

    def _reserve(self, size: int) -> None:
        """Reserve so many bytes for the message; raises GatewayError (503)."""
        self._reservation.grow(size - self._reserved)
        self._reserved = size

    def _prefix(self, size: int) -> bytes:
        size += self._added
        if size > MAX_MESSAGE:
            raise GatewayError(
                ErrorKind.TOO_LARGE,
                f"the request has a gRPC message of {size} bytes, with the model of its route",
            )
        return frame(size)

    def _names(self, name_field: int) -> bytes:
        return bytes_field(name_field << 3 | LENGTH, self._model) + self._version
