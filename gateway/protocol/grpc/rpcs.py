"""The RPCs beside inference, with their messages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Final

from gateway.protocol.grpc.methods import INFERENCE_SERVICE, METHODS
from gateway.protocol.grpc.schema import Field, Message, Scalar, find_message
from gateway.protocol.operations import OperationKind


class Rpc:
    """A method of ``inference.GRPCInferenceService``; its messages are looked up when needed."""

    def __init__(self, name: str) -> None:
        self.name: Final = name

    @cached_property
    def request(self) -> Message:
        """Return the schema of its requests."""
        return find_message(f"inference.{self.name}Request")

    @cached_property
    def response(self) -> Message:
        """Return the schema of its responses."""
        return find_message(f"inference.{self.name}Response")


class _KServeLoad(Rpc):
    """KServe's form of a load or unload: the name of the model comes first."""

    @cached_property
    def request(self) -> Message:
        """Return the schema of its requests."""
        return Message(f"{self.name}Request", (Field(1, "model_name", Scalar.TEXT),))


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
        **{name: _KServeLoad(name) for name in ("RepositoryModelLoad", "RepositoryModelUnload")},
    }
)
"""The RPCs as KServe's server has them: its loads have other field numbers."""
