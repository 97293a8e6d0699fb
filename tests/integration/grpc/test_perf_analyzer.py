"""NVIDIA's load generator drives every server over gRPC through the gateway."""

from tests.integration.support.fixtures import Reached
from tests.integration.support.gateway import Gateway
from tests.integration.support.perf_analyzer import perf_analyzer

CALLS = 100


def test_each_server_answers_all_calls(any_gateway: Gateway, any_upstream: Reached) -> None:
    shapes = ("--shape", "INPUT0:8", "--shape", "INPUT1:8")
    text = ("--shape", "INPUT0:2", "--string-length", "16", "--grpc-compression-algorithm", "gzip")
    assert perf_analyzer(any_gateway, "add", CALLS, "-i", "grpc", *shapes) >= CALLS
    assert perf_analyzer(any_gateway, "identity_bytes", CALLS, "-i", "grpc", *text) >= CALLS
    if not any_upstream.over_grpc or any_upstream.name == "triton":
        stream = ("--streaming", "--shape", "INPUT0:8")
        assert perf_analyzer(any_gateway, "identity_fp32", CALLS, "-i", "grpc", *stream) >= CALLS
