"""Models that an operator declares: what requests for them may bring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.errors import GatewayError, bad_request
from gateway.protocol.request_header import InputTensor
from gateway.protocol.tensors import ModelMetadata, TensorSpec


@dataclass(frozen=True, slots=True)
class DeclaredModel:
    """A model as it is declared.

    Of one that batches, ``max_batch_size`` is above 0, and the leading dimension of every shape in
    ``metadata`` is that of the batch.
    """

    metadata: ModelMetadata
    max_batch_size: int = 0

    def check(self, inputs: Iterable[InputTensor]) -> None:
        """Refuse inputs that the model cannot take.

        Raises GatewayError (400) that names model and input, what is declared and what came.
        """
        for tensor in inputs:
            spec = _named(tensor.name, self.metadata.inputs)
            if spec is None:
                known = ", ".join(f"'{each.name}'" for each in self.metadata.inputs)
                raise bad_request(
                    f"model '{self.metadata.name}' has no input '{tensor.name}'; declared: {known}"
                )
            if tensor.datatype is not spec.datatype or not self._fits(tensor.shape, spec.shape):
                raise bad_request(
                    f"input '{tensor.name}' of model '{self.metadata.name}' is declared as "
                    f"{self._described(spec)}, got {tensor.datatype.name} {list(tensor.shape)}"
                )

    def accepts(self, inputs: Iterable[InputTensor]) -> bool:
        """Tell whether the model can take these inputs."""
        try:
            self.check(inputs)
        except GatewayError:
            return False
        return True

    def _described(self, spec: TensorSpec) -> str:
        batch = f" in batches of 1 to {self.max_batch_size}" if self.max_batch_size else ""
        return f"{_shown(spec)}{batch}"

    def _fits(self, shape: Sequence[int], declared: Sequence[int]) -> bool:
        if len(shape) != len(declared):
            return False
        if self.max_batch_size and not 1 <= shape[0] <= self.max_batch_size:
            return False
        return all(want in (-1, size) for size, want in zip(shape, declared, strict=True))


def complete_metadata(known: ModelMetadata, declared: DeclaredModel | None) -> ModelMetadata:
    """Give what a server says of a model, and what is declared where it says nothing."""
    if declared is None:
        return known
    own = declared.metadata
    outputs = known.outputs or own.outputs
    if not known.inputs:
        return replace(own, outputs=outputs)
    batching = known.batching
    if batching is None and _ranks(known.inputs) == _ranks(own.inputs):
        batching = own.batching
    return replace(known, batching=batching, outputs=outputs)


def _ranks(tensors: Iterable[TensorSpec]) -> dict[str, int]:
    return {tensor.name: len(tensor.shape) for tensor in tensors}


def find_differences(
    declared: DeclaredModel, known: ModelMetadata, max_batch_size: int | None
) -> Iterator[str]:
    """Tell what a server says of a model, as far as it says it, that is not as declared.

    ``max_batch_size`` is the server's own, None where it is not known.
    """
    own = declared.metadata
    if max_batch_size not in (None, declared.max_batch_size):
        yield f"max_batch_size is {max_batch_size}, declared {declared.max_batch_size}"
    for word, wanted, found in (
        ("input", own.inputs, known.inputs),
        ("output", own.outputs, known.outputs),
    ):
        if found:
            yield from _of_tensors(word, wanted, found)
    for tensor in known.inputs:
        if _named(tensor.name, own.inputs) is None:
            yield f"input '{tensor.name}' is not declared"


def _of_tensors(
    word: str, wanted: Iterable[TensorSpec], found: Iterable[TensorSpec]
) -> Iterator[str]:
    for spec in wanted:
        tensor = _named(spec.name, found)
        if tensor is None:
            yield f"there is no {word} '{spec.name}'"
        elif (tensor.datatype, tensor.shape) != (spec.datatype, spec.shape):
            yield f"{word} '{spec.name}' is {_shown(tensor)}, declared {_shown(spec)}"


def _shown(spec: TensorSpec) -> str:
    return f"{spec.datatype.name} {list(spec.shape)}"


def _named(name: str, tensors: Iterable[TensorSpec]) -> TensorSpec | None:
    return next((tensor for tensor in tensors if tensor.name == name), None)
