"""The responses that tell errors, over HTTP and gRPC; tests of the listener drop real calls."""

import pytest

from gateway.observe.call_record import CallRecord
from gateway.proxy.errors import end_dropped_call, error_body, is_grpc_content


@pytest.mark.parametrize("has_started", [False, True])
def test_dropped_call_ends_with_unavailable_and_its_error(has_started: bool) -> None:
    record = CallRecord("POST", "/a.b/c")
    record.error = "100 % über"
    lines = end_dropped_call(record, has_started)
    assert lines[-2:] == (("grpc-status", "14"), ("grpc-message", "100 %25 %C3%BCber"))
    assert lines[:-2] == (
        () if has_started else ((":status", "200"), ("content-type", "application/grpc"))
    )
    assert (record.status, record.grpc_status) == (503, 14)


def test_content_of_grpc_is_recognized() -> None:
    assert is_grpc_content(b"application/grpc")
    assert is_grpc_content(b"application/grpc+proto")
    assert not is_grpc_content(b"application/grpc-web")
    assert not is_grpc_content(b"application/\xff")


def test_error_body_is_a_json_object() -> None:
    assert error_body("say “what”\n") == '{"error":"say “what”\\n"}'.encode()
    # How aiohttp decodes a header that is not UTF-8.
    assert error_body("caf\udce9") == b'{"error":"caf?"}'
