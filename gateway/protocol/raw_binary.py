"""Reads raw binary requests: the model's metadata and the size of the body tell their input.

Binary tensor data extension, "Raw Binary Request".
"""

from __future__ import annotations

from gateway.errors import ModelMismatchError, bad_request
from gateway.protocol.datatypes import Family
from gateway.protocol.messages import InferRequest, InferRequestHead, InputTensor, TensorData
from gateway.protocol.tensors import ModelMetadata, TensorSpec, element_count


def read_raw_binary(model: ModelMetadata, body: TensorData) -> InferRequest:
    """Read a request whose body is the data of its only input.

    It asks for all outputs in binary. Raises ModelMismatchError unless the model has exactly
    one input with at most one variable dimension that fits the bytes; BYTES needs the shape [1].
    """
    body_size = body if isinstance(body, int) else sum(map(len, body))
    if not model.inputs:
        raise ModelMismatchError(
            f"the server's metadata of model '{model.name}' lists no inputs, which a raw binary "
            "request (Inference-Header-Content-Length: 0) needs; declare the model in the settings"
        )
    if len(model.inputs) != 1:
        raise ModelMismatchError(
            f"model '{model.name}' takes {len(model.inputs)} inputs; "
            "a raw binary request (Inference-Header-Content-Length: 0) needs exactly 1"
        )
    tensor = model.inputs[0]
    if tensor.datatype.family is not Family.TEXT:
        return _request(tensor, _deduced_shape(model, tensor, body_size), body_size, (body,))
    shape = _bytes_shape(model, tensor)
    if body_size >= 1 << 32:
        raise bad_request(f"input '{tensor.name}' can take at most 4 GiB in one BYTES element")
    length = body_size.to_bytes(4, "little")  # precedes each element of BYTES
    return _request(tensor, shape, len(length) + body_size, ([length], body))


def _request(
    tensor: TensorSpec, shape: tuple[int, ...], size: int, data: tuple[TensorData, ...]
) -> InferRequest:
    read = InputTensor(tensor.name, tensor.datatype, shape, size)
    return InferRequest(InferRequestHead((read,)), None, data)


def _own_shape(model: ModelMetadata, tensor: TensorSpec) -> tuple[int, ...]:
    # Metadata shows the batch as a first dimension of -1, which is not the tensor's own.
    return tensor.shape[1:] if model.batching else tensor.shape


def _with_batch(model: ModelMetadata, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape) if model.batching else shape


def _bytes_shape(model: ModelMetadata, tensor: TensorSpec) -> tuple[int, ...]:
    own = _own_shape(model, tensor)
    if own != (1,):
        raise ModelMismatchError(
            f"input '{tensor.name}' of model '{model.name}' is BYTES of shape {list(own)}; "
            "a raw binary request needs shape [1]"
        )
    return _with_batch(model, (1,))


def _deduced_shape(model: ModelMetadata, tensor: TensorSpec, body_size: int) -> tuple[int, ...]:
    own = _own_shape(model, tensor)
    if own.count(-1) > 1:
        raise ModelMismatchError(
            f"input '{tensor.name}' of model '{model.name}' has shape {list(own)}; "
            "a raw binary request allows at most 1 variable dimension"
        )
    fixed = element_count([size for size in own if size != -1]) * (tensor.datatype.size or 1)
    if -1 not in own:
        if fixed != body_size:
            raise ModelMismatchError(
                f"input '{tensor.name}' of shape {list(own)} and datatype {tensor.datatype.name} "
                f"takes {fixed} bytes, got {body_size}"
            )
        return _with_batch(model, own)
    variable, rest = divmod(body_size, fixed) if fixed else (0, body_size)
    if rest:
        raise ModelMismatchError(
            f"input '{tensor.name}' of shape {list(own)} and datatype {tensor.datatype.name} "
            f"takes a multiple of {fixed} bytes, got {body_size}"
        )
    return _with_batch(model, tuple(variable if size == -1 else size for size in own))
