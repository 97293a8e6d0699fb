"""The calls that each client makes through the gateway, and the server that they reach.

A client makes them by its own means and reports them as ``EXPECTED`` has it. As a module of its
own, this imports only grpcio: a client in another environment makes its calls by it, too.
"""

from __future__ import annotations

import json
import struct
import sys
from importlib import import_module
from typing import Any

import grpc

PATIENCE = 20.0
"""Seconds within which any call ends."""
DEADLINE = 0.3
"""Seconds after which the client gives up the call to ``slow`` that has a deadline."""
MISSING = "no model 'missing', says the sérver"
EXPECTED: dict[str, Any] = {
    "unary": [0.5, -2.0],
    "stream": [[1.0], [2.0], [3.0]],
    "error": [5, MISSING, "by name"],
    "deadline": 4,
    "cancel": 1,
}
"""Values, messages of a stream, status with text and trailer of an error, and two statuses."""


def report(infer: Any, stream: Any, message: Any) -> dict[str, Any]:
    """Make the calls by two multicallables of grpcio; ``message`` is the class of requests."""

    def request(model: str, *values: float, number: str = "") -> Any:
        made = message(model_name=model, id=number)
        made.inputs.add(name="INPUT0", datatype="FP32", shape=[len(values)])
        made.raw_input_contents.append(struct.pack(f"<{len(values)}f", *values))
        return made

    cancelled = infer.future(request("slow", 1.0, number="cancel"), timeout=PATIENCE)
    deadline = infer.future(request("slow", 1.0, number="deadline"), timeout=DEADLINE)
    failed = infer.future(request("missing", 1.0), timeout=PATIENCE)
    trailers = dict(failed.trailing_metadata())
    requests = (request("identity", number) for number in (1.0, 2.0, 3.0))
    reported = {
        "unary": _values(infer(request("identity", 0.5, -2.0), timeout=PATIENCE)),
        "stream": [_values(each.infer_response) for each in stream(requests, timeout=PATIENCE)],
        "error": [failed.code().value[0], failed.details(), trailers.get("found-by")],
        "deadline": deadline.code().value[0],
    }
    # By now the server has this call, too.
    cancelled.cancel()
    return {**reported, "cancel": cancelled.code().value[0]}


def _values(response: Any) -> list[float]:
    (contents,) = response.raw_output_contents
    return list(struct.unpack(f"<{len(contents) // 4}f", contents))


def main() -> None:
    """Make the calls by stubs that grpcio-tools has generated; the command line has the address."""
    messages, services = map(import_module, ("inference_pb2", "inference_pb2_grpc"))
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = services.GRPCInferenceServiceStub(channel)
        reported = report(stub.ModelInfer, stub.ModelStreamInfer, messages.ModelInferRequest)
    print(json.dumps(reported))


if __name__ == "__main__":
    main()
