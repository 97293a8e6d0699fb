"""Requests whose tensors a server finds in shared memory, and responses that it leaves there.

The extension of Triton: ``extension_shared_memory.md``. Over HTTP the server gets and returns the
JSON alone; the rest of the gateway sees the binary form. codec/grpc/shared_memory.py has gRPC's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import orjson

from gateway.codec.v2.binary_request import input_fields, output_fields, write_binary_header
from gateway.codec.v2.json_writer import tensor_fields
from gateway.errors import GatewayError, bad_response
from gateway.protocol.messages import Fields, InferRequest, RequestedOutput
from gateway.protocol.response_header import parse_response_header, read_outputs
from gateway.protocol.tensors import ModelMetadata, TensorSpec, element_count

RequestData = Sequence[bytes | memoryview] | AsyncIterator[bytes | memoryview]

_PARAMETERS: Final = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors are, one after another: the name of a region, and the first byte in it."""

    region: str
    offset: int

    def parameters(self, sizes: Collection[int]) -> Iterator[Fields]:
        """Yield the parameters of the tensors there, which have these sizes."""
        for start, size in _ranges(sizes):
            values = self.region, self.offset + start, size
            yield dict(zip(_PARAMETERS, values, strict=True))


def _ranges(sizes: Collection[int]) -> Iterator[tuple[int, int]]:
    """Return where each of some tensors begins that are one after another, and its size."""
    return zip(accumulate(sizes, initial=0), sizes, strict=False)


class SharedTensors:
    """The tensors of an infer request, which may go to the server through shared memory.

    ``data`` are those of all inputs, in order. ``output_sizes`` are the bytes of each output that
    the server will return, by name; empty if one of them is not certain. Subclasses write requests.
    """

    def __init__(
        self, request: InferRequest, data: RequestData, output_sizes: Mapping[str, int]
    ) -> None:
        self.data = data
        self.output_sizes: Final = output_sizes
        self._request: Final = request
        self._sizes: Final = [each.binary_size or 0 for each in request.head.inputs]
        # One that has no data, or has it in a region of the client, does without another.
        self.input_size: Final = request.data_size if all(self._sizes) else 0
        """Bytes of all inputs; 0 if they cannot be in shared memory."""
        self.output_size: Final = sum(output_sizes.values())
        """Bytes of all outputs; 0 if they cannot be in shared memory."""

    def start_in(self, memory: memoryview) -> int | None:
        """Return where the inputs begin in the memory that has the whole request, in its form.

        None if they are not at its end, one after another.
        """
        data, request = self.data, self._request
        if isinstance(data, Sequence):
            is_there = all(isinstance(x, memoryview) and x.obj is memory.obj for x in data)
        else:
            is_there = request.missing_size == request.data_size
        return len(memory) - self.input_size if is_there else None

    def _split_outputs(self, memory: memoryview) -> dict[str, memoryview]:
        """Return the place of each output in the memory of all."""
        ranges = _ranges(self.output_sizes.values())
        places = [memory[start : start + size] for start, size in ranges]
        return dict(zip(self.output_sizes, places, strict=True))


class SharedDocument(SharedTensors):
    """The tensors of a request whose server gets JSON, or the binary form.

    ``unlisted`` as in ``write_binary_header``.
    """

    def __init__(
        self,
        request: InferRequest,
        data: RequestData,
        output_sizes: Mapping[str, int],
        unlisted: tuple[str, ...] = (),
    ) -> None:
        super().__init__(request, data, output_sizes)
        self._unlisted: Final = unlisted
        self._outputs: Final = request.head.outputs or tuple(map(RequestedOutput, unlisted))

    @property
    def binary_header(self) -> bytes:
        """The JSON of the request in the binary form."""
        return write_binary_header(self._request, self._unlisted)

    def write_header(self, inputs: Place | None, outputs: Place | None) -> bytes:
        """Write the JSON of the request; tensors without a place are in the body, in binary."""
        head = self._request.head
        fields: Fields = {} if self._request.id is None else {"id": self._request.id}
        if inputs is None:
            fields["inputs"] = list(map(input_fields, head.inputs))
        else:
            places = zip(head.inputs, inputs.parameters(self._sizes), strict=True)
            fields["inputs"] = [
                tensor_fields(tensor, {**tensor.parameters, **shared}) for tensor, shared in places
            ]
        parameters = head.parameters
        if outputs is not None:
            fields["outputs"] = self._write_outputs(outputs)
        elif self._outputs:
            fields["outputs"] = list(map(output_fields, self._outputs))
        else:
            parameters = {**parameters, "binary_data_output": True}
        if parameters:
            fields["parameters"] = parameters
        return orjson.dumps({**fields, **head.extra})

    def _write_outputs(self, place: Place) -> list[Fields]:
        listed = {each.name: each for each in self._outputs}
        entries, sizes = [], self.output_sizes
        for name, shared in zip(sizes, place.parameters(sizes.values()), strict=True):
            output = listed.get(name) or RequestedOutput(name)
            entries.append(
                {"name": name, **output.extra, "parameters": {**output.parameters, **shared}}
            )
        return entries

    def read_response(self, document: bytes, memory: memoryview) -> tuple[bytes, list[memoryview]]:
        """Return a response as it is in the binary form: its header, and the data that follow.

        ``memory`` is where the outputs are. Raises GatewayError (502) for a response that does not
        have the outputs that were asked for; each may be smaller than its place.
        """
        places = self._split_outputs(memory)
        fields = parse_response_header(document)
        outputs = read_outputs(fields)
        check_output_names([output.name for output in outputs], places)
        data = []
        for output, entry in zip(outputs, fields["outputs"], strict=True):
            has_place = output.datatype.size and "data" not in entry and not output.binary_size
            size = element_count(output.shape) * (output.datatype.size or 0)
            place = places[output.name]
            if not has_place or size > len(place):
                raise not_in_place(output.name)
            kept = {k: v for k, v in output.parameters.items() if k not in _PARAMETERS}
            entry["parameters"] = {**kept, "binary_data_size": size}
            data.append(place[:size])
        return orjson.dumps(fields), data


def check_output_names(names: Sequence[str], requested: Collection[str]) -> None:
    """Refuse a response of other outputs; raises GatewayError (502)."""
    if sorted(names) != sorted(requested):
        raise bad_response("the server's response does not have the requested outputs")


def not_in_place(name: str) -> GatewayError:
    """Return the error of a response whose output is not in shared memory."""
    return bad_response(f"output '{name}' of the server's response is not where it was asked for")


def certain_output_sizes(request: InferRequest, model: ModelMetadata | None) -> dict[str, int]:
    """Return the bytes of each output of a request, by name; empty if one is not certain.

    They are if the metadata give its whole shape, or all but the batch, which is the request's.
    """
    head = request.head
    if model is None or head.features.classified_outputs or not head.inputs:
        return {}
    declared = {output.name: output for output in model.outputs}
    batch = head.inputs[0].shape[:1] if model.batching else ()
    sizes = {}
    for name in [each.name for each in head.outputs] or list(declared):
        output = declared.get(name)
        size = 0 if output is None else _certain_size(output, batch)
        if not size:
            return {}
        sizes[name] = size
    names_region = any(_PARAMETERS[0] in each.parameters for each in head.outputs)
    return {} if names_region or len(sizes) < len(head.outputs) else sizes


def largest_output_size(model: ModelMetadata, request_size: int) -> int:
    """Return the most bytes of certain size that the outputs of a request may have.

    The request need not be read for it: ``request_size`` bytes limit its batch.
    """
    batch: tuple[int, ...] = ()
    if model.batching:
        least = min((_certain_size(each, (1,)) for each in model.inputs), default=0)
        batch = (request_size // max(least, 1),)
    return sum(_certain_size(each, batch) for each in model.outputs)


def _certain_size(tensor: TensorSpec, batch: tuple[int, ...]) -> int:
    """Return the bytes of a tensor; 0 if its metadata leave open more than the batch."""
    shape = tensor.shape
    if batch and shape[:1] == (-1,):
        shape = batch + shape[1:]
    if tensor.datatype.size is None or any(size <= 0 for size in shape):
        return 0
    return element_count(shape) * tensor.datatype.size
