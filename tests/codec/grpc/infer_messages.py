"""Infer messages of the official runtime for tests, and what the gateway must read of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import strategies as st

from gateway.codec.grpc.infer import ReadRequest, ReadResponse, read_infer_request
from tests.codec.reference import DATATYPES, DTYPES, pack_bytes
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import ModelInferRequest, ModelInferResponse

HEADER_CAP = 1 << 20

FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def raw_data(datatype: str, values: Any) -> bytes:
    """Pack elements in the plainest way."""
    if datatype == "BYTES":
        return pack_bytes(values)
    return np.array(values, DTYPES[datatype]).tobytes()


def _elements(datatype: str) -> st.SearchStrategy[Any]:
    if datatype == "BYTES":
        return st.one_of(st.binary(max_size=6), st.just(b"\xff" * 5000))
    if datatype == "BOOL":
        return st.booleans()
    if datatype in ("FP16", "BF16"):
        return st.integers(-100, 100).map(float)
    if datatype.startswith("FP"):
        return st.floats(width=32, allow_nan=False)
    limits = np.iinfo(DTYPES[datatype])
    return st.one_of(st.integers(int(limits.min), int(limits.max)), st.integers(0, 100))


_TEXT = st.text(max_size=6)


@st.composite
def _fill_parameters(draw: st.DrawFn, target: Any) -> None:
    keys = st.sampled_from(["a", "priority", "classification", "sequence_id", "é", ""])
    for key in draw(st.lists(keys, max_size=3, unique=True)):
        kind = draw(st.sampled_from(["bool", "int64", "string", "double", "uint64", "none"]))
        value: Any = {
            "bool": st.booleans(),
            "int64": st.integers(-(2**63), 2**63 - 1),
            "string": _TEXT,
            "double": st.floats(allow_nan=False),
            "uint64": st.integers(2**63, 2**64 - 1),
            "none": st.none(),
        }[kind]
        if kind == "none":
            target[key].SetInParent()
        else:
            setattr(target[key], f"{kind}_param", draw(value))


@dataclass
class Drawn:
    """A message in both forms; ``typed`` is None if a datatype travels raw only."""

    raw: Any
    typed: Any | None
    data: list[bytes]

    def in_form(self, is_raw: bool) -> Any:
        """Return one of them; that of typed contents if there is one."""
        return self.raw if is_raw or self.typed is None else self.typed


def serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def broken(drawn: st.SearchStrategy[Drawn]) -> st.SearchStrategy[bytes]:
    """Generate bytes of messages in either form that were broken in a few places."""
    whole = st.builds(lambda each, is_raw: serialized(each.in_form(is_raw)), drawn, st.booleans())
    return wire_bytes.mutated(whole)


@st.composite
def _messages(draw: st.DrawFn, make: Any, tensors: str) -> Drawn:
    raw = make(
        model_name=draw(_TEXT), model_version=draw(st.sampled_from(["", "1"])), id=draw(_TEXT)
    )
    draw(_fill_parameters(raw.parameters))
    for name in draw(st.lists(_TEXT, max_size=3)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        tensor = getattr(raw, tensors).add(
            name=name, datatype=draw(st.sampled_from(DATATYPES)), shape=shape
        )
        draw(_fill_parameters(tensor.parameters))
        if draw(st.integers(0, 9)) == 0:
            tensor.parameters["shared_memory_region"].string_param = "region"
    typed: Any = make()
    typed.CopyFrom(raw)
    data = []
    raw_contents = getattr(raw, f"raw_{tensors[:-1]}_contents")
    is_typed = True
    for tensor, with_contents in zip(getattr(raw, tensors), getattr(typed, tensors), strict=True):
        if "shared_memory_region" in tensor.parameters:
            continue
        count = int(np.prod(tensor.shape, dtype=int))
        values = draw(st.lists(_elements(tensor.datatype), min_size=count, max_size=count))
        data.append(raw_data(tensor.datatype, values))
        raw_contents.append(data[-1])
        if tensor.datatype in FIELDS and values:
            getattr(with_contents.contents, FIELDS[tensor.datatype]).extend(values)
        is_typed = is_typed and (tensor.datatype in FIELDS or not values)
    return Drawn(raw, typed if is_typed else None, data)


@st.composite
def requests(draw: st.DrawFn) -> Drawn:
    """Generate a request."""
    drawn = draw(_messages(ModelInferRequest, "inputs"))
    asked = ModelInferRequest()
    for name in draw(st.lists(_TEXT, max_size=2)):
        output = asked.outputs.add(name=name)
        draw(_fill_parameters(output.parameters))
    for message in filter(None, (drawn.raw, drawn.typed)):
        message.MergeFrom(asked)
    return drawn


def responses() -> st.SearchStrategy[Drawn]:
    """Generate a response."""
    return _messages(ModelInferResponse, "outputs")


# -------------------------------------------------------------------------- other encodings


def rewritten(data: bytes, seed: int) -> bytes:
    """Return a message with its fields in another order, which means the same."""
    rng = random.Random(seed)
    by_number: dict[int, list[bytes]] = {}
    for number, field in wire_bytes.fields_of(data):
        by_number.setdefault(number, []).append(field)
    order = [number for number, parts in by_number.items() for _ in parts]
    rng.shuffle(order)
    return b"".join(by_number[number].pop(0) for number in order)


# ------------------------------------------------------------------------------ comparison


def parameters_of(entries: Any) -> dict[str, Any]:
    """Return parameters as the hub has them."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        choice = value.WhichOneof("parameter_choice")
        found[key] = None if choice is None else getattr(value, choice)
    return found


def canonical(datatype: str, data: bytes | None) -> bytes | None:
    """Return raw data with all NaNs alike: the runtime's own Python floats change some."""
    if data is None or not datatype.startswith("FP"):
        return data
    values = np.frombuffer(data, DTYPES[datatype]).copy()
    values[np.isnan(values)] = np.nan
    return values.tobytes()


def typed_data(tensor: Any) -> bytes:
    """Return the raw data of a tensor with typed contents."""
    if tensor.datatype not in FIELDS:
        return b""
    return raw_data(tensor.datatype, list(getattr(tensor.contents, FIELDS[tensor.datatype])))


def check_tensors(found: Any, tensors: Any, data: list[bytes], raw: Any) -> None:
    """Check tensors against those of the runtime's message."""
    assert len(found) == len(tensors)
    # By our own parameters: the runtime drops those with unknown fields in their entry.
    with_data = [
        tensor
        for one, tensor in zip(found, tensors, strict=True)
        if "shared_memory_region" not in one.parameters
    ]
    expected = [*raw] or [*map(typed_data, with_data)]
    for one, other, tensor in zip(data, expected, with_data, strict=True):
        assert canonical(tensor.datatype, one) == canonical(tensor.datatype, other)
    sizes = iter(map(len, expected))
    for one, tensor in zip(found, tensors, strict=True):
        assert one.name == tensor.name
        assert one.datatype.name == tensor.datatype
        assert one.shape == tuple(tensor.shape)
        check_parameters(one.parameters, tensor, "binary_data_size")
        in_memory = "shared_memory_region" in one.parameters
        assert one.binary_size == (None if in_memory else next(sizes))


def check_parameters(found: dict[str, Any], message: Any, *of_form: str) -> None:
    """Check parameters, but those ``of_form`` that say how data travel over HTTP.

    The runtime counts odd ones as unknown fields.
    """
    if len(UnknownFieldSet(message)) == 0:
        expected = parameters_of(message.parameters)
        # NaN equals NaN.
        assert {key: repr(value) for key, value in found.items()} == {
            key: repr(value) for key, value in expected.items() if key not in of_form
        }


def check_request(found: ReadRequest, message: Any) -> None:
    """Check that a request was read as the runtime reads it."""
    head = found.request.head
    assert (found.model, found.version) == (message.model_name, message.model_version)
    assert (found.request.id or "") == message.id
    check_parameters(head.parameters, message, "binary_data_output")
    data = [b"".join(part) for part in found.request.tensors if not isinstance(part, int)]
    check_tensors(head.inputs, message.inputs, data, message.raw_input_contents)
    assert [each.name for each in head.outputs] == [each.name for each in message.outputs]
    for one, output in zip(head.outputs, message.outputs, strict=True):
        check_parameters(one.parameters, output, "binary_data")
    if message.raw_input_contents:
        assert found.is_raw


def check_response(found: ReadResponse, message: Any) -> None:
    """Check that a response was read as the runtime reads it."""
    head = found.response.head
    assert (head.model or "", head.version or "") == (message.model_name, message.model_version)
    assert (found.response.id or "") == message.id
    check_parameters(head.parameters, message)
    data = [b"".join(part) for part in found.tensors]
    check_tensors(head.outputs, message.outputs, data, message.raw_output_contents)


def read_request(data: bytes, header_cap: int = HEADER_CAP, tensor_cap: int = 100) -> ReadRequest:
    return read_infer_request(data, header_cap, tensor_cap)
