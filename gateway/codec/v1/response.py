"""Writes infer responses as V1 predict responses."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import orjson

from gateway.codec.elements.encode import OffloadedText, TextChunk
from gateway.codec.offload_interface import Offloader
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.codec.v1.nested_writer import (
    BracketWriter,
    BytesElementEncoder,
    NestedEncoder,
    NestedNumberEncoder,
    check_rank,
    empty_arrays,
    nested_encoder,
)
from gateway.codec.v2.json_writer import TensorPiece
from gateway.codec.v2.response import ResponseConverter
from gateway.codec.v2.response_reader import InferResponseReader
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.error_vocabulary import Tensor
from gateway.protocol.messages import InferResponse
from gateway.protocol.tensors import element_count
from gateway.protocol.v1 import V1Format, V1ResponseLayout, is_base64_output
from gateway.sizes import ENCODE_CHUNK

_OUTPUT_OVERHEAD = 250
"""Bytes of memory of a buffered output beside its rows."""
_MAX_ROWS = 1024
"""The most rows encoded at a time."""


class PredictResponseWriter:
    """Writes a response for a V1 client while its data arrive; it is a ResponseWriter.

    Rows of several outputs are the only data buffered, up to ``body_cap`` bytes: each row needs a
    part of every output.
    """

    def __init__(
        self,
        response: InferResponse,
        layout: V1ResponseLayout,
        policies: JsonPolicies,
        body_cap: int,
    ) -> None:
        self._outputs = response.head.outputs
        self._layout = layout
        self._policies = policies
        self._body_cap = body_cap
        self._shapes: list[tuple[int, ...]] = []
        self._rows: list[RowBuffer] | None = None
        self._buffered_rows_size = 0
        """Bytes of all buffered rows, so that they are not summed up for each piece."""
        self._writer: NestedEncoder | None = None

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes buffered."""
        return self._buffered_rows_size + _OUTPUT_OVERHEAD * len(self._shapes)

    def start(self) -> Iterator[bytes]:
        """Yield the text before the first output.

        Raises GatewayError: 502 for an invalid response, 406 for one that V1 cannot express.
        """
        outputs = self._outputs
        self._shapes = list(map(self._client_shape, outputs))
        if not outputs:
            raise bad_response("the server's response has no outputs")
        names = Counter(output.name for output in outputs)
        name, count = names.most_common(1)[0]
        if count > 1:  # which an object cannot have
            raise bad_response(f"the server's response has two outputs named '{name}'")
        if self._layout.form is V1Format.ROWS and len(outputs) > 1:
            _check_rows(outputs, self._shapes)
            self._rows = list(map(self._make_row_buffer, outputs, self._shapes))
        yield b'{"' + self._layout.form.response_key.encode() + b'":'
        if self._is_object:
            yield b"{"

    def finish(self) -> Iterator[bytes]:
        """Yield the remaining text in pieces; raises GatewayError as ``encode`` does."""
        if self._rows is not None:
            for rows in self._rows:
                rows.end()
            names = [output.name for output in self._outputs]
            yield from write_rows(names, self._rows, self._shapes[0][0])
        yield b"}}" if self._is_object else b"}"

    @property
    def _is_object(self) -> bool:
        """Tell whether the response is an object with a member for each output."""
        return self._layout.form is V1Format.COLUMNS and len(self._outputs) > 1

    def _client_shape(self, output: Tensor) -> tuple[int, ...]:
        """Return the shape as the client sees it."""
        label = f"output '{output.name}'"
        if output.binary_size is None:
            raise bad_response(
                f"{label} of the server's response is not in binary form, as requested"
            )
        shape = (1, *output.shape) if self._layout.single else output.shape
        check_rank(label, shape)
        if not shape and self._layout.form is V1Format.ROWS:
            raise GatewayError(
                ErrorKind.NOT_ACCEPTABLE,
                f"{label} has shape [], which has no rows; "
                "send the request with inputs instead of instances",
            )
        return shape

    def encode(
        self, piece: TensorPiece, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the next piece, all of it encoded here.

        Raises GatewayError: 502 for an invalid response or one over the cap, 406 for one that a
        policy refuses.
        """
        if self._rows is not None:
            rows = self._rows[piece.index]
            before = rows.buffered_bytes
            rows.append(piece.data)
            self._buffered_rows_size += rows.buffered_bytes - before
            if self._buffered_rows_size > self._body_cap:
                raise bad_response(
                    f"a response of rows of several outputs must be buffered, and exceeds "
                    f"{self._body_cap} bytes (limits.max_buffered_body_bytes); "
                    "send the request with inputs instead of instances"
                )
            return
        if self._writer is None:
            output, shape = self._outputs[piece.index], self._shapes[piece.index]
            label, nonfinite = f"output '{output.name}'", self._policies.nonfinite
            self._writer = nested_encoder(label, output, shape, nonfinite, self._as_base64(output))
            if self._is_object:
                yield (b"," if piece.index else b"") + orjson.dumps(output.name) + b":"
        yield self._writer.feed(piece.data)
        if piece.last:
            yield self._writer.end()
            self._writer = None

    def _make_row_buffer(self, output: Tensor, shape: tuple[int, ...]) -> RowBuffer:
        label = f"output '{output.name}'"
        if output.datatype.family is Family.TEXT:
            return BytesRowBuffer(label, shape, self._as_base64(output))
        return NumberRowBuffer(label, output.datatype, shape, self._policies.nonfinite)

    def _as_base64(self, output: Tensor) -> bool:
        return is_base64_output(output) or self._policies.bytes_encoding is BytesEncoding.BASE64


def predict_converter(
    header_size: int | None,
    layout: V1ResponseLayout,
    policies: JsonPolicies,
    header_cap: int,
    body_cap: int,
) -> ResponseConverter:
    """Make the converter of a response for a V1 client; see InferResponseReader."""
    return ResponseConverter(
        InferResponseReader(header_size, header_cap, body_cap),
        lambda response: PredictResponseWriter(response, layout, policies, body_cap),
    )


def _check_rows(outputs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    for output, shape in zip(outputs, shapes, strict=True):
        if shape[0] != shapes[0][0]:
            raise GatewayError(
                ErrorKind.NOT_ACCEPTABLE,
                f"output '{outputs[0].name}' has {shapes[0][0]} rows and output '{output.name}' "
                f"{shape[0]}, which have no rows in common; "
                "send the request with inputs instead of instances",
            )


class NumberRowBuffer:
    """Buffers numbers and booleans in binary form."""

    def __init__(
        self, label: str, datatype: Datatype, shape: tuple[int, ...], nonfinite: Nonfinite
    ) -> None:
        self._label = label
        self._datatype = datatype
        self._count, self._shape = shape[0], shape[1:]
        self._nonfinite = nonfinite
        self._data = bytearray()
        self.row_size = element_count(self._shape) * (datatype.size or 1)

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes buffered."""
        return len(self._data)

    def append(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._data += data

    def end(self) -> None:
        """Check rows without elements; the sizes of others were checked with the header."""
        if not self.row_size:
            empty_arrays(self._label, (self._count, *self._shape))

    def texts(self, first: int, last: int) -> list[bytes]:
        """Return the text of rows."""
        if not self.row_size:
            return [empty_arrays(self._label, self._shape)] * (last - first)
        writer = self._writer((last - first, *self._shape), first)
        data = memoryview(self._data)[first * self.row_size : last * self.row_size]
        text = (writer.feed(data) + writer.end())[1:-1]
        # This separates two rows, and occurs nowhere within one.
        depth = len(self._shape)
        opening, closing = b"[" * depth, b"]" * depth
        inner = text[depth : len(text) - depth].split(closing + b"," + opening)
        return [b"".join((opening, row, closing)) for row in inner]

    def row(self, number: int) -> Iterator[bytes]:
        """Yield the text of one row."""
        writer = self._writer(self._shape, number)
        end = (number + 1) * self.row_size
        for start in range(number * self.row_size, end, ENCODE_CHUNK):
            yield writer.feed(memoryview(self._data)[start : min(start + ENCODE_CHUNK, end)])
        yield writer.end()

    def _writer(self, shape: tuple[int, ...], row: int) -> NestedNumberEncoder:
        """Make the encoder of rows from ``row`` on."""
        before = row * element_count(self._shape)
        return NestedNumberEncoder(self._label, self._datatype, shape, self._nonfinite, before)


class BytesRowBuffer(BytesElementEncoder):
    """Buffers BYTES as text, as the sizes of rows are not known in advance."""

    def __init__(self, label: str, shape: tuple[int, ...], as_base64: bool) -> None:
        super().__init__(label, shape, as_base64)
        self._text = bytearray()
        self._starts = array("Q")
        self._in_row = element_count(shape[1:])
        self._brackets = BracketWriter(shape[1:])

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes buffered."""
        return len(self._text) + self._starts.itemsize * len(self._starts)

    @property
    def row_size(self) -> int:
        """Return the average size of a row in bytes."""
        return len(self._text) // max(1, len(self._starts))

    def append(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        for piece in self.pieces(data):
            self._text += piece

    def end(self) -> None:
        """Check that all elements have come."""
        self.check_ended()
        if not self._in_row:
            empty_arrays(self._label, self._shape)
        self._text += self._brackets.end()

    def texts(self, first: int, last: int) -> list[bytes]:
        """Return the text of rows."""
        return [b"".join(self.row(number)) for number in range(first, last)]

    def row(self, number: int) -> Iterator[bytes]:
        """Yield the text of one row."""
        if not self._in_row:
            yield empty_arrays(self._label, self._shape[1:])
            return
        behind = number + 1
        end = self._starts[behind] if behind < len(self._starts) else len(self._text)
        for start in range(self._starts[number], end, ENCODE_CHUNK):
            yield bytes(self._text[start : min(start + ENCODE_CHUNK, end)])

    def _lead(self) -> bytes:
        index = self.count % self._in_row
        if index:
            return self._brackets.lead(index, self._brackets.rank)
        # The closing brackets belong to the row before.
        self._text += self._brackets.end()
        self._starts.append(len(self._text))
        return self._brackets.lead(0, self._brackets.rank)


RowBuffer = NumberRowBuffer | BytesRowBuffer
"""Buffers a tensor until its rows are written: ``texts`` of small ones, large ones in pieces."""


def write_rows(names: Sequence[str], tensors: Sequence[RowBuffer], count: int) -> Iterator[bytes]:
    """Yield the rows of tensors as an array of objects, in pieces."""
    keys = [
        (b"," if number else b"{") + orjson.dumps(name) + b":" for number, name in enumerate(names)
    ]
    largest = max(tensor.row_size for tensor in tensors)
    step = min(_MAX_ROWS, ENCODE_CHUNK // max(1, largest))
    yield b"["
    for first in range(0, count, max(1, step)):
        if first:
            yield b","
        if step > 1:
            yield _join_rows(keys, tensors, first, min(first + step, count))
            continue
        for key, tensor in zip(keys, tensors, strict=True):
            yield key
            yield from tensor.row(first)
        yield b"}"
    yield b"]"


def _join_rows(keys: Sequence[bytes], tensors: Sequence[RowBuffer], first: int, last: int) -> bytes:
    columns = [tensor.texts(first, last) for tensor in tensors]
    rows = []
    for row in zip(*columns, strict=True):
        parts = [part for pair in zip(keys, row, strict=True) for part in pair]
        rows.append(b"".join((*parts, b"}")))
    return b",".join(rows)
