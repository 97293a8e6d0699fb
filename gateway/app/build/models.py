"""Settings → declared models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.settings.models import Model, Tensor


def declared_models(models: Mapping[str, Model]) -> dict[str, DeclaredModel]:
    """Build the declared models, by name."""
    return {name: _declared(name, model) for name, model in models.items()}


def _declared(name: str, model: Model) -> DeclaredModel:
    batching = model.max_batch_size > 0
    metadata = ModelMetadata(
        name, _specs(model.inputs, batching), batching, _specs(model.outputs, batching)
    )
    return DeclaredModel(metadata, model.max_batch_size)


def _specs(tensors: Iterable[Tensor], batching: bool) -> tuple[TensorSpec, ...]:
    # As in servers' metadata, the batch dimension comes first.
    batch = (-1,) if batching else ()
    return tuple(
        TensorSpec(tensor.name, DATATYPES[tensor.datatype], (*batch, *tensor.shape))
        for tensor in tensors
    )
