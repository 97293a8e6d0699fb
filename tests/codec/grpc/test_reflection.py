"""Reflection answers with the descriptors of the project's .proto files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.grpc.reflection import answer_reflection
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.methods import (
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    METHODS,
    REFLECTION_SERVICES,
)
from gateway.protocol.grpc.status import GrpcStatus
from tests.support.grpc.generate_descriptors import FILE, descriptors
from tests.support.grpc.proto_file import make_pool, message_class, proto_files
from tests.support.grpc.wire_bytes import field, mutated

Request = message_class("grpc.reflection.v1.ServerReflectionRequest")
Response = message_class("grpc.reflection.v1.ServerReflectionResponse")

FILES = {file.name: file for file in proto_files().file}


def _ask(**fields: Any) -> Any:
    request = Request(host="gateway.example", **fields)
    response = Response.FromString(answer_reflection(request.SerializeToString()))
    assert response.valid_host == "gateway.example"
    assert response.original_request == request
    return response


def _file(response: Any) -> Any:
    (file,) = response.file_descriptor_response.file_descriptor_proto
    return descriptor_pb2.FileDescriptorProto.FromString(file)


def _symbols() -> Iterator[tuple[str, str]]:
    """Yield the full name of everything in the files, as the runtime has it, and its file."""
    pool = make_pool(proto_files())
    for file in map(pool.FindFileByName, FILES):
        for service in file.services_by_name.values():
            yield service.full_name, file.name
            yield from ((method.full_name, file.name) for method in service.methods)
        for message in file.message_types_by_name.values():
            yield from ((name, file.name) for name in _of_message(message))


def _of_message(message: Any) -> Iterator[str]:
    yield message.full_name
    for part in (*message.fields, *message.oneofs, *message.enum_types):
        yield part.full_name
    for enum in message.enum_types:
        yield from (f"{message.full_name}.{value.name}" for value in enum.values)
    for nested in message.nested_types:
        yield from _of_message(nested)


SYMBOLS = dict(_symbols())


def test_descriptors_are_those_of_the_proto_files() -> None:
    """`make descriptors` writes them anew."""
    assert FILE.read_bytes() == descriptors()


def test_files_import_no_others() -> None:
    """A client gets one file for a symbol, and no others that this one would need."""
    assert [name for name, file in FILES.items() if file.dependency] == []


def test_services_are_listed() -> None:
    listed = [each.name for each in _ask(list_services="*").list_services_response.service]
    assert listed == [INFERENCE_SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES]


def test_methods_are_those_that_the_gateway_knows() -> None:
    services = [INFERENCE_SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES]
    pool = make_pool(proto_files())
    described = {
        f"/{name}/{method.name}": (method.client_streaming, method.server_streaming)
        for name in services
        for method in pool.FindServiceByName(name).methods
    }
    known = {
        path: (method.request_streams, method.response_streams)
        for path, method in METHODS.items()
        if method.service in services
    }
    assert described == known


@pytest.mark.parametrize("name", FILES)
def test_file_is_found_by_its_name(name: str) -> None:
    assert _file(_ask(file_by_filename=name)) == FILES[name]


def test_file_is_found_by_each_symbol_in_it() -> None:
    found = {symbol: _file(_ask(file_containing_symbol=symbol)).name for symbol in SYMBOLS}
    assert found == SYMBOLS


def test_messages_have_no_extensions() -> None:
    response = _ask(all_extension_numbers_of_type="inference.ModelInferRequest")
    numbers = response.all_extension_numbers_response
    assert numbers.base_type_name == "inference.ModelInferRequest"
    assert list(numbers.extension_number) == []


@pytest.mark.parametrize(
    ("asked", "code", "text"),
    [
        ({"file_by_filename": "x.proto"}, GrpcStatus.NOT_FOUND, 'unknown file "x.proto"'),
        ({"file_by_filename": ""}, GrpcStatus.NOT_FOUND, 'unknown file ""'),
        ({"file_containing_symbol": "inference"}, GrpcStatus.NOT_FOUND, 'symbol "inference"'),
        ({"file_containing_symbol": "x" * 99}, GrpcStatus.NOT_FOUND, f'symbol "{"x" * 59}...'),
        (
            {"file_containing_extension": {"containing_type": "a.B", "extension_number": -7}},
            GrpcStatus.NOT_FOUND,
            'unknown extension "a.B -7"',
        ),
        (
            {"all_extension_numbers_of_type": INFERENCE_SERVICE},
            GrpcStatus.NOT_FOUND,
            f'unknown message "{INFERENCE_SERVICE}"',
        ),
        ({}, GrpcStatus.INVALID_ARGUMENT, "does not say what it asks for"),
    ],
)
def test_unknown_name_is_an_error_in_the_response(
    asked: dict[str, Any], code: GrpcStatus, text: str
) -> None:
    error = _ask(**asked).error_response
    assert error.error_code == code
    assert text in error.error_message


def test_last_of_several_questions_is_answered() -> None:
    request = field(7, b"*") + field(3, b"inference.proto")
    response = Response.FromString(answer_reflection(request))
    assert _file(response).name == "inference.proto"


@given(
    mutated(
        st.one_of(
            st.builds(
                Request, host=st.text(max_size=3), file_by_filename=st.sampled_from([*FILES])
            ),
            st.builds(Request, file_containing_symbol=st.sampled_from([*SYMBOLS])),
            st.builds(
                Request,
                file_containing_extension=st.builds(
                    message_class("grpc.reflection.v1.ExtensionRequest"),
                    containing_type=st.text(max_size=3),
                    extension_number=st.integers(-(2**31), 2**31 - 1),
                ),
            ),
        ).map(lambda request: bytes(request.SerializeToString()))
    )
)
def test_request_is_valid_where_the_runtime_says_so(data: bytes) -> None:
    try:
        expected = Request.FromString(data)
    except DecodeError:
        with pytest.raises(GatewayError) as refused:
            answer_reflection(data)
        assert refused.value.kind is ErrorKind.BAD_REQUEST
        return
    response = Response.FromString(answer_reflection(data))
    assert response.valid_host == expected.host
    assert response.WhichOneof("message_response") is not None
