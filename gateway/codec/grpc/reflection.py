"""Answers the requests of server reflection: the services of the gateway, and their messages.

The protocol is grpc.reflection.v1, with reflection.proto's messages; v1alpha has the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.codec.grpc.document_reader import DocumentReader
from gateway.codec.grpc.document_writer import DocumentWriter
from gateway.codec.grpc.documents import MAX_REQUEST_VALUES
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE
from gateway.protocol.grpc.descriptors import Kind, load_files
from gateway.protocol.grpc.schema import find_message
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.grpc.wire import Buffer, bytes_field
from gateway.protocol.json_errors import quote_value

_REQUEST: Final = "grpc.reflection.v1.ServerReflectionRequest"
_RESPONSE: Final = "grpc.reflection.v1.ServerReflectionResponse"
_ORIGINAL_REQUEST: Final = 2


def answer_reflection(request: Buffer) -> bytes:
    """Return the response to a ServerReflectionRequest; what is unknown is an error in it.

    Raises GatewayError: 400 for invalid protobuf, 413 for more fields than any request needs.
    """
    size = len(request)
    asked = DocumentReader(find_message(_REQUEST), request, size, MAX_REQUEST_VALUES, REQUEST)
    host = asked.members.pop("host")
    response = {"valid_host": host, **_answer(asked.members)}
    written = DocumentWriter(find_message(_RESPONSE), RESPONSE).write(response)
    return written + bytes_field(_ORIGINAL_REQUEST, bytes(request))


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the member of a response that answers a question, the only one of its oneof."""
    for kind, asked in question.items():
        if kind == "list_services":
            services = [{"name": name} for name in _names(Kind.SERVICE)]
            return {"list_services_response": {"service": services}}
        if kind == "file_by_filename":
            return _file([file.data for file in load_files() if file.path == asked], "file", asked)
        if kind == "file_containing_symbol":
            found = [file.data for file in load_files() if asked in file.symbols]
            return _file(found, "symbol", asked)
        if kind == "file_containing_extension":
            return _unknown("extension", f"{asked['containing_type']} {asked['extension_number']}")
        if asked not in _names(Kind.MESSAGE):
            return _unknown("message", asked)
        return {"all_extension_numbers_response": {"base_type_name": asked}}
    return _error(GrpcStatus.INVALID_ARGUMENT, "the request does not say what it asks for")


def _names(kind: Kind) -> Iterator[str]:
    for file in load_files():
        yield from (name for name, each in file.symbols.items() if each.kind is kind)


def _file(found: list[bytes], what: str, asked: str) -> dict[str, Any]:
    if not found:
        return _unknown(what, asked)
    return {"file_descriptor_response": {"file_descriptor_proto": found}}


def _unknown(what: str, asked: str) -> dict[str, Any]:
    return _error(GrpcStatus.NOT_FOUND, f"unknown {what} {quote_value(asked)}")


def _error(code: GrpcStatus, text: str) -> dict[str, Any]:
    return {"error_response": {"error_code": int(code), "error_message": text}}
