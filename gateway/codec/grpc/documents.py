"""Converts the messages of RPCs beside inference to the JSON of the same operation over HTTP.

A message is limited in bytes by the caller, in values by the two limits here, and in depth by its
schema: none contains itself. Unknown fields are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gateway.codec.grpc.document_reader import DocumentReader
from gateway.codec.grpc.document_writer import DocumentWriter
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE
from gateway.protocol.grpc.rpcs import Rpc
from gateway.protocol.grpc.schema import Form, Message, body_field
from gateway.protocol.grpc.wire import Buffer
from gateway.sizes import MAX_SERVER_DOCUMENT

MAX_REQUEST_VALUES: Final = 4 * 1024
"""Fields and values of a request: it has a few parameters or settings, and takes 10 ms at most."""

MAX_RESPONSE_VALUES: Final = 128 * 1024
"""Those of a response: enough for the statistics of 1,000 models; 0.2 s at most."""

_REPOSITORY_NAME: Final = "repository_name"
_MODEL_NAME: Final = "model_name"


class RequestDocument(NamedTuple):
    """A request as it is over HTTP: the names in its path, which may be empty, and its JSON."""

    path: dict[str, str]
    body: dict[str, Any]


def read_request(rpc: Rpc, data: Buffer, max_bytes: int = MAX_SERVER_DOCUMENT) -> RequestDocument:
    """Read a request of a gRPC client.

    Raises GatewayError: 400 that names message and field, 413 above a limit.
    """
    members = DocumentReader(rpc.request, data, max_bytes, MAX_REQUEST_VALUES, REQUEST).members
    path = {
        field.name: str(members.pop(field.member)) for field in rpc.request.fields if field.in_path
    }
    if _MODEL_NAME in path and not path[_MODEL_NAME] and path.get(_REPOSITORY_NAME):
        # Clients of KServe have the model's name where others have the repository's.
        path = {_REPOSITORY_NAME: "", _MODEL_NAME: path[_REPOSITORY_NAME]}
    return RequestDocument(path, _body(rpc.request, members))


def write_request(rpc: Rpc, path: Mapping[str, str], body: Any = None) -> bytes:
    """Write a request for a gRPC server; ``path`` are the names in the path that are known.

    ``body`` is the parsed JSON, or None without a body. Members that the protocol does not know
    are left out. Raises GatewayError (400) that names message and field.
    """
    names = {field.member: path.get(field.name) for field in rpc.request.fields if field.in_path}
    return DocumentWriter(rpc.request, REQUEST).write(_members(rpc.request, body), names)


def read_response(rpc: Rpc, data: Buffer, max_bytes: int = MAX_SERVER_DOCUMENT) -> Any:
    """Read a response of a gRPC server as the JSON that it would send over HTTP.

    Raises GatewayError (502) that names message and field, or the limit that it exceeds.
    """
    members = DocumentReader(rpc.response, data, max_bytes, MAX_RESPONSE_VALUES, RESPONSE).members
    return _body(rpc.response, members)


def write_response(rpc: Rpc, document: Any) -> bytes:
    """Write the JSON of a server's response over HTTP as a response for a gRPC client.

    An empty body is None. Raises GatewayError (502) that names message and field.
    """
    return DocumentWriter(rpc.response, RESPONSE).write(_members(rpc.response, document))


def _members(message: Message, body: Any) -> Any:
    if message.form is Form.BODY:
        return {body_field(message).member: body}
    return {} if body is None else body


def _body(message: Message, members: dict[str, Any]) -> Any:
    if message.form is not Form.BODY:
        return members
    field = body_field(message)
    return members.get(field.member, {})
