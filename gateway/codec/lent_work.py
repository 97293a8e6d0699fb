"""Does what the codecs lend out, wherever that is."""

from __future__ import annotations

from gateway.codec.array_scanner import Run
from gateway.codec.elements_from_json import TensorFromJson
from gateway.codec.elements_to_json import tensor_to_json
from gateway.codec.loans import Work
from gateway.codec.policies import JsonPolicies, Nonfinite
from gateway.errors import GatewayError

_STRICT = JsonPolicies(nonfinite=Nonfinite.ERROR)


def do(work: Work, data: bytes) -> bytes | None:
    """Do the work; None where there is something to be said about the data."""
    try:
        if work.to_json:
            return tensor_to_json("", work.datatype, _STRICT).feed(data)
        tensor = TensorFromJson("", work.datatype)
        tensor.feed(Run(data, 0, 0, first=True))
        return tensor.chunks[0]
    except GatewayError:
        return None
