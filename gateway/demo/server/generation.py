"""The `generate` endpoints: plain JSON members instead of tensors, answered at once or in parts."""

import math
from collections.abc import Sequence
from typing import Any

from gateway.demo.server import documents, tensors
from gateway.demo.server.inference import fit, full_shape, run
from gateway.demo.server.models import VERSION, Model, TensorSpec
from gateway.demo.server.tensors import Array, Tensor


def generate(model: Model, document: dict[str, Any]) -> dict[str, Any]:
    """Answer `generate`: each member of the request named like an input holds its elements.

    Raises RequestError when they do not fit the model.
    """
    return _respond(model, document, _inputs(model, document))


def generate_stream(model: Model, document: dict[str, Any]) -> tuple[bytes, ...]:
    """Answer `generate_stream` with server-sent events, one for each part of the input.

    Raises RequestError when the input does not fit the model.
    """
    return tuple(
        b"data: " + documents.to_text(_respond(model, document, part)) + b"\n\n"
        for part in model.split(*_inputs(model, document))
    )


def _inputs(model: Model, document: dict[str, Any]) -> list[Array]:
    given = [
        _input(model, spec, document[spec.name]) for spec in model.inputs if spec.name in document
    ]
    return fit(model, given)


def _input(model: Model, spec: TensorSpec, value: object) -> Tensor:
    data = value if isinstance(value, list) else [value]
    shape = list(full_shape(model, spec))
    left = len(data) // math.prod(d for d in shape if d != -1)
    for axis in reversed(range(len(shape))):  # the innermost variable dimension takes the rest
        if shape[axis] == -1:
            shape[axis], left = left, 1
    return tensors.from_json(spec.name, spec.datatype, shape, data)


def _respond(model: Model, document: dict[str, Any], arrays: Sequence[Array]) -> dict[str, Any]:
    answer: dict[str, Any] = {"model_name": model.name, "model_version": VERSION}
    request_id = documents.optional(document, "id", "")
    if request_id:
        answer["id"] = request_id
    for output in run(model, arrays):
        data = tensors.to_json(output)
        answer[output.name] = data[0] if len(data) == 1 else data
    return dict(sorted(answer.items()))  # Triton sorts the members, too
