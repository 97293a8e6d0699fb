"""Converts the messages of RPCs beside inference to the JSON of the same operation over HTTP.

A message is limited in bytes by the caller, in values by the two limits here, and in depth by its
schema: none contains itself. Unknown fields are skipped. protobuf is imported with the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE
from gateway.protocol.grpc.rpcs import FILE_PREFIX, PACKAGE
from gateway.protocol.grpc.wire import Buffer
from gateway.sizes import MAX_SERVER_DOCUMENT

PATH_NAMES: Final = ("name", "version", "repository_name", "model_name")
"""Fields of requests that are part of the path over HTTP."""

BODIES: Final[Mapping[str, str]] = {
    "ModelConfigResponse": "config",
    "RepositoryIndexResponse": "models",
    "SystemSharedMemoryStatusResponse": "regions",
    "CudaSharedMemoryStatusResponse": "regions",
    "TraceSettingRequest": "settings",
    "TraceSettingResponse": "settings",
    "LogSettingsRequest": "settings",
    "LogSettingsResponse": "settings",
}
"""Messages whose JSON is the value of one field."""

MAX_REQUEST_VALUES: Final = 4 * 1024
"""Fields and values of a request: it has a few parameters or settings, and takes 10 ms at most."""

MAX_RESPONSE_VALUES: Final = 128 * 1024
"""A response may have more: enough for the statistics of 1,000 models; 0.2 s at most."""

_REPOSITORY_NAME: Final = "repository_name"
_MODEL_NAME: Final = "model_name"


class HttpForm(NamedTuple):
    """A request of a gRPC client as it is over HTTP.

    ``path`` has the names in its path, which may be empty; ``body`` is its JSON.
    """

    path: dict[str, str]
    body: dict[str, Any]


def read_request(rpc: str, data: Buffer, max_bytes: int = MAX_SERVER_DOCUMENT) -> HttpForm:
    """Read a request of a gRPC client as it is over HTTP.

    Raises GatewayError: 400 that names message and field, 413 above a limit.
    """
    from gateway.codec.grpc.document_form import members_of, read_message

    name = f"{rpc}Request"
    message = read_message(PACKAGE + name, data, max_bytes, MAX_REQUEST_VALUES, REQUEST)
    members = members_of(message)
    path: dict[str, str] = {each: str(members.pop(each)) for each in PATH_NAMES if each in members}
    if _MODEL_NAME in path and not path[_MODEL_NAME] and path.get(_REPOSITORY_NAME):
        # Clients of KServe have the model's name where others have the repository's.
        path = {_REPOSITORY_NAME: "", _MODEL_NAME: path[_REPOSITORY_NAME]}
    if rpc.startswith("RepositoryModel"):
        _check_files(name, message)
    return HttpForm(path, members.get(BODIES.get(name, ""), members))


def write_request(
    rpc: str, path: Mapping[str, str], body: Any = None, *, loads_by_first_field: bool = False
) -> bytes:
    """Write a request for a gRPC server; ``path`` are the names in the path that are known.

    ``body`` is the parsed JSON, or None without a body. The request lacks members that the protocol
    does not know. With ``loads_by_first_field``, a load or an unload has the model's name as its
    first field and nothing else, as KServe's servers read it. Raises GatewayError (400) that names
    message and field.
    """
    from gateway.codec.grpc.document_form import DocumentWriter

    name = f"{rpc}Request"
    names = {each: path.get(each) for each in PATH_NAMES}
    members = _members(name, body)
    if loads_by_first_field and rpc.startswith("RepositoryModel"):
        names, members = {_REPOSITORY_NAME: path.get(_MODEL_NAME)}, {}
    return bytes(DocumentWriter(REQUEST).write(PACKAGE + name, members, names).SerializeToString())


def read_response(rpc: str, data: Buffer, max_bytes: int = MAX_SERVER_DOCUMENT) -> Any:
    """Read a response of a gRPC server as the JSON that it would send over HTTP.

    Raises GatewayError (502) that names message and field, or the limit that it exceeds.
    """
    from gateway.codec.grpc.document_form import members_of, read_message

    name = f"{rpc}Response"
    message = read_message(PACKAGE + name, data, max_bytes, MAX_RESPONSE_VALUES, RESPONSE)
    members = members_of(message)
    return members.get(BODIES[name], {}) if name in BODIES else members


def write_response(rpc: str, document: Any) -> bytes:
    """Write the JSON of a server's response over HTTP as a response for a gRPC client.

    An empty body is None. Raises GatewayError (502) that names message and field.
    """
    from gateway.codec.grpc.document_form import DocumentWriter

    name = f"{rpc}Response"
    message = DocumentWriter(RESPONSE).write(PACKAGE + name, _members(name, document))
    return bytes(message.SerializeToString())


def write_model_config(metadata: Any) -> bytes:
    """Write a configuration of a model, for a server that has none, by the JSON of its metadata.

    It has what ``perf_analyzer`` and other clients of Triton look for: the name, the platform, and
    inputs and outputs with datatypes and dimensions. Metadata does not tell whether a model
    batches, so it does not: the dimensions are whole shapes. Raises GatewayError (502) that names
    the invalid member of the metadata.
    """
    from gateway.codec.grpc.document_form import DocumentWriter
    from gateway.protocol.grpc.descriptors import message_class

    known = DocumentWriter(RESPONSE).write(f"{PACKAGE}ModelMetadataResponse", metadata)
    response = message_class(f"{PACKAGE}ModelConfigResponse")()
    config = response.config
    config.name = known.name
    # Clients ask for the steps of an ensemble, which metadata does not have.
    config.platform = "" if known.platform == "ensemble" else known.platform
    for described, tensors in ((known.inputs, config.input), (known.outputs, config.output)):
        for each in described:
            name = each.datatype.replace("BYTES", "STRING")
            # A client need not use a tensor whose datatype only its server knows.
            kind = f"TYPE_{name if each.datatype in DATATYPES else 'INVALID'}"
            tensors.add(name=each.name, data_type=kind, dims=each.shape)
    return bytes(response.SerializeToString())


def _members(name: str, body: Any) -> Any:
    if name in BODIES:
        return {BODIES[name]: body}
    return {} if body is None else body


def _check_files(name: str, message: Any) -> None:
    """Refuse parameters of a load that would be others over HTTP; raises GatewayError (400)."""
    for key, value in message.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind and key.startswith(FILE_PREFIX) != (kind == "bytes_param"):
            raise REQUEST.malformed(
                f"{name}.parameters.{key} of {REQUEST.name} has a {kind}; only parameters whose "
                f"names begin with '{FILE_PREFIX}' must have bytes"
            )
