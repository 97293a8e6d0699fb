"""Serve models with MLServer: python -m tests.integration.mlserver.serve HTTP_PORT GRPC_PORT."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import mlserver
import numpy as np
import numpy.typing as npt
from mlserver.codecs import Base64Codec, NumpyCodec, StringCodec
from mlserver.errors import ModelNotFound
from mlserver.repository import ModelRepository
from mlserver.types import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput

from tests.integration.mlserver.models import MODELS, RESHAPED, UNDECLARED
from tests.integration.triton.models import Model
from tests.support.servers.numpy_models import WORK

_BY_NAME = {model.name: model for model in MODELS}


class Served(mlserver.MLModel):  # type: ignore[misc]
    """One version of one model; what it does is looked up by its name."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Do the model's work, and answer with the outputs that are asked for."""
        inputs = {each.name: self._array(each) for each in payload.inputs}
        arrays = self._work(inputs)
        asked = [each.name for each in payload.outputs or ()] or list(arrays)
        return InferenceResponse(
            model_name=self.name,
            model_version=self.version,
            outputs=[self._output(name, arrays[name]) for name in asked],
        )

    async def predict_stream(
        self, payloads: AsyncIterator[InferenceRequest]
    ) -> AsyncIterator[InferenceResponse]:
        """Answer one request after the other."""
        async for payload in payloads:
            yield await self.predict(payload)

    def _work(self, inputs: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        model = _BY_NAME[self.name]
        if model.source == "versioned":
            return {"OUTPUT0": np.array([int(self.version)], np.int32)}
        return dict(WORK[model.source](inputs))

    def _array(self, tensor: RequestInput) -> npt.NDArray[Any]:
        if tensor.datatype != "BYTES":
            return np.asarray(self.decode(tensor, default_codec=NumpyCodec))
        elements = self.decode(tensor, default_codec=StringCodec)
        return np.array([*elements, None], object)[:-1].reshape(tensor.shape)

    def _output(self, name: str, array: npt.NDArray[Any]) -> ResponseOutput:
        if array.dtype == object:
            elements = array.ravel().tolist()
            is_text = all(isinstance(element, str) for element in elements)
            output = (StringCodec if is_text else Base64Codec).encode_output(name, elements)
        else:
            output = NumpyCodec.encode_output(name, array)
        if self.name != RESHAPED.name:
            output.shape = list(array.shape)
        return output


def _settings(model: Model, version: int) -> mlserver.ModelSettings:
    declared = model != UNDECLARED
    return mlserver.ModelSettings(
        name=model.name,
        implementation=Served,
        inputs=[each.metadata() for each in model.inputs] if declared else [],
        outputs=[each.metadata() for each in model.outputs] if declared else [],
        parameters=mlserver.settings.ModelParameters(version=str(version)),
    )


def _every_model() -> list[mlserver.ModelSettings]:
    return [_settings(model, version) for model in MODELS for version in model.versions]


class Repository(ModelRepository):  # type: ignore[misc]
    """The models that there are, though in no folder: the repository index is made of it."""

    def __init__(self, root: str) -> None:
        """Take what MLServer says, which is nothing here."""

    async def list(self) -> Sequence[mlserver.ModelSettings]:
        """Return all versions of all models."""
        return _every_model()

    async def find(self, name: str) -> Sequence[mlserver.ModelSettings]:
        """Return all versions of a model."""
        found = [model for model in _every_model() if model.name == name]
        if not found:
            raise ModelNotFound(name)
        return found


async def _serve(http_port: int, grpc_port: int) -> None:
    settings = mlserver.Settings(
        host="127.0.0.1",
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_endpoint=None,
        parallel_workers=0,
        debug=False,
        model_repository_implementation=Repository,
    )
    await mlserver.MLServer(settings).start(_every_model())


def main() -> None:
    """Serve all models until the process is told to end."""
    asyncio.run(_serve(*map(int, sys.argv[1:])))


if __name__ == "__main__":
    main()
