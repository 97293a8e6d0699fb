"""Builds and sends infer requests in every encoding, and reads responses in any encoding."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.codec.reference import DTYPES as CODEC_DTYPES
from tests.codec.reference import FLOATS
from tests.integration.support.client import HEADER_LENGTH, Client, Response

Array = npt.NDArray[Any]
Parameters = Mapping[str, bool | int | float | str]

DTYPES = {name: np.dtype(each) for name, each in CODEC_DTYPES.items()} | {"BYTES": np.dtype("O")}

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input: ``elements`` is flat, of bytes objects where the datatype is BYTES.

    ``data`` stands in for the JSON form, where that is not to be the elements in their shape.
    """

    name: str
    datatype: str
    elements: Array
    shape: tuple[int, ...]
    binary: bool = False
    data: Any = None

    def encoded(self) -> bytes:
        """Return the binary form."""
        return encode(self.datatype, self.elements)

    def values(self) -> Any:
        """Return the JSON form, nested as the shape is."""
        if self.datatype != "BYTES":
            return self.elements.reshape(self.shape).tolist()
        texts = np.array([element.decode() for element in self.elements], dtype=object)
        return texts.reshape(self.shape).tolist()


def tensor(
    name: str,
    datatype: str,
    values: Sequence[Any],
    shape: Sequence[int] | None = None,
    *,
    binary: bool = False,
) -> Tensor:
    """Make an input from a flat list of its elements; its shape is that of the list by default."""
    elements = np.array(values, dtype=DTYPES[datatype])
    return Tensor(name, datatype, elements, tuple(shape or [len(values)]), binary)


@dataclass(frozen=True, slots=True)
class Request:
    """An infer request.

    ``outputs`` are those listed: each name with its own ``binary_data``, None for none; ``classes``
    are those that some of them are to have. ``parameters`` are the request's own.
    ``with_length`` sends the header length even where all is JSON.
    """

    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[tuple[str, bool | None], ...] = ()
    binary_data_output: bool | None = None
    id: str | None = None
    with_length: bool = False
    classes: Mapping[str, int] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=dict)

    def wants_binary(self, output: str) -> bool:
        """Tell what the specification says of an output's form."""
        own = dict(self.outputs).get(output)
        return bool(self.binary_data_output) if own is None else own

    def encoded(self) -> tuple[bytes, dict[str, str]]:
        """Give body and headers."""
        text = json.dumps(self._header()).encode()
        tensors = [each.encoded() for each in self.inputs if each.binary]
        if not tensors and not self.with_length:
            return text, {}
        return b"".join([text, *tensors]), {HEADER_LENGTH: str(len(text))}

    def _header(self) -> dict[str, Any]:
        wanted = self.binary_data_output
        binary = {} if wanted is None else {"binary_data_output": wanted}
        members = {
            "id": self.id,
            "inputs": [self._input(each) for each in self.inputs],
            "outputs": [self._output(*each) for each in self.outputs] or None,
            "parameters": {**self.parameters, **binary} or None,
        }
        return {name: value for name, value in members.items() if value is not None}

    def _input(self, each: Tensor) -> dict[str, Any]:
        described = {"name": each.name, "shape": each.shape, "datatype": each.datatype}
        if each.binary:
            return {**described, "parameters": {"binary_data_size": len(each.encoded())}}
        return {**described, "data": each.values() if each.data is None else each.data}

    def _output(self, name: str, binary_data: bool | None) -> dict[str, Any]:
        classes = self.classes.get(name)
        parameters = {"binary_data": binary_data, "classification": classes}
        said = {name: value for name, value in parameters.items() if value is not None}
        return {"name": name, "parameters": said} if said else {"name": name}


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a response; ``data`` is its binary form."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    binary: bool = True

    @property
    def elements(self) -> Array:
        """The elements, flat."""
        return decode(self.datatype, self.data)


def read_outputs(response: Response) -> tuple[Output, ...]:
    """Read the outputs of a response; fails where the response is not what it says it is."""
    assert response.status == 200, response.body[:1000]
    fields = json.loads(response.body[: response.header_length], object_pairs_hook=_no_twins)
    binary = b"" if response.header_length is None else response.body[response.header_length :]
    outputs = []
    for entry in fields["outputs"]:
        size = (entry.get("parameters") or {}).get("binary_data_size")
        if size is None:
            data = _encode_json(entry["datatype"], entry["data"])
        else:
            assert "data" not in entry
            data, binary = binary[:size], binary[size:]
            assert len(data) == size
        output = Output(
            name=entry["name"],
            datatype=entry["datatype"],
            shape=tuple(entry["shape"]),
            binary=size is not None,
            data=data,
        )
        assert output.elements.size == int(np.prod(output.shape))
        outputs.append(output)
    assert binary == b""
    return tuple(outputs)


def encode(datatype: str, elements: Array) -> bytes:
    """Return the binary form of flat elements."""
    if datatype != "BYTES":
        return elements.tobytes()
    return b"".join(_LENGTH.pack(len(each)) + each for each in elements)


def decode(datatype: str, data: bytes) -> Array:
    """Read flat elements from their binary form."""
    if datatype != "BYTES":
        return np.frombuffer(data, DTYPES[datatype])
    elements = []
    while data:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        assert end <= len(data)
        elements.append(data[_LENGTH.size : end])
        data = data[end:]
    return np.array(elements, dtype=object)


def _no_twins(members: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(members)
    assert len(fields) == len(members)
    return fields


def _encode_json(datatype: str, values: list[Any]) -> bytes:
    kinds = {type(value) for value in values}
    if datatype == "BYTES":
        assert kinds <= {str}
        return encode(datatype, np.array([value.encode() for value in values], dtype=object))
    wanted = {bool} if datatype == "BOOL" else {float} if datatype in FLOATS else {int}
    assert kinds <= wanted
    with np.errstate(over="raise"):
        return np.array(values, dtype=DTYPES[datatype]).tobytes()


def send(client: Client, request: Request, content_type: str | None = None) -> Response:
    """Send a request as it is, with a Content-Type only where one is given."""
    body, headers = request.encoded()
    if content_type is not None:
        headers["Content-Type"] = content_type
    return client.infer(request.model, body, headers)


def in_pieces(body: bytes, size: int) -> bytes | Iterator[bytes]:
    """Return what sends a body in chunks of a size, or whole if that is 0."""
    if not size or not body:
        return body
    return iter([body[start : start + size] for start in range(0, len(body), size)])


def check_echo(outputs: tuple[Output, ...], sent: Tensor) -> None:
    """Check that an identity model's answer is what was sent, bit by bit but for NaN's own bits."""
    (output,) = outputs
    assert (output.datatype, output.shape) == (sent.datatype, sent.shape)
    if sent.datatype in FLOATS and not (sent.binary and output.binary):
        # Every datatype fits into FP64, and numpy cannot compare BF16 without a warning.
        with np.errstate(invalid="ignore"):  # raised by the cast of a signalling NaN
            values, wanted = (each.astype(np.float64) for each in (output.elements, sent.elements))
        np.testing.assert_array_equal(values, wanted)
        is_number = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(values)[is_number], np.signbit(wanted)[is_number])
    else:
        assert output.data == sent.encoded()
