"""The messages of the RPCs, as the official runtime has them, and the exceptions of their JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from gateway.protocol.grpc.rpcs import KSERVE_RPCS, RPCS
from gateway.protocol.grpc.schema import (
    EXCEPTIONS,
    FORMS,
    Enumeration,
    Field,
    Form,
    Message,
    Scalar,
    body_field,
)
from tests.support.grpc.proto_file import message_class

TYPES = {
    "bool": FieldDescriptor.TYPE_BOOL,
    "bytes": FieldDescriptor.TYPE_BYTES,
    "double": FieldDescriptor.TYPE_DOUBLE,
    "float": FieldDescriptor.TYPE_FLOAT,
    "int32": FieldDescriptor.TYPE_INT32,
    "int64": FieldDescriptor.TYPE_INT64,
    "string": FieldDescriptor.TYPE_STRING,
    "uint32": FieldDescriptor.TYPE_UINT32,
    "uint64": FieldDescriptor.TYPE_UINT64,
}
MAX_DEPTH = 10


def parts(message: Message, depth: int = 0) -> Iterator[Message]:
    """Yield a message and all within it."""
    assert depth < MAX_DEPTH, message.name
    yield message
    for field in message.fields:
        if isinstance(field.kind, Message):
            yield from parts(field.kind, depth + 1)


MESSAGES = {
    message.name: message
    for rpc in RPCS.values()
    for top in (rpc.request, rpc.response)
    for message in parts(top)
}


def check_kind(field: Field, descriptor: Any) -> None:
    if isinstance(field.kind, Scalar):
        assert descriptor.type == TYPES[field.kind.protobuf_name], field.name
    elif isinstance(field.kind, Enumeration):
        values = [(value.name, value.number) for value in descriptor.enum_type.values]
        assert values == [(name, number) for number, name in enumerate(field.kind.values)]
    else:
        assert descriptor.message_type.full_name == f"inference.{field.kind.name}"


def test_messages_are_those_of_the_proto_file() -> None:
    for name, message in MESSAGES.items():
        check_message(message, message_class(name).DESCRIPTOR.fields_by_name)
        members = [field.member for field in message.fields]
        assert len(set(members)) == len(members)


def check_message(message: Message, descriptors: Any) -> None:
    assert {each.name: each.number for each in message.fields} == {
        name: each.number for name, each in descriptors.items()
    }
    for field in message.fields:
        descriptor = descriptors[field.name]
        oneof = descriptor.containing_oneof
        assert field.oneof == ("" if oneof is None else oneof.name)
        entry = descriptor.message_type
        if field.entry is not None:
            assert entry.GetOptions().map_entry
            check_kind(field.entry.fields[0], entry.fields_by_name["key"])
            check_kind(field, entry.fields_by_name["value"])
        else:
            assert field.repeated == descriptor.is_repeated
            check_kind(field, descriptor)


def test_exceptions_of_the_json_are_of_messages_and_fields_that_exist() -> None:
    assert FORMS.keys() <= MESSAGES.keys()
    fields = {f"{name}.{field.name}" for name in MESSAGES for field in MESSAGES[name].fields}
    assert EXCEPTIONS.keys() <= fields


def test_messages_are_named_after_their_rpc() -> None:
    for name, rpc in (*RPCS.items(), *KSERVE_RPCS.items()):
        assert rpc.name == name
        assert rpc.request.name == f"{name}Request"
        assert rpc.response.name == f"{name}Response"
        for message in (rpc.request, rpc.response):
            assert message.form in (Form.OBJECT, Form.BODY)
            if message.form is Form.BODY:
                assert not body_field(message).in_path


def test_kserve_has_the_name_of_a_loaded_model_first() -> None:
    for name in KSERVE_RPCS:
        if name in ("RepositoryModelLoad", "RepositoryModelUnload"):
            (field,) = KSERVE_RPCS[name].request.fields
            assert (field.number, field.name, field.in_path) == (1, "model_name", True)
        else:
            assert KSERVE_RPCS[name] is RPCS[name]
