"""A Triton over gRPC whose model returns its inputs, also through system shared memory."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import grpc

from tests.support.grpc.proto_file import message_class
from tests.support.servers.grpc_server import Unary, model_metadata

_FOLDER = Path("/dev/shm")  # where shm_open(3) has its files
_REGION, _OFFSET, _SIZE = (f"shared_memory_{each}" for each in ("region", "offset", "byte_size"))


class GrpcSharedMemoryModel:
    """Serves ``unary`` methods: maps regions, reads inputs there and leaves outputs there.

    Model m has an input IN and an output OUT, of FP32 and ``shape`` by its metadata; requests may
    have others. A call ends with ``ending`` in place of its response, once it ``may_respond``.
    """

    def __init__(self, *shape: int) -> None:
        self.may_respond = threading.Event()
        self.may_respond.set()
        self.ending: tuple[grpc.StatusCode, str] | None = None
        self.regions: dict[str, mmap.mmap] = {}
        """By name. Without one, as after a restart, it does not know that region any more."""
        self.inferred: list[Any] = []
        """The message of each call."""
        self.unary: dict[str, Unary] = {
            "ModelInfer": self._infer,
            "ModelMetadata": model_metadata("FP32", *shape),
            "ModelConfig": lambda _request, _context: _write("ModelConfigResponse"),
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "SystemSharedMemoryStatus": self._list,
        }

    def _register(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        asked = message_class("SystemSharedMemoryRegisterRequest").FromString(data)
        if asked.name in self.regions:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"'{asked.name}' already in manager")
        descriptor = os.open(_FOLDER / asked.key.strip("/"), os.O_RDWR)
        try:
            self.regions[asked.name] = mmap.mmap(descriptor, asked.byte_size, offset=asked.offset)
        finally:
            os.close(descriptor)
        return b""

    def _unregister(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        asked = message_class("SystemSharedMemoryUnregisterRequest").FromString(data)
        for each in [asked.name] if asked.name else [*self.regions]:
            self.regions.pop(each, None)
        return b""

    def _list(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        response = message_class("SystemSharedMemoryStatusResponse")()
        for name in self.regions:
            response.regions[name].name = name
        return bytes(response.SerializeToString())

    def _infer(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        request = message_class("ModelInferRequest").FromString(data)
        for tensor in (*request.inputs, *request.outputs):
            region = tensor.parameters[_REGION].string_param if _REGION in tensor.parameters else ""
            if region and region not in self.regions:
                text = f"Unable to find shared memory region: '{region}'"
                context.abort(grpc.StatusCode.NOT_FOUND, text)
        self.inferred.append(request)
        self.may_respond.wait(20)
        if self.ending is not None:
            context.abort(*self.ending)
        response = message_class("ModelInferResponse")(model_name="m", id=request.id)
        wanted = {output.name: output for output in request.outputs}
        raw = iter(request.raw_input_contents)
        for tensor in request.inputs:
            place = self._slice(tensor)
            value = next(raw) if place is None else bytes(place)
            output = response.outputs.add(name=tensor.name.replace("IN", "OUT"), datatype="FP32")
            output.shape.extend(tensor.shape)
            place = self._slice(wanted[output.name]) if output.name in wanted else None
            if place is None:
                response.raw_output_contents.append(value)
                continue
            if len(place) < len(value):
                text = f"shared memory size specified with the request for output '{output.name}'"
                context.abort(grpc.StatusCode.INTERNAL, f"{text} ({len(place)} bytes) is too small")
            place[: len(value)] = value
            response.raw_output_contents.append(b"")
        return bytes(response.SerializeToString())

    def _slice(self, tensor: Any) -> memoryview | None:
        if _REGION not in tensor.parameters:
            return None
        region, start = tensor.parameters[_REGION], tensor.parameters[_OFFSET].int64_param
        size = tensor.parameters[_SIZE].int64_param
        return memoryview(self.regions[region.string_param])[start : start + size]


def _write(message: str) -> bytes:
    return bytes(message_class(message)().SerializeToString())
