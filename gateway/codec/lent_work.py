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
    if not work.to_json:
        converted = TensorFromJson("", work.datatype).converted(Run(data, 0, 0, first=True))
        return None if converted is None else converted[1]
    try:
        return tensor_to_json("", work.datatype, _STRICT).feed(data)
    except GatewayError:
        return None
