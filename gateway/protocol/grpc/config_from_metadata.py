"""Makes a model configuration from a model's metadata, for servers that have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc.schema import find_enumeration
from gateway.protocol.json_errors import describe_value

_ENSEMBLE: Final = "ensemble"


def make_model_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Make the configuration of a model, as JSON, from the JSON of its metadata.

    It has what ``perf_analyzer`` and other clients of Triton look for: the name, the platform, and
    inputs and outputs with datatypes and dimensions. Metadata does not tell whether a model
    batches, so it does not: ``max_batch_size`` is 0, and the dimensions are whole shapes. Raises
    GatewayError (502) that names the invalid member of the metadata.
    """
    platform = _text(metadata, "platform")
    return {
        "name": _text(metadata, "name"),
        # Clients ask for the steps of an ensemble, which metadata does not have.
        "platform": "" if platform == _ENSEMBLE else platform,
        "backend": "",
        "max_batch_size": 0,
        "input": [{**tensor, "format": "FORMAT_NONE"} for tensor in _tensors(metadata, "inputs")],
        "output": _tensors(metadata, "outputs"),
    }


def _tensors(metadata: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [
        _tensor(tensor, f"{name}[{index}]") for index, tensor in enumerate(_array(metadata, name))
    ]


def _tensor(tensor: Any, place: str) -> dict[str, Any]:
    if not isinstance(tensor, dict):
        raise _invalid(place, "an object", tensor)
    place = f"{place}."
    datatype = _text(tensor, "datatype", place)
    known = find_enumeration("inference.DataType").values
    name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return {
        "name": _text(tensor, "name", place),
        # A client need not use a tensor whose datatype only its server knows.
        "data_type": name if name in known else known[0],
        "dims": [_dimension(size, place) for size in _array(tensor, "shape", place)],
    }


def _dimension(size: Any, place: str) -> int:
    if isinstance(size, bool) or not isinstance(size, int):
        raise _invalid(f"{place}shape", "an array of integers", size)
    return size


def _text(members: Mapping[str, Any], name: str, place: str = "") -> str:
    value = members.get(name)
    if value is not None and not isinstance(value, str):
        raise _invalid(f"{place}{name}", "a string", value)
    return value or ""


def _array(members: Mapping[str, Any], name: str, place: str = "") -> list[Any]:
    value = members.get(name)
    if value is not None and not isinstance(value, list):
        raise _invalid(f"{place}{name}", "an array", value)
    return value or []


def _invalid(place: str, what: str, value: Any) -> GatewayError:
    return RESPONSE.malformed(
        f"{place} of the model's metadata must be {what}, got {describe_value(value)}"
    )
