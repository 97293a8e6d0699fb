"""The script of a Triton whose model returns its inputs, also through system shared memory."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
from typing import Any

from gateway.system import shared_memory
from tests.support.http_messages import http_response
from tests.support.inference_messages import HEADER_LENGTH
from tests.support.servers.scripted_server import Connection, ReceivedRequest

_REGION, _OFFSET, _SIZE = (f"shared_memory_{each}" for each in ("region", "offset", "byte_size"))

Fields = dict[str, Any]
_EXTENSIONS = ["binary_tensor_data", "model_configuration", "schedule_policy", "sequence"]
_EXTENSIONS += ["trace", "system_shared_memory"]


class SharedMemoryModel:
    """Plays on a ScriptedServer: maps regions, reads inputs there and leaves outputs there.

    Model m has an input IN0 and an output OUT0, of FP32 and ``shape`` by its metadata; requests may
    have others. It answers registrations with 501 while it is not ``is_on``, and infer requests
    once it ``may_respond``.
    """

    def __init__(self, *shape: int) -> None:
        self.is_on = True
        self.may_respond = asyncio.Event()
        self.may_respond.set()
        self.cut_after = ""
        """The operation on regions after which it once closes the connection and says nothing."""
        self.regions: dict[str, mmap.mmap] = {}
        """By name. Without one, as after a restart, it does not know that region any more."""
        self.inferred: list[Fields] = []
        """The JSON of each infer request."""
        model: Fields = {"name": "m", "versions": ["1"], "max_batch_size": 0}
        for kind in ("IN", "OUT"):
            entry = {"name": f"{kind}0", "datatype": "FP32", "shape": list(shape)}
            model[f"{kind.lower()}puts"] = [entry]
        self.metadata = http_response(json.dumps(model).encode())
        """The response that describes the model."""
        self.itself: Fields = {"name": "triton", "version": "2.51.0", "extensions": _EXTENSIONS}
        """What it says of itself."""
        self.managed: list[str] = []
        """The paths of all operations on regions."""

    async def __call__(self, connection: Connection) -> None:
        """Respond to each request."""
        while True:
            received = await connection.request()
            parts = received.head.target.strip("/").split("/")
            if len(parts) == 1:
                await connection.send(http_response(json.dumps(self.itself).encode()))
            elif parts[1] == "systemsharedmemory":
                self.managed.append(received.head.target)
                response = self._manage(parts, received.body)
                if parts[-1] == self.cut_after:
                    self.cut_after = ""
                    return
                await connection.send(response)
            elif parts[-1] == "infer":
                response = self._infer(received)
                await self.may_respond.wait()
                await connection.send(response)
            else:
                await connection.send(self.metadata)

    def _manage(self, parts: list[str], body: bytes) -> bytes:
        action, name = parts[-1], parts[3] if len(parts) > 3 else ""
        if not self.is_on:
            return _error("501 Not Implemented", "it is off without --allow-client-shm=true")
        if action == "status":
            return http_response(json.dumps([{"name": each} for each in self.regions]).encode())
        if action == "unregister":
            for each in [name] if name else [*self.regions]:
                self.regions.pop(each, None)
            return http_response()
        if name in self.regions:
            return _error("400 Bad Request", f"shared memory region '{name}' already in manager")
        fields = json.loads(body)
        descriptor = os.open(shared_memory.FOLDER / fields["key"].strip("/"), os.O_RDWR)
        try:
            self.regions[name] = mmap.mmap(descriptor, fields["byte_size"], offset=fields["offset"])
        finally:
            os.close(descriptor)
        return http_response()

    def _infer(self, received: ReceivedRequest) -> bytes:
        size = int(received.head.get(HEADER_LENGTH) or len(received.body))
        fields, binary = json.loads(received.body[:size]), received.body[size:]
        self.inferred.append(fields)
        wanted = {each["name"]: each["parameters"] for each in fields.get("outputs", ())}
        named = [each["parameters"].get(_REGION) for each in fields["inputs"]]
        named += [each.get(_REGION) for each in wanted.values()]
        for unknown in {each for each in named if each is not None} - self.regions.keys():
            return _error("404 Not Found", f"Unable to find shared memory region: '{unknown}'")
        outputs, data = [], b""
        for tensor in fields["inputs"]:
            name, place = tensor["name"].replace("IN", "OUT"), tensor["parameters"]
            if _REGION in place:
                value = bytes(self._slice(place))
            else:
                end = place["binary_data_size"]
                value, binary = binary[:end], binary[end:]
            told = wanted.get(name, {})
            if _REGION not in told:
                told = {"binary_data_size": len(value)}
                data += value
            elif told[_SIZE] < len(value):
                why = f"shared memory size specified with the request for output '{name}'"
                return _error("500 Internal Server Error", f"{why} is too small")
            else:
                self._slice(told)[: len(value)] = value
            outputs.append({**tensor, "name": name, "parameters": told})
        told = {"model_name": "m", "model_version": "1", "outputs": outputs}
        header = json.dumps(told).encode()
        return http_response(header + data, {HEADER_LENGTH: str(len(header))} if data else None)

    def _slice(self, place: Fields) -> memoryview:
        start = place.get(_OFFSET, 0)
        return memoryview(self.regions[place[_REGION]])[start : start + place[_SIZE]]


def _error(status: str, message: str) -> bytes:
    return http_response(json.dumps({"error": message}).encode(), status=status)
