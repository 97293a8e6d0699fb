"""The models of the demo server, and how they run: checks of inputs, outputs, and `generate`."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gateway.demo.server import tensors
from gateway.demo.server.tensors import DTYPES, Array, RequestError, Tensor
from gateway.demo.server.wire import Document, InferRequest, encode, validate

VERSION: Final = "1"  # the only version of each model


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output; `shape` has no batch dimension, and -1 is a variable dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the demo server.

    `compute` takes the arrays of the inputs and returns those of the outputs, in the order of the
    specs. With `max_batch_size` 0 the model does not batch. With `any_rank` the model accepts
    every shape. `split` divides the input of `generate_stream` into parts, one for each event.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    compute: Callable[..., Sequence[Array]]
    max_batch_size: int = 0
    any_rank: bool = False
    split: Callable[..., Sequence[Sequence[Array]]] = lambda *arrays: [arrays]


def _add(left: Array, right: Array) -> Sequence[Array]:
    if left.shape != right.shape:
        raise RequestError(
            f"model 'add' takes two inputs of the same shape, "
            f"got {list(left.shape)} and {list(right.shape)}"
        )
    return [left + right]


def _upper(texts: Array) -> Sequence[Array]:
    # surrogateescape preserves bytes that are not UTF-8
    upper = [
        text.decode(errors="surrogateescape").upper().encode(errors="surrogateescape")
        for text in texts
    ]
    return [np.array(upper, object)]


def _words(texts: Array) -> Sequence[Sequence[Array]]:
    return [[np.array([word], object)] for text in texts for word in text.split()]


def _image(images: Array) -> Sequence[Array]:
    return [images.mean(axis=(2, 3), dtype=np.float32), 1 - images]


def _identity_model(datatype: str) -> Model:
    return Model(
        name=f"identity_{datatype.lower()}",
        inputs=(TensorSpec("INPUT0", datatype, (-1,)),),
        outputs=(TensorSpec("OUTPUT0", datatype, (-1,)),),
        compute=lambda array: [array],
        any_rank=True,
    )


_MODELS: Final = (
    Model(
        name="add",
        inputs=(TensorSpec("INPUT0", "FP32", (-1,)), TensorSpec("INPUT1", "FP32", (-1,))),
        outputs=(TensorSpec("SUM", "FP32", (-1,)),),
        compute=_add,
    ),
    Model(
        name="half",
        inputs=(TensorSpec("INPUT0", "FP16", (-1,)),),
        outputs=(TensorSpec("OUTPUT0", "FP16", (-1,)),),
        compute=lambda array: [array * np.float16(0.5)],
    ),
    *map(_identity_model, DTYPES),
    Model(
        name="image",
        inputs=(TensorSpec("INPUT", "FP32", (3, 224, 224)),),
        outputs=(TensorSpec("MEAN", "FP32", (3,)), TensorSpec("INVERTED", "FP32", (3, 224, 224))),
        compute=_image,
        max_batch_size=8,
    ),
    Model(
        name="upper",
        inputs=(TensorSpec("INPUT0", "BYTES", (1,)),),
        outputs=(TensorSpec("OUTPUT0", "BYTES", (1,)),),
        compute=_upper,
        split=_words,
    ),
)

MODELS: Final = {model.name: model for model in _MODELS}


def infer(model: Model, request: InferRequest) -> list[Tensor]:
    """Run a model on a request; the outputs are in the model's order, not in the request's.

    Raises RequestError if the request does not fit the model.
    """
    requested = {output.name: output for output in request.outputs}
    unknown = requested.keys() - {spec.name for spec in model.outputs}
    if unknown:
        raise RequestError(f"unexpected inference output '{min(unknown)}' for model '{model.name}'")
    inputs = request.inputs if request.raw is None else [_raw_input(model, request.raw)]
    outputs = run_model(model, match_inputs(model, inputs))
    if not requested:
        return outputs
    return [
        _classify(
            output,
            requested[output.name].parameters.classification,
            batched=model.max_batch_size > 0,
        )
        for output in outputs
        if output.name in requested
    ]


def run_model(model: Model, arrays: Sequence[Array]) -> list[Tensor]:
    """Run a model on arrays that fit it, in the order of its inputs."""
    with np.errstate(all="ignore"):  # NaN and infinity are valid values
        results = model.compute(*arrays)
    return [
        Tensor(spec.name, spec.datatype, np.asarray(result, DTYPES[spec.datatype]))
        for spec, result in zip(model.outputs, results, strict=True)
    ]


def full_shape(model: Model, spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape in the model's metadata: with the batch dimension, if there is one."""
    return (-1, *spec.shape) if model.max_batch_size else spec.shape


def match_inputs(model: Model, inputs: Iterable[Tensor]) -> list[Array]:
    """Return the arrays of the inputs in the model's order.

    Raises RequestError if one is missing, unknown, repeated, or of another datatype or shape.
    """
    given: dict[str, Tensor] = {}
    for tensor in inputs:
        if tensor.name in given:
            raise RequestError(f"input '{tensor.name}' already exists in request")
        given[tensor.name] = tensor
    specs = {spec.name: spec for spec in model.inputs}
    for name in given.keys() - specs.keys():
        raise RequestError(f"unexpected inference input '{name}' for model '{model.name}'")
    for name in specs.keys() - given.keys():
        raise RequestError(f"missing required input '{name}' for model '{model.name}'")
    for name, spec in specs.items():
        _check(model, spec, given[name])
    return [given[name].array for name in specs]


def _check(model: Model, spec: TensorSpec, tensor: Tensor) -> None:
    if tensor.datatype != spec.datatype:
        raise RequestError(
            f"inference input '{spec.name}' data-type is '{tensor.datatype}', "
            f"but model '{model.name}' expects '{spec.datatype}'"
        )
    if model.any_rank:
        return
    expected, got = full_shape(model, spec), tensor.array.shape
    fits = len(expected) == len(got) and all(
        want in (-1, have) for want, have in zip(expected, got, strict=True)
    )
    if not fits:
        raise RequestError(
            f"unexpected shape for input '{spec.name}' for model '{model.name}'. "
            f"Expected {list(expected)}, got {list(got)}"
        )
    if model.max_batch_size and not 1 <= got[0] <= model.max_batch_size:
        raise RequestError(
            f"inference request batch-size must be from 1 to {model.max_batch_size} "
            f"for '{model.name}'"
        )


def _raw_input(model: Model, body: bytes) -> Tensor:
    """Make the one input of a raw binary request; its shape follows from the body's size."""
    if len(model.inputs) != 1:
        raise RequestError(
            "Raw request must only have 1 input to be deduced "
            f"but got {len(model.inputs)} inputs in '{model.name}' model configuration"
        )
    (spec,) = model.inputs
    batch = (1,) if model.max_batch_size else ()
    if spec.datatype == "BYTES":
        if spec.shape != (1,):
            raise RequestError(
                f"For BYTES datatype raw input '{spec.name}', the model must have input shape [1]"
            )
        return Tensor(spec.name, "BYTES", np.array([body], object).reshape(*batch, 1))
    if spec.shape.count(-1) > 1:
        raise RequestError(f"raw input '{spec.name}' has more than one variable dimension")
    # If the size is not a multiple, the shape is too small, and from_binary rejects it.
    rest = math.prod(d for d in spec.shape if d != -1) * DTYPES[spec.datatype].itemsize
    shape = (*batch, *(len(body) // rest if d == -1 else d for d in spec.shape))
    return tensors.from_binary(spec.name, spec.datatype, shape, body)


def _classify(tensor: Tensor, classes: int, *, batched: bool) -> Tensor:
    """Replace an output by its `classes` largest elements, each as the text `value:index`.

    With 0 classes it stays as it is.
    """
    if classes == 0:
        return tensor
    if tensor.datatype in ("BOOL", "BYTES", "FP16", "BF16"):
        raise RequestError(
            f"class result not available for output due to unsupported type '{tensor.datatype}'"
        )
    batch = tensor.array.shape[:1] if batched else ()
    rows = tensor.array.reshape(batch[0] if batched else 1, -1).tolist()
    style = "f" if tensor.array.dtype.kind == "f" else "d"
    texts = [
        [
            f"{row[index]:{style}}:{index}".encode()
            for index in sorted(range(len(row)), key=row.__getitem__, reverse=True)[:classes]
        ]
        for row in rows
    ]
    array = np.array(texts, object)
    return Tensor(tensor.name, "BYTES", array.reshape(*batch, array.shape[-1]))


class _Identity(Document):
    id: str = ""


def generate(model: Model, document: dict[str, Any]) -> dict[str, Any]:
    """Respond to `generate`, where a member with the name of an input has its elements.

    Raises RequestError if they do not fit the model.
    """
    return _generate_document(model, document, _generate_inputs(model, document))


def generate_stream(model: Model, document: dict[str, Any]) -> tuple[bytes, ...]:
    """Respond to `generate_stream` with one server-sent event for each part of the input.

    Raises RequestError if the input does not fit the model.
    """
    return tuple(
        b"data: " + encode(_generate_document(model, document, part)) + b"\n\n"
        for part in model.split(*_generate_inputs(model, document))
    )


def _generate_inputs(model: Model, document: dict[str, Any]) -> list[Array]:
    given = [
        _generate_input(model, spec, document[spec.name])
        for spec in model.inputs
        if spec.name in document
    ]
    return match_inputs(model, given)


def _generate_input(model: Model, spec: TensorSpec, value: object) -> Tensor:
    data = value if isinstance(value, list) else [value]
    shape = list(full_shape(model, spec))
    size = len(data) // math.prod(d for d in shape if d != -1)
    for axis in reversed(range(len(shape))):  # the last variable dimension gets the whole size
        if shape[axis] == -1:
            shape[axis], size = size, 1
    return tensors.from_json(spec.name, spec.datatype, shape, data)


def _generate_document(
    model: Model, document: dict[str, Any], arrays: Sequence[Array]
) -> dict[str, Any]:
    response: dict[str, Any] = {"model_name": model.name, "model_version": VERSION}
    if request_id := validate(_Identity, document).id:
        response["id"] = request_id
    for output in run_model(model, arrays):
        data = tensors.to_json(output)
        response[output.name] = data[0] if len(data) == 1 else data
    return dict(sorted(response.items()))  # as Triton does
