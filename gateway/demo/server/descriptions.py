"""What the server tells of itself and its models: metadata, config, statistics."""

from dataclasses import dataclass
from typing import Any, Final

from gateway.demo.server.inference import full_shape
from gateway.demo.server.models import VERSION, Model, TensorSpec

SERVER: Final = {
    "name": "tensorgate-demo",
    "version": "1.0",
    "extensions": [
        "classification",
        "model_repository",
        "model_configuration",
        "binary_tensor_data",
        "parameters",
        "statistics",
        "trace",
    ],
}


@dataclass(slots=True)
class Counter:
    """Count the calls to a model; times in nanoseconds, `last` in milliseconds since 1970."""

    succeeded: int = 0
    succeeded_ns: int = 0
    failed: int = 0
    failed_ns: int = 0
    last: int = 0


def metadata(model: Model) -> dict[str, Any]:
    """Describe a model; where it batches, each shape has a leading -1."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": "python",
        "inputs": [_tensor_metadata(model, spec) for spec in model.inputs],
        "outputs": [_tensor_metadata(model, spec) for spec in model.outputs],
    }


def config(model: Model) -> dict[str, Any]:
    """Describe a model in the words of Triton's model configuration, without the batch."""
    return {
        "name": model.name,
        "platform": "",
        "backend": "python",
        "max_batch_size": model.max_batch_size,
        "input": [_tensor_config(spec) for spec in model.inputs],
        "output": [_tensor_config(spec) for spec in model.outputs],
    }


def statistics(name: str, counter: Counter) -> dict[str, Any]:
    """Describe what a model has done; the demo has no queue and no cache to tell of."""
    success = {"count": counter.succeeded, "ns": counter.succeeded_ns}
    none = {"count": 0, "ns": 0}
    return {
        "name": name,
        "version": VERSION,
        "last_inference": counter.last,
        "inference_count": counter.succeeded,
        "execution_count": counter.succeeded,
        "inference_stats": {
            "success": success,
            "fail": {"count": counter.failed, "ns": counter.failed_ns},
            "queue": none,
            "compute_input": none,
            "compute_infer": success,
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def _tensor_metadata(model: Model, spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": full_shape(model, spec)}


def _tensor_config(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": spec.shape}
