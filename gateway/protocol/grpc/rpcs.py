"""The RPCs beside inference."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from gateway.protocol.grpc.methods import INFERENCE_SERVICE, METHODS
from gateway.protocol.operations import OperationKind


class Rpc(NamedTuple):
    """A method of ``inference.GRPCInferenceService``."""

    name: str
    names_model_first: bool = False
    """Whether its request has the model's name as field 1, and nothing else: KServe's loads."""


RPCS: Final[Mapping[str, Rpc]] = MappingProxyType(
    {
        method.name: Rpc(method.name)
        for method in METHODS.values()
        if method.service == INFERENCE_SERVICE and method.kind is not OperationKind.INFER
    }
)
"""The RPCs by name, as Triton and MLServer have them. KServe's clients are understood, too."""

KSERVE_RPCS: Final[Mapping[str, Rpc]] = MappingProxyType(
    {
        **RPCS,
        **{name: Rpc(name, True) for name in ("RepositoryModelLoad", "RepositoryModelUnload")},
    }
)
"""The RPCs as KServe's server has them."""
