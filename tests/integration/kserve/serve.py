"""Serve models with KServe: python -m tests.integration.kserve.serve PORT, in its environment."""

import sys
from typing import Any

import kserve.model_server
from kserve import InferOutput, InferRequest, InferResponse, ModelServer
from kserve.protocol.rest.server import RESTServer
from kserve.utils.utils import generate_uuid

from tests.integration.kserve.models import ALWAYS_JSON, GIVES_ID_BACK, MODELS, UNDECLARED
from tests.integration.triton.models import Model
from tests.support.servers.numpy_models import WORK

_HOST = "127.0.0.1"
_GRACE_SECONDS = 1


class _LocalServer(RESTServer):  # type: ignore[misc]
    """KServe's HTTP server, which would be open to all networks."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.config.host = _HOST


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
        return InferResponse(
            response_id=payload.id or generate_uuid(),
            model_name=self.name,
            infer_outputs=[
                InferOutput(name, list(array.shape), datatypes[name], array)
                for name, array in outputs.items()
            ],
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
    server = ModelServer(http_port=int(sys.argv[1]), enable_grpc=False, grace_period=_GRACE_SECONDS)
    server.start([_KINDS.get(model, _Served)(model) for model in MODELS])


if __name__ == "__main__":
    main()
