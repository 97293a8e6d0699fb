"""A gRPC server of the inference protocol on grpcio, in threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from tests.support.grpc.proto_file import message_class
from tests.support.grpc.wire_bytes import encode

SERVICE = "inference.GRPCInferenceService"

Unary = Callable[[bytes, grpc.ServicerContext], bytes]
Streaming = Callable[[Iterator[bytes], grpc.ServicerContext], Iterable[bytes]]


class GrpcServer:
    """Serves each method with a function over messages as bytes.

    ``unary`` are by the name of the method, or by the path for other services; ``streams`` stream
    both ways. It records the paths, the metadata and the requests of calls. With ``credentials`` it
    serves over TLS.
    """

    def __init__(
        self,
        unary: dict[str, Unary] | None = None,
        streams: dict[str, Streaming] | None = None,
        options: Iterable[tuple[str, Any]] = (),
        credentials: grpc.ServerCredentials | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.unary = {**_DEFAULTS, **(unary or {})}
        self.streams = {"ModelStreamInfer": stream_identity, **(streams or {})}
        self.paths: list[str] = []
        self.metadata: list[list[tuple[str, Any]]] = []
        self.requests: list[bytes] = []
        self.cancelled = threading.Event()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(16),
            handlers=[self],
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1), *options),
        )
        if credentials is None:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        else:
            self.port = self._server.add_secure_port(f"{host}:{port}", credentials)
        self.address = f"{host}:{self.port}"
        self.url = f"grpc{'s' if credentials else ''}://{self.address}"

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Find the function of a call."""
        path = details.method
        self.paths.append(path)
        self.metadata.append([(pair[0], pair[1]) for pair in details.invocation_metadata])
        name = path.removeprefix(f"/{SERVICE}/")
        if name in self.unary:
            return grpc.unary_unary_rpc_method_handler(self._recorded(self.unary[name]))
        if name in self.streams:
            return grpc.stream_stream_rpc_method_handler(self.streams[name])
        return None

    def _recorded(self, serve: Unary) -> Unary:
        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.requests.append(request)
            return serve(request, context)

        return call

    def start(self) -> None:
        """Start serving."""
        self._server.start()

    def stop(self, grace: float = 0.0) -> None:
        """Stop; calls have ``grace`` seconds."""
        self._server.stop(grace).wait()


@contextmanager
def grpc_server(**arguments: Any) -> Iterator[GrpcServer]:
    """Run a server; see GrpcServer."""
    server = GrpcServer(**arguments)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def infer_identity(data: bytes, context: grpc.ServicerContext) -> bytes:
    """Return the inputs of a request as outputs, in the form in which they came."""
    request = message_class("ModelInferRequest").FromString(data)
    response = message_class("ModelInferResponse")(
        model_name=request.model_name, model_version=request.model_version or "1", id=request.id
    )
    for tensor in request.inputs:
        output = response.outputs.add(name=tensor.name.replace("IN", "OUT"))
        output.datatype = tensor.datatype
        output.shape.extend(tensor.shape)
        output.contents.CopyFrom(tensor.contents)
        if request.raw_input_contents:
            output.ClearField("contents")
    response.raw_output_contents.extend(request.raw_input_contents)
    return bytes(response.SerializeToString())


def stream_identity(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
    """Respond to each request of a stream as ``infer_identity``, in Triton's message."""
    for request in requests:
        response = infer_identity(request, context)
        yield b"\x12" + encode(len(response)) + response


def respond(message: str, /, **fields: Any) -> Unary:
    """Make a function that returns the same message each time."""
    data = bytes(message_class(message)(**fields).SerializeToString())
    return lambda _request, _context: data


def fail(code: grpc.StatusCode, text: str) -> Unary:
    """Make a function that fails with a status."""

    def call(_request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(code, text)
        raise AssertionError("abort raises")

    return call


def model_metadata(datatype: str = "FP32", *shape: int) -> Unary:
    """Make a function that describes a model with one input IN and one output OUT."""
    tensor = message_class("ModelMetadataResponse").TensorMetadata
    return respond(
        "ModelMetadataResponse",
        name="m",
        versions=["1"],
        platform="identity",
        inputs=[tensor(name="IN", datatype=datatype, shape=shape or (-1,))],
        outputs=[tensor(name="OUT", datatype=datatype, shape=shape or (-1,))],
    )


_DEFAULTS: dict[str, Unary] = {
    "ModelInfer": infer_identity,
    "ModelMetadata": model_metadata(),
    "ServerLive": respond("ServerLiveResponse", live=True),
    "ServerReady": respond("ServerReadyResponse", ready=True),
    "ModelReady": respond("ModelReadyResponse", ready=True),
    "ServerMetadata": respond(
        "ServerMetadataResponse", name="triton", version="2.51.0", extensions=["binary_tensor_data"]
    ),
}
