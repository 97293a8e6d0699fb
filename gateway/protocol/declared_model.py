"""Models that the settings declare: which inputs they take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.errors import GatewayError, bad_request
from gateway.protocol.messages import InputTensor
from gateway.protocol.tensors import ModelMetadata, TensorSpec


@dataclass(frozen=True, slots=True)
class DeclaredModel:
    """A declared model.

    If it batches, ``max_batch_size`` is above 0 and the first dimension of every shape in
    ``metadata`` is the batch.
    """

    metadata: ModelMetadata
    max_batch_size: int = 0

    def check(self, inputs: Iterable[InputTensor]) -> None:
        """Check that the model takes these inputs.

        Raises GatewayError (400) that names model, input, and the declared and the received tensor.
        """
        for tensor in inputs:
            spec = _find(tensor.name, self.metadata.inputs)
            if spec is None:
                names = ", ".join(f"'{each.name}'" for each in self.metadata.inputs)
                raise bad_request(
                    f"model '{self.metadata.name}' has no input '{tensor.name}'; declared: {names}"
                )
            if tensor.datatype is not spec.datatype or not self._fits(tensor.shape, spec.shape):
                most = self.max_batch_size
                batch = f" in batches of 1 to {most}" if most else ""
                raise bad_request(
                    f"input '{tensor.name}' of model '{self.metadata.name}' is declared as "
                    f"{_describe(spec)}{batch}, got {tensor.datatype.name} {list(tensor.shape)}"
                )

    def accepts(self, inputs: Iterable[InputTensor]) -> bool:
        """Tell whether the model takes these inputs."""
        try:
            self.check(inputs)
        except GatewayError:
            return False
        return True

    def _fits(self, shape: Sequence[int], declared: Sequence[int]) -> bool:
        if len(shape) != len(declared):
            return False
        if self.max_batch_size and not 1 <= shape[0] <= self.max_batch_size:
            return False
        return all(want in (-1, size) for size, want in zip(shape, declared, strict=True))


def complete_metadata(reported: ModelMetadata, declared: DeclaredModel | None) -> ModelMetadata:
    """Complete the metadata that a server reports by the declared metadata."""
    if declared is None:
        return reported
    own = declared.metadata
    outputs = reported.outputs or own.outputs
    if not reported.inputs:
        return replace(own, outputs=outputs)
    batching = reported.batching
    if batching is None and _ranks(reported.inputs) == _ranks(own.inputs):
        batching = own.batching
    return replace(reported, batching=batching, outputs=outputs)


def _ranks(tensors: Iterable[TensorSpec]) -> dict[str, int]:
    return {tensor.name: len(tensor.shape) for tensor in tensors}


def find_differences(
    declared: DeclaredModel, reported: ModelMetadata, max_batch_size: int | None
) -> Iterator[str]:
    """Yield the differences between a declared model and what a server reports.

    ``max_batch_size`` is the server's own; None if unknown.
    """
    own = declared.metadata
    if max_batch_size not in (None, declared.max_batch_size):
        yield f"max_batch_size is {max_batch_size}, declared {declared.max_batch_size}"
    for word, wanted, actual in (
        ("input", own.inputs, reported.inputs),
        ("output", own.outputs, reported.outputs),
    ):
        if actual:
            yield from _find_tensor_differences(word, wanted, actual)
    for tensor in reported.inputs:
        if _find(tensor.name, own.inputs) is None:
            yield f"input '{tensor.name}' is not declared"


def _find_tensor_differences(
    word: str, wanted: Iterable[TensorSpec], actual: Iterable[TensorSpec]
) -> Iterator[str]:
    for spec in wanted:
        tensor = _find(spec.name, actual)
        if tensor is None:
            yield f"there is no {word} '{spec.name}'"
        elif (tensor.datatype, tensor.shape) != (spec.datatype, spec.shape):
            yield f"{word} '{spec.name}' is {_describe(tensor)}, declared {_describe(spec)}"


def _describe(spec: TensorSpec) -> str:
    return f"{spec.datatype.name} {list(spec.shape)}"


def _find(name: str, tensors: Iterable[TensorSpec]) -> TensorSpec | None:
    return next((tensor for tensor in tensors if tensor.name == name), None)
