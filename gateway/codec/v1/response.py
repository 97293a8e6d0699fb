"""Upstream form → V1 form: a binary answer turned into the JSON of a V1 client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import orjson

from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v1.nested_writer import (
    EmptyTensorEncoder,
    NestedBytesEncoder,
    NestedEncoder,
    NestedNumberEncoder,
    check_rank,
)
from gateway.codec.v1.response_rows import BytesRowBuffer, NumberRowBuffer, RowBuffer, write_rows
from gateway.codec.v2.json_writer import TensorPiece
from gateway.codec.v2.response import response_reader
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import Tensor
from gateway.protocol.tensors import element_count
from gateway.protocol.v1 import V1Format, V1ResponseLayout, is_base64_output

_OF_OUTPUT = 250
"""Bytes of memory that the rows of an output take beside their own."""


class PredictResponseConverter:
    """Writes an answer as the V1 client wants it, while it arrives.

    ``header_size`` is that of the JSON before the tensors, in bytes. Only rows of several outputs
    are held, of each of which a row needs a part: up to ``spool_cap`` bytes.
    """

    def __init__(
        self, header_size: int, predicted: V1ResponseLayout, policies: JsonPolicies, spool_cap: int
    ) -> None:
        self._reader = response_reader(header_size)
        self._predicted = predicted
        self._policies = policies
        self._spool_cap = spool_cap
        self._shapes: list[tuple[int, ...]] | None = None
        self._rows: list[RowBuffer] | None = None
        self._rows_size = 0
        """Bytes that all rows hold: they are not summed up anew for each piece."""
        self._writer: NestedEncoder | None = None

    @property
    def held(self) -> int:
        """Give the bytes of memory that are held: all but what passes through."""
        return self._reader.held + self._rows_size + _OF_OUTPUT * len(self._shapes or ())

    def feed(self, data: bytes | memoryview) -> bytes:
        """Give the text that the data brings.

        Raises GatewayError: 502 for a broken answer or one over the cap, 406 for what V1 cannot
        say in this form, or a policy refuses.
        """
        parts: list[bytes] = []
        for piece in self._reader.feed(data):
            parts += self._begin()
            parts += self._take(piece)
        if self._reader.fields is not None:
            parts += self._begin()
        return b"".join(parts)

    def finish(self) -> Iterator[bytes]:
        """Yield the text that is left, piece by piece; raises GatewayError as ``feed`` does."""
        self._reader.finish()
        if self._rows is not None:
            for rows in self._rows:
                rows.end()
            names = [output.name for output in self._reader.tensors]
            count = (self._shapes or [()])[0][0]
            yield from write_rows(names, self._rows, count)
        yield b"}}" if self._is_object else b"}"

    @property
    def _is_object(self) -> bool:
        """Tell whether outputs are named, each as a whole."""
        return self._predicted.form is V1Format.COLUMNS and len(self._reader.tensors) > 1

    def _begin(self) -> Iterator[bytes]:
        """Give what comes before the first output, once."""
        if self._shapes is not None:
            return
        outputs = self._reader.tensors
        self._shapes = [self._shape(output) for output in outputs]
        if not outputs:
            raise bad_response("the server's answer has no outputs")
        _check_names(outputs)
        if self._predicted.form is V1Format.ROWS and len(outputs) > 1:
            _check_rows(outputs, self._shapes)
            self._rows = list(map(self._held_rows, outputs, self._shapes))
        yield b'{"' + self._predicted.form.response_key.encode() + b'":'
        if self._is_object:
            yield b"{"

    def _shape(self, output: Tensor) -> tuple[int, ...]:
        """Give the shape that the client sees."""
        label = f"output '{output.name}'"
        if output.binary_size is None:
            raise bad_response(
                f"{label} of the server's answer is not in binary form, as was asked"
            )
        shape = (1, *output.shape) if self._predicted.single else output.shape
        check_rank(label, shape)
        if not shape and self._predicted.form is V1Format.ROWS:
            raise GatewayError(
                ErrorKind.NOT_ACCEPTABLE,
                f"{label} has shape [], of which there are no rows; "
                "send the request with inputs instead of instances",
            )
        return shape

    def _take(self, piece: TensorPiece) -> Iterator[bytes]:
        if self._rows is not None:
            rows = self._rows[piece.index]
            before = rows.held
            rows.feed(piece.data)
            self._rows_size += rows.held - before
            if self._rows_size > self._spool_cap:
                raise bad_response(
                    f"an answer of rows of several outputs is held, and is larger than "
                    f"{self._spool_cap} bytes (limits.spool_bytes); "
                    "send the request with inputs instead of instances"
                )
            return
        if self._writer is None:
            self._writer = self._nested(piece.index)
            if self._is_object:
                name = orjson.dumps(self._reader.tensors[piece.index].name)
                yield (b"," if piece.index else b"") + name + b":"
        yield self._writer.feed(piece.data)
        if piece.last:
            yield self._writer.end()
            self._writer = None

    def _nested(self, index: int) -> NestedEncoder:
        output, shape = self._reader.tensors[index], (self._shapes or [])[index]
        label = f"output '{output.name}'"
        if not element_count(shape):
            return EmptyTensorEncoder(label, shape)
        if output.datatype.family is Family.TEXT:
            return NestedBytesEncoder(label, shape, self._as_base64(output))
        return NestedNumberEncoder(label, output.datatype, shape, self._policies.nonfinite)

    def _held_rows(self, output: Tensor, shape: tuple[int, ...]) -> RowBuffer:
        label = f"output '{output.name}'"
        if output.datatype.family is Family.TEXT:
            return BytesRowBuffer(label, shape, self._as_base64(output))
        return NumberRowBuffer(label, output.datatype, shape, self._policies.nonfinite)

    def _as_base64(self, output: Tensor) -> bool:
        return is_base64_output(output) or self._policies.bytes_encoding is BytesEncoding.BASE64


def _check_names(outputs: Sequence[Tensor]) -> None:
    """Raise GatewayError (502) where a name would be that of two members of an object."""
    seen = set[str]()
    for output in outputs:
        if output.name in seen:
            raise bad_response(f"the server's answer has two outputs of the name '{output.name}'")
        seen.add(output.name)


def _check_rows(outputs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    for output, shape in zip(outputs, shapes, strict=True):
        if shape[0] != shapes[0][0]:
            raise GatewayError(
                ErrorKind.NOT_ACCEPTABLE,
                f"output '{outputs[0].name}' has {shapes[0][0]} rows and output '{output.name}' "
                f"{shape[0]}, which make up no common rows; "
                "send the request with inputs instead of instances",
            )
