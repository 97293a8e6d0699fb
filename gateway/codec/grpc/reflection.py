"""Answers the requests of server reflection: the services of the gateway, and their messages.

The protocol is grpc.reflection.v1, with reflection.proto's messages; v1alpha has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.codec.grpc.document_form import read_message
from gateway.codec.grpc.documents import MAX_REQUEST_VALUES
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.descriptors import FILES, POOL, message_class
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.grpc.wire import Buffer
from gateway.protocol.json_errors import quote_value

_REQUEST: Final = "grpc.reflection.v1.ServerReflectionRequest"
_RESPONSE: Final = "grpc.reflection.v1.ServerReflectionResponse"


def answer_reflection(request: Buffer) -> bytes:
    """Return the response to a ServerReflectionRequest; what is unknown is an error in it.

    Raises GatewayError: 400 for invalid protobuf, 413 for more fields than any request needs.
    """
    asked = read_message(_REQUEST, request, len(request), MAX_REQUEST_VALUES, REQUEST)
    answer = message_class(_RESPONSE)(
        valid_host=asked.host, original_request=asked, **_answer(asked)
    )
    return bytes(answer.SerializeToString())


def _answer(request: Any) -> dict[str, Any]:
    """Return the field of a response that answers a request."""
    kind = request.WhichOneof("message_request")
    asked = kind and getattr(request, kind)
    if kind == "list_services":
        names = [f"{file.package}.{each.name}" for file in FILES.file for each in file.service]
        return {"list_services_response": {"service": [{"name": name} for name in names]}}
    if kind == "file_by_filename":
        return _file(POOL.FindFileByName, "file", asked)
    if kind == "file_containing_symbol":
        return _file(_find_file, "symbol", asked)
    if kind == "file_containing_extension":
        return _unknown("extension", f"{asked.containing_type} {asked.extension_number}")
    if kind == "all_extension_numbers_of_type":
        try:
            POOL.FindMessageTypeByName(asked)
        except KeyError:
            return _unknown("message", asked)
        return {"all_extension_numbers_response": {"base_type_name": asked}}
    return _error(GrpcStatus.INVALID_ARGUMENT, "the request does not say what it asks for")


def _find_file(symbol: str) -> Any:
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:  # it does not look at methods
        return POOL.FindMethodByName(symbol).containing_service.file


def _file(find: Callable[[str], Any], what: str, asked: str) -> dict[str, Any]:
    try:
        found = find(asked).serialized_pb
    except KeyError:
        return _unknown(what, asked)
    return {"file_descriptor_response": {"file_descriptor_proto": [found]}}


def _unknown(what: str, asked: str) -> dict[str, Any]:
    return _error(GrpcStatus.NOT_FOUND, f"unknown {what} {quote_value(asked)}")


def _error(code: GrpcStatus, text: str) -> dict[str, Any]:
    return {"error_response": {"error_code": int(code), "error_message": text}}
