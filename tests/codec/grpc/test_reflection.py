"""Reflection answers with the descriptors of the project's .proto files."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from gateway.codec.grpc.reflection import answer_reflection
from gateway.errors import ErrorKind
from gateway.protocol.grpc.descriptors import FILES, POOL
from gateway.protocol.grpc.methods import (
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    METHODS,
    REFLECTION_SERVICES,
)
from gateway.protocol.grpc.status import GrpcStatus
from tests.support.checks.refused import refused
from tests.support.grpc.generate_descriptors import FILE, descriptors
from tests.support.grpc.proto_file import message_class
from tests.support.grpc.wire_bytes import field

Request = message_class("grpc.reflection.v1.ServerReflectionRequest")
Response = message_class("grpc.reflection.v1.ServerReflectionResponse")


def _ask(**fields: Any) -> Any:
    request = Request(host="gateway.example", **fields)
    response = Response.FromString(answer_reflection(request.SerializeToString()))
    assert response.valid_host == "gateway.example"
    assert response.original_request == request
    return response


def _file(response: Any) -> Any:
    (file,) = response.file_descriptor_response.file_descriptor_proto
    return descriptor_pb2.FileDescriptorProto.FromString(file)


def test_descriptors_are_those_of_the_proto_files() -> None:
    """`make descriptors` writes them anew."""
    assert FILE.read_bytes() == descriptors()


def test_files_import_no_others() -> None:
    """A client gets one file for a symbol, and no others that this one would need."""
    assert [file.name for file in FILES.file if file.dependency] == []


def test_services_are_listed() -> None:
    listed = [each.name for each in _ask(list_services="*").list_services_response.service]
    assert listed == [INFERENCE_SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES]


def test_methods_are_those_that_the_gateway_knows() -> None:
    services = [INFERENCE_SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES]
    described = {
        f"/{name}/{method.name}": (method.client_streaming, method.server_streaming)
        for name in services
        for method in POOL.FindServiceByName(name).methods
    }
    known = {
        path: (method.request_streams, method.response_streams)
        for path, method in METHODS.items()
        if method.service in services
    }
    assert described == known


def test_file_is_found_by_its_name() -> None:
    for file in FILES.file:
        assert _file(_ask(file_by_filename=file.name)) == file


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("inference.GRPCInferenceService", "inference.proto"),
        ("inference.GRPCInferenceService.ModelInfer", "inference.proto"),
        ("inference.ModelInferRequest.InferInputTensor", "inference.proto"),
        ("inference.InferParameter.parameter_choice", "inference.proto"),
        ("inference.TYPE_FP32", "inference.proto"),
        (REFLECTION_SERVICES[1], "grpc/reflection/v1alpha/reflection.proto"),
    ],
)
def test_file_is_found_by_each_kind_of_symbol_in_it(symbol: str, file: str) -> None:
    assert _file(_ask(file_containing_symbol=symbol)).name == file


def test_messages_have_no_extensions() -> None:
    response = _ask(all_extension_numbers_of_type="inference.ModelInferRequest")
    numbers = response.all_extension_numbers_response
    assert numbers.base_type_name == "inference.ModelInferRequest"
    assert list(numbers.extension_number) == []


EXTENSION = {"containing_type": "a.B", "extension_number": -7}


@pytest.mark.parametrize(
    ("asked", "code", "text"),
    [
        ({"file_by_filename": "x.proto"}, GrpcStatus.NOT_FOUND, 'unknown file "x.proto"'),
        ({"file_containing_symbol": "inference"}, GrpcStatus.NOT_FOUND, 'symbol "inference"'),
        ({"file_containing_extension": EXTENSION}, GrpcStatus.NOT_FOUND, 'extension "a.B -7"'),
        ({"all_extension_numbers_of_type": "a.B"}, GrpcStatus.NOT_FOUND, 'unknown message "a.B"'),
        ({}, GrpcStatus.INVALID_ARGUMENT, "does not say what it asks for"),
    ],
)
def test_unknown_name_is_an_error_in_the_response(
    asked: dict[str, Any], code: GrpcStatus, text: str
) -> None:
    error = _ask(**asked).error_response
    assert error.error_code == code
    assert text in error.error_message


def test_invalid_request_is_refused() -> None:
    text = "the request is not valid protobuf: grpc.reflection.v1.ServerReflectionRequest.host"
    with refused(ErrorKind.BAD_REQUEST, f"{text}: a string that is not UTF-8 at byte 2"):
        answer_reflection(field(1, b"\xff"))
