"""A gateway of the test process at whose admin address an operator tries calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.admin.try_it.requests import Call
from tests.support.addresses import free_address
from tests.support.gateway import RunningGateway, no_leaks, running_gateway
from tests.support.raw_client import RawClient, ReceivedResponse, connect

KEY = "token-of-operators-0123456789abcdef"
CLIENT_KEY = "token-of-clients-0123456789abcdef"
HEADERS = {
    "Host": "localhost",
    "Content-Type": "application/json",
    "Authorization": f"Bearer {KEY}",
}
NUMBERS = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "values": [1.5, -2]}

VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP16": [0.5, -65504],
    "FP32": [0.1, -3e38],
    "FP64": [0.1, -1e308],
    "BF16": [0.5, -2.0],
    "BYTES": ["", "é😀\n"],
}
"""Values of each datatype."""


def wanted(form: str = "json", model: str = "identity_fp32", **fields: Any) -> dict[str, Any]:
    """Describe a call."""
    return {"model": model, "version": "", "form": form, "inputs": [NUMBERS], "outputs": []} | (
        fields
    )


def call(form: str, *inputs: dict[str, Any], **fields: Any) -> Call:
    """Return a call as the gateway reads it."""
    return Call.model_validate({"form": form, "model": "m", "inputs": [*inputs], **fields})


@dataclass
class Trial:
    """A connection of an operator to the admin address of a gateway."""

    gateway: RunningGateway
    admin: str
    client: RawClient

    async def post(self, document: object, **headers: str) -> ReceivedResponse:
        """Try a call; a document as bytes is sent as it is."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return await self.client.call("POST", "/api/try", body, HEADERS | headers)

    async def done(self, document: object) -> dict[str, Any]:
        """Try a call that can be made."""
        response = await self.post(document)
        assert response.status == 200, response.body
        done: dict[str, Any] = response.json
        return done


@asynccontextmanager
async def trying(folder: Path, *urls: str, **arguments: Any) -> AsyncIterator[Trial]:
    """Run a gateway in front of servers; further arguments are those of ``running_gateway``."""
    admin, keys, clients = free_address(), folder / "keys", folder / "clients"
    keys.write_text(f"{KEY}\n")
    clients.write_text(f"{CLIENT_KEY}\n")
    groups = {"operators": {"file": str(keys)}}
    if arguments.get("route"):
        groups["clients"] = {"file": str(clients)}
    general = {
        "admin": {
            "listen": admin,
            "keys": "operators",
            **arguments.pop("allowed", {"payloads": True}),
        },
        "api_keys": groups,
        **arguments.pop("general", {}),
    }
    async with (
        no_leaks(),
        running_gateway(*urls, general=general, **arguments) as gateway,
        connect(f"http://{admin}") as client,
    ):
        yield Trial(gateway, admin, client)
