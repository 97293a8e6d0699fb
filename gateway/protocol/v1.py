"""The V1 prediction protocol, which TensorFlow Serving and KServe speak, in the terms of V2.

TensorFlow Serving, "RESTful API", Predict API and "Encoding binary values"; KServe, "V1 Protocol".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import orjson

from gateway.errors import bad_request, shorten
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import RESPONSE, Tensor
from gateway.protocol.operations import Operation, model_path
from gateway.protocol.request_features import RequestFeatures, read_features
from gateway.protocol.request_header import DataSource, InputTensor, describe_value
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.sizes import QUOTED_NAME

MODELS_PATH = "/v1/models"
"""Where KServe lists its models."""

BASE64_KEY = "b64"
"""The one key of the object that stands for an element in base64."""

OTHER_FIELDS = ("signature_name", "parameters")
"""What counts of a request beside its tensors."""

_BINARY_SUFFIX = "_bytes"

V1_RESPONSE = replace(
    RESPONSE,
    instead_of_number="",
    instead_of_text=f"have the output's name end in {_BINARY_SUFFIX}, or ",
)
"""An answer of which a V1 client is told: it cannot ask for outputs in another form."""

_DEFAULT_SIGNATURES = ("", "serving_default")
_LONGEST_REASON = 1000


class V1Format(Enum):
    """How a request says its tensors; its name there, which tells that of the answer."""

    ROWS = "instances"
    """One item for each instance: they make up the leading dimension of every tensor."""
    COLUMNS = "inputs"
    """One item for each tensor, whole."""

    @property
    def response_key(self) -> str:
        """Give the name that an answer has."""
        return "predictions" if self is V1Format.ROWS else "outputs"


@dataclass(frozen=True, slots=True)
class V1ResponseLayout:
    """What the answer to a request has to look like.

    ``single`` tells that the model got one instance without a dimension for several, and so has
    answered without one.
    """

    form: V1Format
    single: bool = False


def infer_path(asked: Operation) -> str:
    """Give the path under which a V2 server predicts."""
    return model_path(asked.model or "", asked.version) + "/infer"


def check_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check what stands beside the tensors; give the parameters for the model.

    V2 knows no signatures: another one than the default means another computation, and is refused.
    What else there is does not count, as with TensorFlow Serving. Raises GatewayError (400).
    """
    signature = fields.get("signature_name", "")
    if signature not in _DEFAULT_SIGNATURES:
        raise bad_request(
            f"signature_name is {_shown(signature)}: models are served with one signature here; "
            'leave it out, or say "serving_default"'
        )
    parameters = fields.get("parameters")
    if not isinstance(parameters, dict | None):
        raise bad_request(f"parameters must be an object, got {describe_value(parameters)}")
    return dict(parameters or {})


def check_shape(
    model: ModelMetadata, tensor: TensorSpec, found: tuple[int, ...], form: V1Format
) -> V1ResponseLayout:
    """Check a tensor's shape, as its nesting tells it, against what the model takes.

    Where the model has no dimension for several instances, one may come: ``single`` tells that
    its shape is ``found`` without the leading 1. Raises GatewayError (400) that names both.
    """
    if _fits(tensor.shape, found):
        return V1ResponseLayout(form)
    rows = form is V1Format.ROWS
    alone = rows and not model.batching and tensor.shape[:1] != (-1,)
    if alone and found[0] == 1 and _fits(tensor.shape, found[1:]):
        return V1ResponseLayout(form, single=True)
    takes = f"input '{tensor.name}' of model '{model.name}' takes shape {list(tensor.shape)}"
    if alone:
        takes += ", one instance at a time"
    raise bad_request(f"{takes}; the {form.value} have shape {list(found)}")


def _fits(declared: tuple[int, ...], found: tuple[int, ...]) -> bool:
    if len(declared) != len(found):
        return False
    return all(size in (-1, there) for size, there in zip(declared, found, strict=True))


def write_request_header(
    inputs: Sequence[TensorSpec],
    shapes: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    parameters: Mapping[str, Any],
    request_id: str,
) -> tuple[bytes, RequestFeatures]:
    """Write the inference header of tensors that follow it, in ``sizes`` bytes each; tell of it.

    V1 knows no ids. ``request_id`` is for models that answer with that of the request; it may be
    empty, but there are servers that fail where it is not there.
    """
    entries = [
        {
            "name": tensor.name,
            "shape": shape,
            "datatype": tensor.datatype.name,
            "parameters": {"binary_data_size": size},
        }
        for tensor, shape, size in zip(inputs, shapes, sizes, strict=True)
    ]
    asked = {**parameters, "binary_data_output": True}
    fields = {"id": request_id, "inputs": entries, "parameters": asked}
    tensors = tuple(
        InputTensor(tensor.name, tensor.datatype, shape, DataSource.BINARY, size)
        for tensor, shape, size in zip(inputs, shapes, sizes, strict=True)
    )
    return orjson.dumps(fields), read_features(fields, tensors)


def is_base64_output(output: Tensor) -> bool:
    """Tell whether elements are said in base64 in any case: BYTES that are named so."""
    return output.datatype.family is Family.TEXT and output.name.endswith(_BINARY_SUFFIX)


def error_document(body: bytes, reason: str) -> bytes:
    """Say a server's error as V1 clients expect it; it passes as it is where it is of that form.

    ``reason`` is what there may be to say of an error without a body.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    said = fields.get("error", fields.get("detail")) if isinstance(fields, dict) else None
    if isinstance(fields, dict) and isinstance(fields.get("error"), str):
        return body
    text = said if isinstance(said, str) else body.decode(errors="replace").strip()
    return orjson.dumps({"error": text[:_LONGEST_REASON] or reason or "the server failed"})


def ready_document(model: str) -> bytes:
    """Say that a model is ready, as KServe does."""
    return orjson.dumps({"name": model, "ready": True})


def reports_ready(body: bytes) -> bool:
    """Tell whether a server's good answer leaves it at that: some say in words that it is not."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return True
    return not isinstance(fields, dict) or fields.get("ready", True) is not False


def models_document(names: Sequence[str]) -> bytes:
    """List models, each once, as KServe does."""
    return orjson.dumps({"models": list(dict.fromkeys(names))})


def model_entries(document: Any) -> list[Any]:
    """Read a repository index, or a list as KServe gives it, as the entries of an index.

    KServe's list has names alone, and so have its entries: neither versions nor states. Raises
    TypeError or KeyError for what is neither, as lists of OpenAI's API.
    """
    if isinstance(document, list):
        return document
    names = document["models"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError
    return [{"name": name} for name in names]


def ready_entries(document: Any) -> list[Any]:
    """Read the entries of models that are ready, of what ``model_entries`` reads.

    There are servers that list all, whatever they are asked; KServe has one list, with all of them.
    Raises TypeError, KeyError or AttributeError for what is neither.
    """
    return [each for each in model_entries(document) if each.get("state", "READY") == "READY"]


def ready_model_names(document: Any) -> list[str]:
    """Give the names of the models that are ready; see ``ready_entries``."""
    return [str(each["name"]) for each in ready_entries(document)]


def _shown(value: object) -> str:
    text = orjson.dumps(value).decode()
    return shorten(text, QUOTED_NAME)
