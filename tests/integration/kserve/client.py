"""Ask servers by KServe's own client, as its documentation shows, and print what came back.

Usage, in KServe's environment: python -m tests.integration.kserve.client
It reads the URLs of servers, one in each line, and answers each with a line of JSON.
"""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from httpx import HTTPStatusError
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import InferResponse, RequestedOutput

_FLOATS = np.array([0.1, -2, 3e38, 0], np.float32)
_LONGS = np.array([2**53 + 1, -(2**63)], np.int64)
_TEXTS = np.array(["é", "", "a\0b"], np.object_)
_FLAGS = np.array([True, False])
HALVES = np.array([0.1, -2, 65504], np.float16)


def make_input(name: str, datatype: str, array: Any, *, binary: bool) -> InferInput:
    """Make an input of a request; ``binary`` are raw contents over gRPC."""
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def mixed_inputs(*binary: bool) -> list[InferInput]:
    """Make the inputs of the model mixed: FP32, INT64, BYTES and BOOL."""
    datatypes = ("FP32", "INT64", "BYTES", "BOOL")
    arrays = (_FLOATS, _LONGS, _TEXTS, _FLAGS)
    each = zip(datatypes, arrays, binary, strict=True)
    return [make_input(f"IN_{name}", name, array, binary=form) for name, array, form in each]


def _requests() -> dict[str, InferRequest]:
    all_binary = {"binary_data_output": True}
    wanted = [
        RequestedOutput("OUT_BOOL", {"binary_data": True}),
        RequestedOutput("OUT_FP32", {"binary_data": False}),
    ]
    both = mixed_inputs(True, False, True, False)
    return {
        "binary to binary": InferRequest("mixed", mixed_inputs(*[True] * 4), parameters=all_binary),
        "json to json": InferRequest("mixed", mixed_inputs(*[False] * 4)),
        "json to binary": InferRequest("mixed", mixed_inputs(*[False] * 4), parameters=all_binary),
        "both to json": InferRequest("mixed", both, request_id="7"),
        "both to both": InferRequest("mixed", both, request_outputs=wanted),
        "halves": InferRequest(
            "identity_fp16",
            [make_input("INPUT0", "FP16", HALVES, binary=True)],
            parameters=all_binary,
        ),
    }


def described(response: InferResponse) -> dict[str, Any]:
    """Give what a response has, as JSON can have it."""
    outputs = {
        output.name: {
            "datatype": output.datatype,
            "dtype": str(output.as_numpy().dtype),
            "values": output.as_numpy().tolist(),
        }
        for output in response.outputs
    }
    return {"id": response.id, "model": response.model_name, "outputs": outputs}


async def _asked(client: InferenceRESTClient, url: str, request: InferRequest) -> dict[str, Any]:
    try:
        return described(await client.infer(url, request, request.model_name))
    except HTTPStatusError as error:
        return {"status": error.response.status_code, "error": str(error)}


async def _ask(url: str) -> dict[str, Any]:
    async with InferenceRESTClient(RESTConfig(protocol="v2", timeout=30)) as client:
        responses: dict[str, Any] = {
            "live": await client.is_server_live(url),
            "ready": await client.is_server_ready(url),
            "model ready": await client.is_model_ready(url, "mixed"),
            "other model ready": await client.is_model_ready(url, "nope"),
        }
        for name, request in _requests().items():
            responses[name] = await _asked(client, url, request)
        return responses


def main() -> None:
    """Ask each server that a line names."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_ask(line.strip()))), flush=True)


if __name__ == "__main__":
    main()
