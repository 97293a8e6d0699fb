"""Keeps messages that pass from naming the regions of the gateway's own shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gateway.codec.grpc.infer_message import read_requested_output
from gateway.errors import bad_request
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.model_scanner import ModelScanner
from gateway.protocol.grpc.wire import Buffer, WireError, WireReader, bytes_field
from gateway.protocol.request_features import region_error
from gateway.system.shared_memory import PREFIX

MARK: Final = PREFIX.encode()
"""What a message has that names such a region."""

_TENSORS: Final = {
    fields.TENSORS: ("input", fields.TENSOR_PARAMETERS >> 3),
    fields.REQUESTED_OUTPUTS: ("output", fields.REQUESTED_PARAMETERS >> 3),
}
"""What a field has, and the field of its parameters."""


class RegionGuard(ModelScanner):
    """Scans infer requests as ModelScanner does, and the parameters of their tensors, too.

    Raises GatewayError (400) that names a tensor and its region if that is the gateway's own.
    """

    _tensor: _TensorScanner | None = None

    @property
    def free_size(self) -> int:
        """How many of the next bytes cost nothing to scan."""
        return self.skip_size if self._tensor is None else self._tensor.skip_size

    def _scan(self, piece: Buffer) -> None:
        if self._tensor is not None:
            left = self.skip_size - len(piece)
            self._scan_tensor(self._tensor, piece[: self.skip_size], left)
        super()._scan(piece)

    def _read_value(self, reader: WireReader, tag: int) -> None:
        start = reader.position
        super()._read_value(reader, tag)
        if tag in _TENSORS:
            value = WireReader(reader.data, start)
            value.read_varint()
            data = memoryview(reader.data)[value.position : reader.position]
            self._scan_tensor(_TensorScanner(*_TENSORS[tag]), data, self.skip_size)

    def _scan_tensor(self, tensor: _TensorScanner, data: Buffer, left: int) -> None:
        """Scan the next bytes of a tensor, of which some may be left."""
        before = tensor.fields
        tensor.feed(data)
        self.fields += tensor.fields - before
        self._tensor = tensor if left > 0 else None
        if left <= 0:
            tensor.end()
            tensor.check()


class _TensorScanner(ModelScanner):
    """Scans a tensor whose bytes may be cut anywhere; its data are not kept."""

    def __init__(self, what: str, parameters_field: int) -> None:
        super().__init__((fields.TENSOR_NAME >> 3,), None, parameters_field, MARK)
        self._what: Final = what

    def check(self) -> None:
        """Raise GatewayError (400) if it names a region of the gateway's own."""
        if self.marked_error is not None:
            raise self.marked_error
        entries = [bytes_field(fields.REQUESTED_PARAMETERS, each) for each in self.marked]
        try:
            read = read_requested_output(WireReader(b"".join(entries)))
        except WireError as invalid:
            raise REQUEST.invalid_protobuf(invalid) from None
        if error := region_error(self._what, [replace(read, name=self.model.name)], PREFIX):
            raise bad_request(error)

    def _label(self, field: int) -> str:
        return f"the name of an {self._what}"
