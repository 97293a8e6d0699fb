"""By what models are told apart: their names, and versions."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.protocol.operations import Operation


@dataclass(frozen=True, slots=True)
class ModelName:
    """The name of a model, and the version of it that is meant, if one is."""

    name: str
    version: str | None = None


def model_name_of(operation: Operation) -> ModelName | None:
    """Give the model that a request names, if it names one."""
    return None if operation.model is None else ModelName(operation.model, operation.version)
