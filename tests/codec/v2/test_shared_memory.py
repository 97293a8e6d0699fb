"""Requests whose tensors are in shared memory, and responses that a server leaves there."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.buffered_response import ResponsePlan, convert_body
from gateway.codec.v2.request import read_without_data
from gateway.codec.v2.shared_memory import (
    Place,
    SharedDocument,
    certain_output_sizes,
    largest_output_size,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import ALL_JSON, InferRequest
from gateway.protocol.response_header import ResponseAction
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from tests.codec import strategies

Fields = dict[str, Any]

NUMBERS = {name: datatype for name, datatype in DATATYPES.items() if datatype.size is not None}
OWN_REGION = {"shared_memory_region": "own", "shared_memory_byte_size": 8}
A, B = Place("region-a", 4096), Place("region-b", 0)


def read(fields: Fields) -> InferRequest:
    """Read a binary request whose data are still to come."""
    request = read_without_data(json.dumps(fields).encode(), 64)
    assert request is not None
    return request


def tensor(name: str, *shape: int, datatype: str = "FP32", **parameters: Any) -> Fields:
    """Return the entry of a tensor with the data that its shape needs."""
    size = int(np.prod(shape)) * (DATATYPES[datatype].size or 0)
    parameters = {"binary_data_size": size, **parameters}
    return {"name": name, "shape": list(shape), "datatype": datatype, "parameters": parameters}


def without_data(name: str, *shape: int) -> Fields:
    return {**tensor(name, *shape), "parameters": OWN_REGION}


def place(region: str, offset: int, size: int) -> Fields:
    return {
        "shared_memory_region": region,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": size,
    }


# --------------------------------------------------------------------------------- requests

SIZES = {"y": 8, "z": 16}
REQUEST: Fields = {
    "id": "42",
    "inputs": [tensor("a", 2, 3, mine=1), {**tensor("b", 4, datatype="INT8"), "note": "kept"}],
    "outputs": [{"name": "z", "parameters": {"mine": 2}, "note": "kept"}, {"name": "y"}],
    "parameters": {"priority": 3},
    "more": [1],
}


def header(
    fields: Fields,
    inputs: Place | None,
    outputs: Place | None,
    sizes: Mapping[str, int] = SIZES,
    unlisted: tuple[str, ...] = (),
) -> Any:
    tensors = SharedDocument(read(fields), [], sizes, unlisted)
    return json.loads(tensors.write_header(inputs, outputs))


@pytest.mark.parametrize("inputs", [A, None])
@pytest.mark.parametrize("outputs", [B, None])
def test_tensors_have_a_place_and_all_else_of_a_request_is_kept(
    inputs: Place | None, outputs: Place | None
) -> None:
    first = {"binary_data_size": 24} if inputs is None else place("region-a", 4096, 24)
    second = {"binary_data_size": 4} if inputs is None else place("region-a", 4120, 4)
    wanted = {"binary_data": True}
    of_y = wanted if outputs is None else place("region-b", 0, 8)
    of_z = wanted if outputs is None else place("region-b", 8, 16)
    found = header(REQUEST, inputs, outputs)
    found["outputs"].sort(key=lambda entry: entry["name"])
    assert found == {
        "id": "42",
        "inputs": [
            {**tensor("a", 2, 3), "parameters": {"mine": 1, **first}},
            {**tensor("b", 4, datatype="INT8"), "note": "kept", "parameters": second},
        ],
        "outputs": [
            {"name": "y", "parameters": of_y},
            {"name": "z", "note": "kept", "parameters": {"mine": 2, **of_z}},
        ],
        "parameters": {"priority": 3},
        "more": [1],
    }


def test_request_without_an_id_gets_none() -> None:
    fields = {"inputs": REQUEST["inputs"]}
    assert "id" not in header(fields, A, B)
    assert header({"id": "", **fields}, A, B)["id"] == ""


def test_outputs_that_the_request_does_not_list_have_a_place() -> None:
    found = header({"inputs": REQUEST["inputs"]}, None, B)
    assert found["outputs"] == [
        {"name": "y", "parameters": place("region-b", 0, 8)},
        {"name": "z", "parameters": place("region-b", 8, 16)},
    ]
    assert "parameters" not in found


@pytest.mark.parametrize("inputs", [A, None])
def test_outputs_without_a_place_come_in_binary(inputs: Place | None) -> None:
    fields = {"inputs": REQUEST["inputs"], "parameters": {"priority": 3}}
    found = header(fields, inputs, None, {})
    assert "outputs" not in found
    assert found["parameters"] == {"priority": 3, "binary_data_output": True}
    found = header(fields, inputs, None, {}, unlisted=("y", "z"))
    wanted = {"binary_data": True}
    assert found["outputs"] == [{"name": name, "parameters": wanted} for name in ("y", "z")]
    assert found["parameters"] == {"priority": 3}


def test_output_in_a_region_of_the_client_is_not_asked_for_in_binary() -> None:
    outputs = [{"name": "y", "parameters": OWN_REGION}, {"name": "z"}]
    found = header({"inputs": REQUEST["inputs"], "outputs": outputs}, A, None, {})
    assert found["outputs"] == [
        {"name": "y", "parameters": OWN_REGION},
        {"name": "z", "parameters": {"binary_data": True}},
    ]


@pytest.mark.parametrize("lacking", [without_data("b", 2), tensor("b", 0)])
def test_inputs_of_which_one_has_no_data_have_no_size(lacking: Fields) -> None:
    fields = {"inputs": [tensor("a", 2), lacking]}
    tensors = SharedDocument(read(fields), [], SIZES)
    assert (tensors.input_size, tensors.output_size) == (0, 24)
    found = json.loads(tensors.write_header(None, B))
    assert found["inputs"] == fields["inputs"]


def test_sizes_are_those_of_all_inputs_and_outputs() -> None:
    tensors = SharedDocument(read(REQUEST), [b"data"], SIZES)
    assert (tensors.input_size, tensors.output_size) == (28, 24)
    assert SharedDocument(read(REQUEST), [], {}).output_size == 0


# ----------------------------------------------------------------------------- sizes of outputs


def spec(name: str, *shape: int, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name, DATATYPES[datatype], shape)


def sizes_of(
    fields: Fields, *outputs: TensorSpec, batching: bool | None = True
) -> Mapping[str, int]:
    return certain_output_sizes(read(fields), ModelMetadata("m", (), batching, outputs))


BATCH = {"inputs": [tensor("a", 5, 2), tensor("b", 5)]}
Y, Z = {"name": "y"}, {"name": "z"}


@pytest.mark.parametrize(
    ("outputs", "sizes"),
    [
        ([spec("y", 3)], {"y": 12}),
        ([spec("y", 3, 2, datatype="FP16")], {"y": 12}),
        ([spec("y")], {"y": 4}),  # a scalar
        ([spec("y", -1, 3)], {"y": 60}),
        ([spec("y", -1)], {"y": 20}),
        ([spec("y", -1, 3), spec("z", -1, 1, datatype="INT64")], {"y": 60, "z": 40}),
        ([spec("y", -1, -1)], {}),
        ([spec("y", 3, -1)], {}),
        ([spec("y", -1, 3), spec("z", -1, -1)], {}),
        ([spec("y", -1, datatype="BYTES")], {}),
        ([spec("y", 1), spec("z", 1, datatype="BYTES")], {}),
        ([spec("y", -1, 0)], {}),
        ([spec("y", 0)], {}),
        ([], {}),
    ],
    ids=repr,
)
def test_sizes_are_certain_if_all_but_the_batch_is_declared(
    outputs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> None:
    assert sizes_of(BATCH, *outputs) == sizes


@pytest.mark.parametrize("batching", [False, None])
def test_first_dimension_of_a_model_without_batching_is_not_certain(batching: bool | None) -> None:
    assert sizes_of(BATCH, spec("y", -1, 3), batching=batching) == {}
    assert sizes_of(BATCH, spec("y", 5, 3), batching=batching) == {"y": 60}


def test_outputs_of_a_model_without_metadata_are_not_certain() -> None:
    assert certain_output_sizes(read(BATCH), None) == {}


@pytest.mark.parametrize(
    ("listed", "sizes"),
    [
        ([Z], {"z": 8}),
        ([Z, Y], {"z": 8, "y": 60}),
        ([{"name": "x"}], {}),
        ([Y, {"name": "x"}], {}),
        ([Y, Y], {}),
        ([{**Y, "parameters": {"classification": 2}}], {}),
        ([Y, {**Z, "parameters": {"classification": 2}}], {}),
        ([{**Y, "parameters": OWN_REGION}, Z], {}),
        ([{**Y, "parameters": {"binary_data": False}}], {"y": 60}),
    ],
    ids=repr,
)
def test_only_listed_outputs_count(listed: Sequence[Fields], sizes: Mapping[str, int]) -> None:
    fields = {**BATCH, "outputs": listed}
    found = sizes_of(fields, spec("y", -1, 3), spec("z", 1, datatype="FP64"))
    assert found == sizes
    assert list(found) == list(sizes)


@pytest.mark.parametrize(
    "inputs", [[], [tensor("a")], [tensor("a", 0, 2)]], ids=["none", "scalar", "empty"]
)
def test_batch_that_the_inputs_do_not_have_makes_sizes_uncertain(inputs: list[Fields]) -> None:
    assert sizes_of({"inputs": inputs}, spec("y", -1, 3)) == {}


@pytest.mark.parametrize(
    ("outputs", "size"),
    [
        ([spec("y", 3)], 12),
        ([spec("y", -1, 3)], 60),
        ([spec("y", -1, 3), spec("z", 1, datatype="FP64")], 68),
        ([spec("y", -1, 3), spec("z", -1, -1)], 60),
        ([spec("y", -1, datatype="BYTES")], 0),
        ([], 0),
    ],
    ids=repr,
)
def test_size_of_a_request_limits_that_of_its_outputs(
    outputs: Sequence[TensorSpec], size: int
) -> None:
    model = ModelMetadata("m", (spec("a", -1, 4), spec("b", -1, 2)), True, tuple(outputs))
    assert largest_output_size(model, 5 * 2 * 4 + 7) == size


_DIMS = st.sampled_from([(), (3,), (2, 2), (-1,), (-1, 3), (-1, -1), (0,)])
_NAMED = st.sampled_from(["a", "b", "c"])


@strategies.LAW
@given(
    st.dictionaries(_NAMED, st.tuples(_DIMS, st.sampled_from(sorted(DATATYPES))), max_size=3),
    st.dictionaries(_NAMED, _DIMS, min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from([True, False, None]),
)
def test_no_request_has_larger_outputs_than_its_size_allows(
    outputs: Any, inputs: Any, batch: int, batching: bool | None
) -> None:
    declared = tuple(spec(name, *dims) for name, dims in inputs.items())
    returned = tuple(spec(name, *dims, datatype=kind) for name, (dims, kind) in outputs.items())
    model = ModelMetadata("m", declared, batching, returned)
    tensors = [
        tensor(name, *(max(each, 0) or batch for each in dims)) for name, dims in inputs.items()
    ]
    request = read({"inputs": tensors})
    sizes = certain_output_sizes(request, model)
    assert sum(sizes.values()) <= largest_output_size(model, request.data_size)


# --------------------------------------------------------------------------------- responses


def response(*outputs: Fields, **more: Any) -> bytes:
    return json.dumps(
        {"model_name": "m", "model_version": "1", "outputs": outputs, **more}
    ).encode()


def shared(name: str, *shape: int, datatype: str = "FP32", **more: Any) -> Fields:
    """Return an output as Triton writes it whose data are in shared memory."""
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


MEMORY = b"yyyyYYYY" + b"zzzzZZZZ" * 2 + b"another call's"
TENSORS = SharedDocument(read(REQUEST), [], SIZES)


def read_response(document: bytes) -> tuple[Any, list[bytes]]:
    found, data = TENSORS.read_response(document, memoryview(MEMORY))
    return json.loads(found), [bytes(each) for each in data]


@pytest.mark.parametrize(
    ("outputs", "data"),
    [
        ((shared("y", 2), shared("z", 4)), [MEMORY[:8], MEMORY[8:24]]),
        ((shared("z", 4), shared("y", 2)), [MEMORY[8:24], MEMORY[:8]]),
        # The shape and the datatype are the server's, if they fit into the place.
        (
            (shared("y", 1, 8, datatype="INT8"), shared("z", 2, 2)),
            [MEMORY[:8], MEMORY[8:24]],
        ),
        # The model may be another than that of the metadata.
        ((shared("y", 1), shared("z", 0)), [MEMORY[:4], b""]),
    ],
)
def test_response_has_the_binary_form(outputs: tuple[Fields, ...], data: list[bytes]) -> None:
    fields, found = read_response(response(*outputs, id="42", parameters={"p": 1}, more=[2]))
    assert found == data
    sizes = [{"parameters": {"binary_data_size": len(each)}} for each in data]
    assert fields == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [{**output, **size} for output, size in zip(outputs, sizes, strict=True)],
        "id": "42",
        "parameters": {"p": 1},
        "more": [2],
    }


def test_parameters_of_outputs_are_kept_but_for_the_place() -> None:
    parameters = {**place("region-b", 0, 8), "confidence": 0.5}
    fields, _ = read_response(response(shared("y", 2, parameters=parameters), shared("z", 4)))
    assert fields["outputs"][0]["parameters"] == {"confidence": 0.5, "binary_data_size": 8}


NOT_AS_REQUESTED = "the server's response does not have the requested outputs"


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (response(), NOT_AS_REQUESTED),
        (b"{}", NOT_AS_REQUESTED),
        (response(shared("y", 2)), NOT_AS_REQUESTED),
        (response(shared("y", 2), shared("x", 4)), NOT_AS_REQUESTED),
        (response(shared("y", 2), shared("y", 2)), NOT_AS_REQUESTED),
        (response(shared("y", 2), shared("y", 2), shared("z", 4)), NOT_AS_REQUESTED),
        (response(shared("y", 2), shared("z", 4), shared("x", 1)), NOT_AS_REQUESTED),
        (response(shared("y", 3), shared("z", 4)), "output 'y'"),
        (response(shared("y", 2), shared("z", 5)), "output 'z'"),
        (response(shared("y", 2), shared("z", 2**62, 2**62)), "output 'z'"),
        (response(shared("y", 1, datatype="BYTES"), shared("z", 4)), "output 'y'"),
        (response(shared("y", 2, datatype="FP31"), shared("z", 4)), "output 'y'.*FP31"),
        (response(shared("y", -2), shared("z", 4)), "output 'y'"),
        (response(shared("y", 2), {"name": "z", "shape": [4]}), "output 'z'.*datatype"),
        (response(shared("y", 2, data=[1, 2]), shared("z", 4)), "output 'y'"),
        (response(tensor("y", 2), shared("z", 4)), "output 'y'"),
        (b'{"outputs":{}}', "outputs"),
        (b'{"outputs":[', "JSON"),
        (b"", "JSON"),
        (b"[]", "JSON"),
    ],
    ids=repr,
)
def test_response_of_other_outputs_is_invalid(document: bytes, told: str) -> None:
    with pytest.raises(GatewayError, match=told) as caught:
        read_response(document)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE


# ------------------------------------------------------------------------------- there and back


@dataclass(frozen=True)
class Array:
    """A tensor with its values."""

    name: str
    datatype: str
    values: Any

    @property
    def fields(self) -> Fields:
        return tensor(self.name, *self.values.shape, datatype=self.datatype)


@st.composite
def arrays(draw: st.DrawFn, name: str) -> Array:
    datatype = draw(st.sampled_from(sorted(NUMBERS.keys() - {"BF16"})))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    rng = np.random.default_rng(draw(strategies.SEEDS))
    return Array(name, datatype, rng.integers(0, 2, shape).astype(NUMBERS[datatype].dtype))


def several(names: str) -> st.SearchStrategy[tuple[Array, ...]]:
    return st.integers(1, len(names)).flatmap(lambda n: st.tuples(*map(arrays, names[:n])))


class ToyServer:
    """Reads inputs and writes outputs where the parameters of a request say."""

    def __init__(self, region: str, size: int) -> None:
        self.region = region
        self.memory = bytearray(size)
        self.inputs: list[bytes] = []

    def infer(self, document: bytes, body: bytes, outputs: Sequence[Array]) -> bytes:
        """Respond with these outputs, in this order; ``body`` is what follows the JSON."""
        request = json.loads(document)
        for entry in request["inputs"]:
            size = entry["parameters"].get("binary_data_size")
            if size is None:
                self.inputs.append(bytes(self._place(entry)))
            else:
                self.inputs.append(body[:size])
                body = body[size:]
        assert not body
        places = {entry["name"]: self._place(entry) for entry in request["outputs"]}
        assert places.keys() == {output.name for output in outputs}
        for output in outputs:
            places[output.name][:] = output.values.tobytes()
        return response(
            *(shared(each.name, *each.values.shape, datatype=each.datatype) for each in outputs)
        )

    def _place(self, entry: Fields) -> memoryview:
        parameters = entry["parameters"]
        assert parameters["shared_memory_region"] == self.region
        start = parameters["shared_memory_offset"]
        end = start + parameters["shared_memory_byte_size"]
        assert end <= len(self.memory)
        return memoryview(self.memory)[start:end]


@strategies.LAW
@given(several("abc"), several("xyz"), st.booleans(), st.booleans(), strategies.SEEDS)
def test_tensors_arrive_as_they_were_sent(
    inputs: tuple[Array, ...],
    outputs: tuple[Array, ...],
    share_inputs: bool,
    list_outputs: bool,
    seed: int,
) -> None:
    fields: Fields = {"inputs": [each.fields for each in inputs]}
    rng = random.Random(seed)
    if list_outputs:
        listed = rng.sample([{"name": each.name} for each in outputs], len(outputs))
        fields["outputs"] = listed
    request = read(fields)
    model = ModelMetadata(
        "m",
        (),
        False,
        tuple(spec(x.name, *x.values.shape, datatype=x.datatype) for x in outputs),
    )
    sizes = certain_output_sizes(request, model)
    data = [each.values.tobytes() for each in inputs]
    tensors = SharedDocument(request, data, sizes)
    assert tensors.input_size == sum(map(len, data))

    start = rng.randrange(3) * 4096
    end = start + tensors.input_size + rng.randrange(3)
    server = ToyServer("region", end + tensors.output_size)
    if share_inputs:
        server.memory[start : start + tensors.input_size] = b"".join(data)
    document = tensors.write_header(
        Place("region", start) if share_inputs else None, Place("region", end)
    )
    written = server.infer(
        document, b"" if share_inputs else b"".join(data), rng.sample(outputs, len(outputs))
    )
    assert server.inputs == data

    memory = memoryview(server.memory)[end : end + tensors.output_size]
    head, parts = tensors.read_response(written, memory)
    plan = ResponsePlan(
        ResponseAction.WRITE_JSON, len(head), ALL_JSON, JsonPolicies(), 1 << 20, 1 << 20
    )
    converted = convert_body(b"".join((head, *parts)), plan)
    assert converted is not None
    found = {each["name"]: each for each in json.loads(converted.body)["outputs"]}
    for output in outputs:
        assert found[output.name]["datatype"] == output.datatype
        assert found[output.name]["shape"] == list(output.values.shape)
        assert found[output.name]["data"] == output.values.ravel().tolist()
