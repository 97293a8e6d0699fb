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
    # Metadata shows the batch as a first dimension of -1, which is not the tensor's own.
    own, batch = (tensor.shape[1:], (1,)) if model.batching else (tensor.shape, ())
    data: tuple[TensorData, ...] = (body,)
    if tensor.datatype.family is Family.TEXT:
        if own != (1,):
            raise ModelMismatchError(
                f"input '{tensor.name}' of model '{model.name}' is BYTES of shape {list(own)}; "
                "a raw binary request needs shape [1]"
            )
        if body_size >= 1 << 32:
            raise bad_request(f"input '{tensor.name}' can take at most 4 GiB in one BYTES element")
        length = body_size.to_bytes(4, "little")  # precedes each element of BYTES
        data, body_size = ([length], body), len(length) + body_size
    else:
        own = _deduce_shape(model, tensor, own, body_size)
    read = InputTensor(tensor.name, tensor.datatype, (*batch, *own), body_size)
    return InferRequest(InferRequestHead((read,)), None, data)


def _deduce_shape(
    model: ModelMetadata, tensor: TensorSpec, own: tuple[int, ...], body_size: int
) -> tuple[int, ...]:
    if own.count(-1) > 1:
        raise ModelMismatchError(
            f"input '{tensor.name}' of model '{model.name}' has shape {list(own)}; "
            "a raw binary request allows at most 1 variable dimension"
        )
    fixed = element_count([size for size in own if size != -1]) * (tensor.datatype.size or 1)
    variable, rest = divmod(body_size, fixed) if fixed else (0, body_size)
    if rest or (-1 not in own and body_size != fixed):
        takes = f"a multiple of {fixed} bytes" if -1 in own else f"{fixed} bytes"
        raise ModelMismatchError(
            f"input '{tensor.name}' of shape {list(own)} and datatype {tensor.datatype.name} "
            f"takes {takes}, got {body_size}"
        )
    return tuple(variable if size == -1 else size for size in own)
