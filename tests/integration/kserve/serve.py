"""Serve models with KServe: python -m tests.integration.kserve.serve HTTP_PORT GRPC_PORT.

It runs in KServe's environment.
"""

import sys
from typing import Any

import grpc.aio._server as grpc_server
import kserve.model_server
from kserve import InferOutput, InferRequest, InferResponse, ModelServer
from kserve.protocol.rest.server import RESTServer
from kserve.utils.utils import generate_uuid

from tests.integration.kserve.models import ALWAYS_JSON, GIVES_ID_BACK, MODELS, UNDECLARED
from tests.integration.triton.models import Model
from tests.support.servers.numpy_models import WORK

_HOST = "127.0.0.1"
_EVERY_NETWORK = "[::]"
_GRACE_SECONDS = 1


class _LocalServer(RESTServer):  # type: ignore[misc]
    """KServe's HTTP server, which would be open to all networks."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.config.host = _HOST


class _LocalGrpcServer(grpc_server.Server):  # type: ignore[misc]
    """A gRPC server as KServe runs it, which would be open to all networks."""

    def add_insecure_port(self, address: str) -> int:
        """Bind to the loopback address alone."""
        return int(super().add_insecure_port(address.replace(_EVERY_NETWORK, _HOST)))


class _Served(kserve.Model):  # type: ignore[misc]
    """One model, which answers as KServe's own helper get_predict_response would."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.name)
        self._model = model
        self.ready = True

    def predict(
        self, payload: InferRequest, headers: Any = None, response_headers: Any = None
    ) -> InferResponse:
        """Do the model's work, and answer in the forms that are asked for."""
        return self._answer(
            payload,
            use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=payload.request_outputs,
        )

    def get_input_types(self) -> list[dict[str, Any]]:
        """Return what the metadata tells of inputs."""
        return [each.metadata() for each in self._model.inputs]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Return what the metadata tells of outputs."""
        return [each.metadata() for each in self._model.outputs]

    def _answer(self, payload: InferRequest, **wanted: Any) -> InferResponse:
        outputs = WORK[self._model.source]({each.name: each.as_numpy() for each in payload.inputs})
        datatypes = {tensor.name: tensor.datatype for tensor in self._model.outputs}
        each = [
            InferOutput(name, list(array.shape), datatypes[name], array)
            for name, array in outputs.items()
        ]
        if payload.from_grpc:
            for output in each:
                # Arrays are for HTTP alone.
                output.set_data_from_numpy(output.data, wanted.get("use_binary_outputs", False))
        return InferResponse(
            response_id=payload.id or generate_uuid(),
            model_name=self.name,
            infer_outputs=each,
            **wanted,
        )


class _Undeclared(_Served):
    def get_input_types(self) -> list[dict[str, Any]]:
        return []

    def get_output_types(self) -> list[dict[str, Any]]:
        return []


class _AlwaysJson(_Served):
    def predict(
        self, payload: InferRequest, headers: Any = None, response_headers: Any = None
    ) -> InferResponse:
        return self._answer(payload)


class _GivesIdBack(_Served):
    def predict(
        self,
        payload: dict[str, Any] | InferRequest,
        headers: Any = None,
        response_headers: Any = None,
    ) -> Any:
        if isinstance(payload, dict):
            return {"predictions": payload["instances"]}
        response = self._answer(payload)
        response.id = payload.id
        return response


_KINDS = {UNDECLARED: _Undeclared, ALWAYS_JSON: _AlwaysJson, GIVES_ID_BACK: _GivesIdBack}


def main() -> None:
    """Serve all models until the process is told to end."""
    kserve.model_server.RESTServer = _LocalServer
    grpc_server.Server = _LocalGrpcServer
    http_port, grpc_port = map(int, sys.argv[1:])
    server = ModelServer(http_port=http_port, grpc_port=grpc_port, grace_period=_GRACE_SECONDS)
    server.start([_KINDS.get(model, _Served)(model) for model in MODELS])


if __name__ == "__main__":
    main()
