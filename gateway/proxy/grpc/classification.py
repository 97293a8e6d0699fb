"""Refuses classification of strings in calls that pass through: Triton 2.51 dies of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Final

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.observe.call_record import CallRecord
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.framing import MessagePiece, MessageReader
from gateway.protocol.grpc.model_scanner import ModelScanner
from gateway.protocol.grpc.wire import MAX_MESSAGE, WireError, WireReader
from gateway.protocol.messages import RequestFeatures
from gateway.protocol.operations import quote_name
from gateway.protocol.request_features import check_classified_outputs
from gateway.proxy.body_io import Chunks
from gateway.proxy.filters.mirror import DiscardResponse
from gateway.proxy.grpc.compression import MessageDecompressor
from gateway.proxy.infer.convert_request import model_metadata
from gateway.proxy.interfaces import Call
from gateway.upstream.metadata_cache import UpstreamResponseError

_TURN: Final = 1024
"""Fields that are scanned before other calls have their turn: about a millisecond."""
_MESSAGE_WORK: Final = 16
"""What a message costs in fields."""
_SCAN_STEP: Final = 4 * 1024
"""Bytes that are scanned at once."""

_UNKNOWN_MODEL: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)


async def check_body(call: Call, body: bytes) -> None:
    """Check the one message of a buffered body; see ``check_chunks``."""
    if body[:1] == b"\1" or fields.CLASSIFICATION in body:

        async def chunks() -> Chunks:
            yield body

        async for _ in check_chunks(call, chunks()):
            pass


async def check_chunks(call: Call, chunks: Chunks) -> Chunks:
    """Yield a body of ModelInferRequest messages, none of which wants strings to be classified.

    The end of such a message is not passed on. Raises GatewayError (400) that names the output, or
    501 if the server does not say what outputs its model has.
    """
    messages = _MessageScanner(call)
    async for chunk in chunks:
        for piece in messages.reader.feed(chunk):
            await messages.scan(piece)
        yield chunk


class _MessageScanner:
    def __init__(self, call: Call) -> None:
        self.reader = MessageReader(MAX_MESSAGE, "protobuf's limit", REQUEST)
        self._call = call
        self._scanner = _new_scanner()
        self._decompressor: MessageDecompressor | None = None
        self._work = 0

    async def scan(self, piece: MessagePiece) -> None:
        """Scan a piece of a message, and check the outputs at its end."""
        if piece.begins:
            self._work += _MESSAGE_WORK
            self._scanner = _new_scanner()
            self._decompressor = self._new_decompressor() if piece.is_compressed else None
        if self._decompressor is None:
            await self._scan(piece.data)
        else:
            for chunk in self._decompressor.feed(piece.data, last=piece.ends):
                self._work = _TURN
                await self._scan(memoryview(chunk))
        if piece.ends and self._scanner.marked:
            await self._check(self._scanner)

    async def _scan(self, data: memoryview) -> None:
        """Scan data; other calls have their turn after about a millisecond."""
        scanner = self._scanner
        while data:
            before = scanner.fields
            size = max(_SCAN_STEP, scanner.skip_size)
            scanner.feed(data[:size])
            data = data[size:]
            self._work += scanner.fields - before
            if self._work >= _TURN:
                self._work = 0
                await asyncio.sleep(0)

    def _new_decompressor(self) -> MessageDecompressor:
        limits = self._call.destination.limits
        return MessageDecompressor(
            self._call.request.headers,
            limits.max_request_bytes,
            "limits.max_request_bytes",
            limits.max_decompression_ratio,
        )

    async def _check(self, scanner: ModelScanner) -> None:
        names = _classified(scanner.marked)
        if not names:
            return
        model, version = scanner.model
        operation = replace(
            self._call.operation, model=quote_name(model), version=quote_name(version) or None
        )
        # The record of the call is that of the attempt in progress.
        response = DiscardResponse(CallRecord("", ""))
        call = replace(self._call, operation=operation, response=response)
        try:
            outputs = (await model_metadata(call)).outputs
        except UpstreamResponseError as error:
            strip_tracebacks(error)
            if error.status in _UNKNOWN_MODEL:
                return  # so it says to the call itself
            raise GatewayError(
                ErrorKind.UNSUPPORTED,
                f"classification of output '{names[0]}': the server does not say what outputs "
                f"model '{model}' has",
            ) from None
        check_classified_outputs(RequestFeatures(names), outputs, model)


def _new_scanner() -> ModelScanner:
    return ModelScanner(
        (fields.MODEL_NAME,), fields.MODEL_VERSION, fields.REQUESTED_OUTPUTS, fields.CLASSIFICATION
    )


def _classified(outputs: Sequence[bytes]) -> tuple[str, ...]:
    """Return the names of the outputs that have the parameter."""
    found: list[str] = []
    for output in outputs:
        try:
            name, is_classified = _read_output(output)
        except WireError:
            continue  # the server refuses it
        if is_classified:
            found.append(name)
    return tuple(found)


def _read_output(output: bytes) -> tuple[str, bool]:
    name, is_classified = "", False
    reader = WireReader(output)
    while tag := reader.next_tag():
        if tag == fields.REQUESTED_NAME_TAG:
            name = reader.read_text()
        elif tag == fields.REQUESTED_PARAMETERS_TAG:
            is_classified = _has_key(reader.read_view()) or is_classified
        else:
            reader.skip(tag)
    return name, is_classified


def _has_key(entry: memoryview) -> bool:
    """Tell whether an entry of a map has the parameter as its key."""
    key: bytes | memoryview = b""
    reader = WireReader(entry)
    while tag := reader.next_tag():
        if tag == fields.KEY_TAG:
            key = reader.read_view()
        else:
            reader.skip(tag)
    return key == fields.CLASSIFICATION
