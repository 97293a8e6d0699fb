"""Call servers by KServe's own gRPC client, and print what came back.

Usage, in KServe's environment: python -m tests.integration.kserve.grpc_client
It reads the addresses of servers, one in each line, and answers each with a line of JSON.
"""

import asyncio
import json
import logging
import sys
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferRequest

from tests.integration.kserve.client import HALVES, described, make_input, mixed_inputs

_SHORT = 0.2  # seconds, which the model slow does not keep


def _slow() -> InferRequest:
    return InferRequest(
        "slow", [make_input("INPUT0", "FP32", np.array([1], np.float32), binary=True)]
    )


async def _asked(client: InferenceGRPCClient, request: InferRequest, **options: Any) -> Any:
    try:
        return described(await client.infer(request, **options))
    except grpc.RpcError as error:
        return {"code": error.code().name, "error": error.details()}


async def _ask(address: str) -> dict[str, Any]:
    async with InferenceGRPCClient(address) as client:
        tensors = [make_input("INPUT0", "FP16", HALVES, binary=True)]
        responses = {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model ready": await client.is_model_ready("mixed"),
            "raw": await _asked(client, InferRequest("mixed", mixed_inputs(*[True] * 4))),
            "typed": await _asked(client, InferRequest("mixed", mixed_inputs(*[False] * 4))),
            "halves": await _asked(client, InferRequest("identity_fp16", tensors)),
            "error": await _asked(client, InferRequest("nope", mixed_inputs(*[True] * 4))),
            "deadline": await _asked(client, _slow(), timeout=_SHORT),
        }
        cancelled = asyncio.create_task(client.infer(_slow()))
        await asyncio.wait([cancelled], timeout=_SHORT)
        responses["cancel"] = cancelled.cancel()
        await asyncio.wait([cancelled])
        responses["cancel"] &= cancelled.cancelled()
        # The connection serves others on.
        responses["after"] = await _asked(client, InferRequest("mixed", mixed_inputs(*[True] * 4)))
        return responses


async def _answer() -> None:
    # In one event loop: gRPC's threads stay with the first.
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await _ask(line.strip()), default=bytes.decode), flush=True)


def main() -> None:
    """Call each server that a line names."""
    logging.disable()
    asyncio.run(_answer())


if __name__ == "__main__":
    main()
