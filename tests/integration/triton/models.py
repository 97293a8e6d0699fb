"""The models that the tests' Triton serves, as data, and the repository written from them.

Their source is served.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVED = Path(__file__).with_name("served.py")
WORK = Path(__file__).parents[2] / "support" / "servers" / "numpy_models.py"

NUMERIC_DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "BF16", "FP32", "FP64"),
)
DATATYPES = (*NUMERIC_DATATYPES, "BYTES")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output; -1 in dims is a variable dimension, the batch dimension is left out."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (-1,)

    def config(self) -> str:
        """Write this tensor as config.pbtxt has it."""
        kind = "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"
        return f'{{ name: "{self.name}" data_type: {kind} dims: {list(self.dims)} }}'

    def metadata(self) -> dict[str, Any]:
        """Describe this tensor as a model's metadata does."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.dims)}


@dataclass(frozen=True, slots=True)
class Model:
    """One model; source is what served.py calls its work, max_batch_size 0 no batching."""

    name: str
    source: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch_size: int = 0
    versions: tuple[int, ...] = (1,)
    decoupled: bool = False

    def config(self) -> str:
        """Write this model's config.pbtxt."""
        lines = [
            f'name: "{self.name}"',
            'backend: "python"',
            f"max_batch_size: {self.max_batch_size}",
            *(f"input {tensor.config()}" for tensor in self.inputs),
            *(f"output {tensor.config()}" for tensor in self.outputs),
            "instance_group { kind: KIND_CPU count: 1 }",
            "version_policy { all { } }",
        ]
        if self.decoupled:
            lines.append("model_transaction_policy { decoupled: true }")
        return "\n".join(lines) + "\n"


def write_repository(models: tuple[Model, ...], folder: Path) -> None:
    """Write a model repository, as --model-repository wants it, into folder."""
    for model in models:
        home = folder / model.name
        for version in model.versions:
            version_home = home / str(version)
            version_home.mkdir(parents=True)
            texts = (f"SOURCE = {model.source!r}\n", WORK.read_text(), SERVED.read_text())
            (version_home / "model.py").write_text("\n".join(texts))
        (home / "config.pbtxt").write_text(model.config())


def _identity(name: str, datatype: str, *dims: int, max_batch_size: int = 0) -> Model:
    inputs, outputs = Tensor("INPUT0", datatype, dims), Tensor("OUTPUT0", datatype, dims)
    return Model(name, "identity", (inputs,), (outputs,), max_batch_size)


def _one_to_one(name: str, input_: Tensor, output: Tensor) -> Model:
    return Model(name, name, (input_,), (output,))


_IDENTITIES = (
    *(_identity(f"identity_{datatype.lower()}", datatype, -1) for datatype in DATATYPES),
    *(_identity(f"identity_{name}_2d", name.upper(), -1, -1) for name in ("fp32", "fp16", "bytes")),
    _identity("two_variable", "FP32", -1, -1),
)

_BATCHED = (
    _identity("batched_fp32", "FP32", 4, max_batch_size=8),
    _identity("batched_var", "FP32", -1, 4, max_batch_size=8),
    _identity("batched_bytes", "BYTES", 1, max_batch_size=8),
    _identity("image", "FP32", 3, 224, 224, max_batch_size=64),
)

_MIXED = ("FP32", "INT64", "BYTES", "BOOL")

_MANY_TENSORS = (
    Model(
        "add",
        "add",
        (Tensor("INPUT0", "FP32"), Tensor("INPUT1", "FP32")),
        (Tensor("SUM", "FP32"), Tensor("DIFFERENCE", "FP32")),
    ),
    Model(
        "mixed",
        "mixed",
        tuple(Tensor(f"IN_{datatype}", datatype) for datatype in _MIXED),
        tuple(Tensor(f"OUT_{datatype}", datatype) for datatype in _MIXED),
    ),
)

_SPECIAL = (
    _one_to_one("zeros", Tensor("INPUT0", "INT32", (1,)), Tensor("OUTPUT0", "FP32")),
    _one_to_one("slow", Tensor("INPUT0", "FP32", (1,)), Tensor("OUTPUT0", "FP32", (1,))),
    _one_to_one("fails", Tensor("INPUT0", "FP32"), Tensor("OUTPUT0", "FP32")),
    _one_to_one("with_parameters", Tensor("INPUT0", "FP32"), Tensor("OUTPUT0", "BYTES", (1,))),
    Model(
        "versioned",
        "versioned",
        (Tensor("INPUT0", "FP32"),),
        (Tensor("OUTPUT0", "INT32", (1,)),),
        versions=(1, 2),
    ),
    Model(
        "stream",
        "stream",
        (Tensor("text_input", "BYTES", (1,)),),
        (Tensor("text_output", "BYTES", (1,)),),
        decoupled=True,
    ),
    Model(
        "decoupled",
        "decoupled",
        (Tensor("text_input", "BYTES", (1,)),),
        (Tensor("text_output", "BYTES", (1,)), Tensor("parameters", "BYTES", (1,))),
        decoupled=True,
    ),
)

MODELS = (*_IDENTITIES, *_BATCHED, *_MANY_TENSORS, *_SPECIAL)


def named(*names: str) -> tuple[Model, ...]:
    """Pick some of MODELS by name, for a server of one's own; raise KeyError for an unknown one."""
    by_name = {model.name: model for model in MODELS}
    return tuple(by_name[name] for name in names)
