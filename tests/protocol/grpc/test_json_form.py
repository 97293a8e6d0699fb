"""The exceptions of the JSON are of messages and fields of the .proto files."""

from __future__ import annotations

from gateway.protocol.grpc.descriptors import POOL
from gateway.protocol.grpc.json_form import (
    CHOICES,
    FIELDS,
    PACKAGE,
    TRACE_VALUES,
)


def test_exceptions_are_of_messages_and_fields_that_exist() -> None:
    for name in (*CHOICES, *TRACE_VALUES):
        POOL.FindMessageTypeByName(PACKAGE + name)
    for name in FIELDS:
        POOL.FindFieldByName(PACKAGE + name)
