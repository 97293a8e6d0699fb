"""Inference: a request's inputs checked against a model, its outputs chosen as requested."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from gateway.demo.server import tensors
from gateway.demo.server.errors import RequestError
from gateway.demo.server.models import Model, TensorSpec
from gateway.demo.server.tensors import DTYPES, Array, Tensor
from gateway.demo.server.wire import Request


def infer(model: Model, request: Request) -> list[Tensor]:
    """Run a model; the outputs come in the model's order, not in the request's.

    Raises RequestError when the request does not fit the model.
    """
    wanted = {output.name: output for output in request.outputs}
    unknown = wanted.keys() - {spec.name for spec in model.outputs}
    if unknown:
        raise RequestError(f"unexpected inference output '{min(unknown)}' for model '{model.name}'")
    inputs = request.inputs if request.raw is None else [_raw_input(model, request.raw)]
    outputs = run(model, fit(model, inputs))
    if not wanted:
        return outputs
    return [
        _classify(output, wanted[output.name].classes, batched=model.max_batch_size > 0)
        for output in outputs
        if output.name in wanted
    ]


def run(model: Model, arrays: Sequence[Array]) -> list[Tensor]:
    """Run a model on arrays that fit it, in the order of its inputs."""
    with np.errstate(all="ignore"):  # NaN and infinity are numbers like any other here
        results = model.compute(*arrays)
    return [
        Tensor(spec.name, spec.datatype, np.asarray(result, DTYPES[spec.datatype]))
        for spec, result in zip(model.outputs, results, strict=True)
    ]


def full_shape(model: Model, spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape that the model's metadata shows: with the batch dimension, if any."""
    return (-1, *spec.shape) if model.max_batch_size else spec.shape


def fit(model: Model, inputs: Iterable[Tensor]) -> list[Array]:
    """Return the inputs' arrays in the model's order.

    Raises RequestError when one is missing, unknown, given twice, or of another datatype or shape.
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
    """Deduce the one input of a raw binary request from the number of its bytes."""
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
    # What does not divide comes out too small here, and is then refused for its size.
    rest = math.prod(d for d in spec.shape if d != -1) * DTYPES[spec.datatype].itemsize
    shape = (*batch, *(len(body) // rest if d == -1 else d for d in spec.shape))
    return tensors.from_binary(spec.name, spec.datatype, shape, body)


def _classify(tensor: Tensor, classes: int, *, batched: bool) -> Tensor:
    """Turn an output into its `classes` largest elements, each as the text `value:index`.

    0 classes ask for the output as it is.
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
