"""An answer whose outputs came as JSON, though their binary form was asked for."""

from __future__ import annotations

import orjson

from gateway.codec.array_scanner import Run
from gateway.codec.elements_from_json import TensorFromJson
from gateway.errors import GatewayError, bad_answer
from gateway.protocol.inference_header import OutputTensor, parse_answer, read_outputs


def binary_answer(document: bytes) -> tuple[bytes, list[bytes]]:
    """Give the header and the tensors that would have been the answer in binary form.

    The document is parsed as a whole: it is to be a small one. Raises GatewayError (502) that
    names the output whose data is not what its datatype says; null for NaN is not.
    """
    fields = parse_answer(document)
    outputs = read_outputs(fields)
    tensors: list[bytes] = []
    for entry, output in zip(fields.get("outputs", ()), outputs, strict=True):
        if "data" not in entry:
            continue
        tensor = _tensor(output, entry.pop("data"))
        entry["parameters"] = {
            **(entry.get("parameters") or {}),
            "binary_data_size": tensor.size,
        }
        tensors += tensor.chunks
    return orjson.dumps(fields), tensors


def _tensor(output: OutputTensor, data: object) -> TensorFromJson:
    label = f"output '{output.name}' of the server's answer"
    if not isinstance(data, list):
        raise bad_answer(f"{label} has data that is no array")
    tensor = TensorFromJson(label, output.datatype)
    try:
        tensor.feed(Run(orjson.dumps(data), 0, 0, first=True))
    except GatewayError as error:
        raise bad_answer(error.message) from None
    return tensor
