"""The V1 protocol of TensorFlow Serving and KServe, translated to V2.

TensorFlow Serving, "RESTful API", Predict API and "Encoding binary values"; KServe, "V1 Protocol".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import orjson

from gateway.errors import ModelMismatchError, bad_request, read_server_error
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import RESPONSE, Tensor
from gateway.protocol.json_errors import describe_value, quote_value
from gateway.protocol.tensors import ModelMetadata, TensorSpec

MODELS_PATH: Final = "/v1/models"
"""KServe's list of models."""

BASE64_KEY: Final = "b64"
"""The only key of an object that encodes an element in base64."""

OTHER_FIELDS: Final = ("signature_name", "parameters")
"""The fields of a request that count, besides its tensors."""

_BINARY_SUFFIX: Final = "_bytes"

V1_RESPONSE: Final = replace(
    RESPONSE,
    instead_of_number="",
    instead_of_text=f"have the output's name end in {_BINARY_SUFFIX}, or ",
)
"""The words for V1 clients, who cannot request another encoding."""

_DEFAULT_SIGNATURES: Final = ("", "serving_default")
_LONGEST_REASON: Final = 1000


class V1Format(Enum):
    """How a request holds its tensors; the value is its key in the request."""

    ROWS = "instances"
    """TensorFlow Serving's row format: one item per instance, the first dimension of tensors."""
    COLUMNS = "inputs"
    """TensorFlow Serving's columnar format: one item per tensor."""

    @property
    def response_key(self) -> str:
        """Return the key of the response."""
        return "predictions" if self is V1Format.ROWS else "outputs"


@dataclass(frozen=True, slots=True)
class V1ResponseLayout:
    """The layout of the response to a request.

    ``single`` means that the model got one instance without a batch dimension, so its response has
    none either.
    """

    form: V1Format
    single: bool = False


_ROWS: Final = V1ResponseLayout(V1Format.ROWS)
_COLUMNS: Final = V1ResponseLayout(V1Format.COLUMNS)
_SINGLE: Final = V1ResponseLayout(V1Format.ROWS, single=True)


def check_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check the fields besides the tensors and return the model's parameters.

    V2 has no signatures: any but the default one would mean another computation and is refused.
    Other fields are ignored, as TensorFlow Serving does. Raises GatewayError (400).
    """
    signature = fields.get("signature_name", "")
    if signature not in _DEFAULT_SIGNATURES:
        raise bad_request(
            f"signature_name is {quote_value(signature)}: models are served with one signature "
            'here; leave it out, or say "serving_default"'
        )
    parameters = fields.get("parameters")
    if not isinstance(parameters, dict | None):
        raise bad_request(f"parameters must be an object, got {describe_value(parameters)}")
    return dict(parameters or {})


def check_shape(
    model: ModelMetadata, tensor: TensorSpec, shape: tuple[int, ...], form: V1Format
) -> V1ResponseLayout:
    """Check the shape that a tensor's nesting has against the model's.

    A model without a batch dimension takes one instance. The layout is then ``single``, and the
    tensor's shape is ``shape`` without its first 1. Raises ModelMismatchError that names both.
    """
    is_rows = form is V1Format.ROWS
    if _fits(tensor.shape, shape):
        return _ROWS if is_rows else _COLUMNS
    alone = is_rows and not model.batching and tensor.shape[:1] != (-1,)
    if alone and shape[0] == 1 and _fits(tensor.shape, shape[1:]):
        return _SINGLE
    takes = f"input '{tensor.name}' of model '{model.name}' takes shape {list(tensor.shape)}"
    if alone:
        takes += ", one instance at a time"
    raise ModelMismatchError(f"{takes}; the {form.value} have shape {list(shape)}")


def _fits(declared: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(declared) != len(shape):
        return False
    for size, actual in zip(declared, shape, strict=True):  # noqa: SIM110  # compiled, a third
        if size not in (-1, actual):
            return False
    return True


def is_base64_output(output: Tensor) -> bool:
    """Tell whether an output is always base64: BYTES with a name that ends in ``_bytes``."""
    return output.datatype.family is Family.TEXT and output.name.endswith(_BINARY_SUFFIX)


def error_document(body: bytes, reason: str) -> bytes:
    """Make the body of an error for V1 clients; a body of that form passes unchanged.

    ``reason`` is used for an error without a body.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    if isinstance(fields, dict) and isinstance(fields.get("error"), str):
        return body
    text = read_server_error(body)[:_LONGEST_REASON]
    return orjson.dumps({"error": text or reason or "the server failed"})


def ready_document(model: str) -> bytes:
    """Make KServe's document of a ready model."""
    return orjson.dumps({"name": model, "ready": True})


def reports_ready(body: bytes) -> bool:
    """Tell whether a 200 means ready: some servers say in the body that the model is not."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return True
    return not isinstance(fields, dict) or fields.get("ready", True) is not False


def models_document(names: Sequence[str]) -> bytes:
    """Make KServe's list of models, each once."""
    return orjson.dumps({"models": list(dict.fromkeys(names))})


def model_entries(document: Any) -> list[Any]:
    """Return the entries of a repository index, or of KServe's list in the same form.

    KServe's entries have names but neither versions nor states. Raises TypeError or KeyError for
    any other document, such as OpenAI's list of models.
    """
    if isinstance(document, list):
        return document
    names = document["models"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError
    return [{"name": name} for name in names]


def ready_entries(document: Any) -> list[Any]:
    """Return the entries of ready models, from what ``model_entries`` reads.

    Some servers list all models although only ready ones are requested, as KServe's list does.
    Raises TypeError, KeyError or AttributeError for any other document.
    """
    return [each for each in model_entries(document) if each.get("state", "READY") == "READY"]


def ready_model_names(document: Any) -> list[str]:
    """Return the names of ready models; see ``ready_entries``."""
    return [str(each["name"]) for each in ready_entries(document)]


def unseen_models(document: Any, seen: set[tuple[str, str]]) -> list[Any]:
    """Return the entries whose names and versions were not ``seen``, and add these.

    The document is what ``model_entries`` reads. Raises TypeError, KeyError or AttributeError for
    any other.
    """
    models = []
    for model in model_entries(document):
        key = str(model.get("name")), str(model.get("version"))
        if key not in seen:
            seen.add(key)
            models.append(model)
    return models


def write_entries(entries: Any, **labels: str) -> bytes:
    """Write the entries of a list, with labels added, without the brackets of the list.

    Raises TypeError if it is no list of objects.
    """
    if not isinstance(entries, list):
        raise TypeError
    return orjson.dumps([{**entry, **labels} for entry in entries])[1:-1]
