"""The exceptions of the JSON are of messages and fields of the .proto files."""

from __future__ import annotations

from gateway.protocol.grpc.descriptors import POOL, message_class
from gateway.protocol.grpc.json_form import (
    BODIES,
    CHOICES,
    FIELDS,
    PACKAGE,
    PATH_NAMES,
    TRACE_VALUES,
)
from gateway.protocol.grpc.rpcs import KSERVE_RPCS, RPCS


def test_exceptions_are_of_messages_and_fields_that_exist() -> None:
    for name in (*CHOICES, *TRACE_VALUES):
        POOL.FindMessageTypeByName(PACKAGE + name)
    for name in FIELDS:
        POOL.FindFieldByName(PACKAGE + name)


def test_each_rpc_has_its_messages() -> None:
    """Of one whose JSON is the value of one field, the others are in the path."""
    for name, rpc in (*RPCS.items(), *KSERVE_RPCS.items()):
        assert rpc.name == name
        for kind in ("Request", "Response"):
            fields = {*message_class(f"{PACKAGE}{name}{kind}").DESCRIPTOR.fields_by_name}
            body = BODIES.get(f"{name}{kind}")
            assert body is None or fields - {*PATH_NAMES} == {body}
