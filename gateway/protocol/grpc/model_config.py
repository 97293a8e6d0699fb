"""The messages of Triton's model configuration; inference.proto has them, too.

Fields stand in the order of their members in Triton's JSON.
"""

from __future__ import annotations

from typing import Final

from gateway.protocol.grpc.schema import (
    Enumeration,
    Field,
    Message,
    Scalar,
    choice,
    many,
    mapped,
)

_BOOL, _TEXT = Scalar.BOOL, Scalar.TEXT
_INT32, _INT64, _INT64_TEXT = Scalar.INT32, Scalar.INT64, Scalar.INT64_TEXT
_UINT32, _UINT64 = Scalar.UINT32, Scalar.UINT64

DATA_TYPE: Final = Enumeration(
    "DataType",
    (
        *("TYPE_INVALID", "TYPE_BOOL"),
        *("TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64"),
        *("TYPE_INT8", "TYPE_INT16", "TYPE_INT32", "TYPE_INT64"),
        *("TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16"),
    ),
)

# ---------------------------------------------------------------------- inputs and outputs

_RESHAPE = Message("ModelTensorReshape", (many(1, "shape", _INT64),))
_FORMAT = Enumeration("ModelInput.Format", ("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"))
_INPUT = Message(
    "ModelInput",
    (
        Field(1, "name", _TEXT),
        Field(2, "data_type", DATA_TYPE),
        Field(3, "format", _FORMAT),
        many(4, "dims", _INT64),
        Field(5, "reshape", _RESHAPE),
        Field(6, "is_shape_tensor", _BOOL),
        Field(7, "allow_ragged_batch", _BOOL),
        Field(8, "optional", _BOOL),
        Field(9, "is_non_linear_format_io", _BOOL),
    ),
)
_OUTPUT = Message(
    "ModelOutput",
    (
        Field(1, "name", _TEXT),
        Field(2, "data_type", DATA_TYPE),
        many(3, "dims", _INT64),
        Field(5, "reshape", _RESHAPE),
        Field(4, "label_filename", _TEXT),
        Field(6, "is_shape_tensor", _BOOL),
        Field(7, "is_non_linear_format_io", _BOOL),
    ),
)
_BATCH_INPUT_KIND = Enumeration(
    "BatchInput.Kind",
    (
        *("BATCH_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT"),
        *("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"),
        *("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN"),
    ),
)
_BATCH_INPUT = Message(
    "BatchInput",
    (
        Field(1, "kind", _BATCH_INPUT_KIND),
        many(2, "target_name", _TEXT),
        Field(3, "data_type", DATA_TYPE),
        many(4, "source_input", _TEXT),
    ),
)
_BATCH_OUTPUT = Message(
    "BatchOutput",
    (
        many(1, "target_name", _TEXT),
        Field(2, "kind", Enumeration("BatchOutput.Kind", ("BATCH_SCATTER_WITH_INPUT_SHAPE",))),
        many(3, "source_input", _TEXT),
    ),
)

# ------------------------------------------------------------------ versions and instances

_VERSION_POLICY = Message(
    "ModelVersionPolicy",
    choice(
        Field(
            1, "latest", Message("ModelVersionPolicy.Latest", (Field(1, "num_versions", _UINT32),))
        ),
        Field(2, "all", Message("ModelVersionPolicy.All")),
        Field(
            3, "specific", Message("ModelVersionPolicy.Specific", (many(1, "versions", _INT64),))
        ),
        oneof="policy_choice",
    ),
)
_RATE_LIMITER = Message(
    "ModelRateLimiter",
    (
        many(
            1,
            "resources",
            Message(
                "ModelRateLimiter.Resource",
                (Field(1, "name", _TEXT), Field(2, "global", _BOOL), Field(3, "count", _UINT32)),
            ),
        ),
        Field(2, "priority", _UINT32),
    ),
)
_SECONDARY_DEVICE = Message(
    "ModelInstanceGroup.SecondaryDevice",
    (
        Field(
            1,
            "kind",
            Enumeration("ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind", ("KIND_NVDLA",)),
        ),
        Field(2, "device_id", _INT64_TEXT),
    ),
)
_INSTANCE_KIND = Enumeration(
    "ModelInstanceGroup.Kind", ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
)
_INSTANCE_GROUP = Message(
    "ModelInstanceGroup",
    (
        Field(1, "name", _TEXT),
        Field(4, "kind", _INSTANCE_KIND),
        Field(2, "count", _INT32),
        Field(6, "rate_limiter", _RATE_LIMITER),
        many(3, "gpus", _INT32),
        many(8, "secondary_devices", _SECONDARY_DEVICE),
        many(5, "profile", _TEXT),
        Field(7, "passive", _BOOL),
        Field(9, "host_policy", _TEXT),
    ),
)

# ---------------------------------------------------------------------------- optimization

_CUDA = "ModelOptimizationPolicy.Cuda"
_SHAPE = Message(f"{_CUDA}.GraphSpec.Shape", (many(1, "dim", _INT64_TEXT),))
_LOWER_BOUND = Message(
    f"{_CUDA}.GraphSpec.LowerBound", (Field(1, "batch_size", _INT32), mapped(2, "input", _SHAPE))
)
_GRAPH_SPEC = Message(
    f"{_CUDA}.GraphSpec",
    (
        Field(1, "batch_size", _INT32),
        mapped(2, "input", _SHAPE),
        Field(3, "graph_lower_bound", _LOWER_BOUND),
    ),
)
_ACCELERATOR = Message(
    "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator",
    (Field(1, "name", _TEXT), mapped(2, "parameters", _TEXT)),
)
_PINNED_MEMORY = Message("ModelOptimizationPolicy.PinnedMemoryBuffer", (Field(1, "enable", _BOOL),))
_MODEL_PRIORITY = Enumeration(
    "ModelOptimizationPolicy.ModelPriority", ("PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN")
)
_OPTIMIZATION = Message(
    "ModelOptimizationPolicy",
    (
        Field(1, "graph", Message("ModelOptimizationPolicy.Graph", (Field(1, "level", _INT32),))),
        Field(2, "priority", _MODEL_PRIORITY),
        Field(
            3,
            "cuda",
            Message(
                _CUDA,
                (
                    Field(1, "graphs", _BOOL),
                    Field(2, "busy_wait_events", _BOOL),
                    many(3, "graph_spec", _GRAPH_SPEC),
                    Field(4, "output_copy_stream", _BOOL),
                ),
            ),
        ),
        Field(
            4,
            "execution_accelerators",
            Message(
                "ModelOptimizationPolicy.ExecutionAccelerators",
                (
                    many(1, "gpu_execution_accelerator", _ACCELERATOR),
                    many(2, "cpu_execution_accelerator", _ACCELERATOR),
                ),
            ),
        ),
        Field(5, "input_pinned_memory", _PINNED_MEMORY),
        Field(6, "output_pinned_memory", _PINNED_MEMORY),
        Field(7, "gather_kernel_buffer_threshold", _UINT32),
        Field(8, "eager_batching", _BOOL),
    ),
)

# ------------------------------------------------------------------------------ scheduling

_QUEUE_POLICY = Message(
    "ModelQueuePolicy",
    (
        Field(
            1, "timeout_action", Enumeration("ModelQueuePolicy.TimeoutAction", ("REJECT", "DELAY"))
        ),
        Field(2, "default_timeout_microseconds", _UINT64),
        Field(3, "allow_timeout_override", _BOOL),
        Field(4, "max_queue_size", _UINT32),
    ),
)
_DYNAMIC_BATCHING = Message(
    "ModelDynamicBatching",
    (
        many(1, "preferred_batch_size", _INT32),
        Field(2, "max_queue_delay_microseconds", _UINT64),
        Field(3, "preserve_ordering", _BOOL),
        Field(4, "priority_levels", _UINT64),
        Field(5, "default_priority_level", _UINT64),
        Field(6, "default_queue_policy", _QUEUE_POLICY),
        mapped(7, "priority_queue_policy", _QUEUE_POLICY, _UINT64),
    ),
)
_CONTROL_KIND = Enumeration(
    "ModelSequenceBatching.Control.Kind",
    (
        "CONTROL_SEQUENCE_START",
        "CONTROL_SEQUENCE_READY",
        "CONTROL_SEQUENCE_END",
        "CONTROL_SEQUENCE_CORRID",
    ),
)
_CONTROL = Message(
    "ModelSequenceBatching.Control",
    (
        Field(1, "kind", _CONTROL_KIND),
        many(2, "int32_false_true", _INT32),
        many(3, "fp32_false_true", Scalar.FLOAT),
        many(5, "bool_false_true", _BOOL),
        Field(4, "data_type", DATA_TYPE),
    ),
)
_INITIAL_STATE = Message(
    "ModelSequenceBatching.InitialState",
    (
        Field(1, "data_type", DATA_TYPE),
        many(2, "dims", _INT64_TEXT),
        *choice(Field(3, "zero_data", _BOOL), Field(4, "data_file", _TEXT), oneof="state_data"),
        Field(5, "name", _TEXT),
    ),
)
_STATE = Message(
    "ModelSequenceBatching.State",
    (
        Field(1, "input_name", _TEXT),
        Field(2, "output_name", _TEXT),
        Field(3, "data_type", DATA_TYPE),
        many(4, "dims", _INT64),
        many(5, "initial_state", _INITIAL_STATE),
        Field(6, "use_same_buffer_for_input_output", _BOOL),
        Field(7, "use_growable_memory", _BOOL),
    ),
)
_DIRECT = Message(
    "ModelSequenceBatching.StrategyDirect",
    (
        Field(1, "max_queue_delay_microseconds", _UINT64),
        Field(2, "minimum_slot_utilization", Scalar.FLOAT),
    ),
)
_OLDEST = Message(
    "ModelSequenceBatching.StrategyOldest",
    (
        Field(1, "max_candidate_sequences", _INT32),
        many(2, "preferred_batch_size", _INT32),
        Field(3, "max_queue_delay_microseconds", _UINT64),
        Field(4, "preserve_ordering", _BOOL),
    ),
)
_CONTROL_INPUT = Message(
    "ModelSequenceBatching.ControlInput", (Field(1, "name", _TEXT), many(2, "control", _CONTROL))
)
_SEQUENCE_BATCHING = Message(
    "ModelSequenceBatching",
    (
        *choice(Field(3, "direct", _DIRECT), Field(4, "oldest", _OLDEST), oneof="strategy_choice"),
        Field(1, "max_sequence_idle_microseconds", _UINT64),
        many(2, "control_input", _CONTROL_INPUT),
        many(5, "state", _STATE),
        Field(6, "iterative_sequence", _BOOL),
    ),
)
_STEP = Message(
    "ModelEnsembling.Step",
    (
        Field(1, "model_name", _TEXT),
        Field(2, "model_version", _INT64),
        mapped(3, "input_map", _TEXT),
        mapped(4, "output_map", _TEXT),
        Field(5, "model_namespace", _TEXT),
    ),
)
_ENSEMBLING = Message(
    "ModelEnsembling",
    # Triton 2.51 does not know it, so its JSON lacks it.
    (many(1, "step", _STEP), Field(2, "max_inflight_requests", _UINT32, omit_default=True)),
)

# ------------------------------------------------------------------------------ all else

_WARMUP_INPUT = Message(
    "ModelWarmup.Input",
    (
        Field(1, "data_type", DATA_TYPE),
        many(2, "dims", _INT64),
        *choice(
            Field(3, "zero_data", _BOOL),
            Field(4, "random_data", _BOOL),
            Field(5, "input_data_file", _TEXT),
            oneof="input_data_type",
        ),
    ),
)
_WARMUP = Message(
    "ModelWarmup",
    (
        Field(1, "name", _TEXT),
        Field(2, "batch_size", _UINT32),
        mapped(3, "inputs", _WARMUP_INPUT),
        Field(4, "count", _UINT32),
    ),
)
_AGENT = Message(
    "ModelRepositoryAgents.Agent", (Field(1, "name", _TEXT), mapped(2, "parameters", _TEXT))
)
_METRIC = "ModelMetrics.MetricControl"
_HISTOGRAM = Message(f"{_METRIC}.HistogramOptions", (many(1, "buckets", Scalar.DOUBLE),))
_METRIC_NAME = Message(f"{_METRIC}.MetricIdentifier", (Field(1, "family", _TEXT),))
_METRIC_CONTROL = Message(
    _METRIC,
    (
        *choice(Field(2, "histogram_options", _HISTOGRAM), oneof="metric_options"),
        Field(1, "metric_identifier", _METRIC_NAME),
    ),
)
_OPERATIONS = Message("ModelOperations", (many(1, "op_library_filename", _TEXT),))
_TRANSACTION_POLICY = Message("ModelTransactionPolicy", (Field(1, "decoupled", _BOOL),))
_AGENTS = Message("ModelRepositoryAgents", (many(1, "agents", _AGENT),))
_METRICS = Message("ModelMetrics", (many(1, "metric_control", _METRIC_CONTROL),))

MODEL_CONFIG: Final = Message(
    "ModelConfig",
    (
        Field(1, "name", _TEXT),
        Field(2, "platform", _TEXT),
        Field(17, "backend", _TEXT),
        Field(25, "runtime", _TEXT),
        Field(3, "version_policy", _VERSION_POLICY),
        Field(4, "max_batch_size", _INT32),
        many(5, "input", _INPUT),
        many(6, "output", _OUTPUT),
        many(20, "batch_input", _BATCH_INPUT),
        many(21, "batch_output", _BATCH_OUTPUT),
        Field(12, "optimization", _OPTIMIZATION),
        *choice(
            Field(11, "dynamic_batching", _DYNAMIC_BATCHING),
            Field(13, "sequence_batching", _SEQUENCE_BATCHING),
            Field(15, "ensemble_scheduling", _ENSEMBLING),
            oneof="scheduling_choice",
        ),
        many(7, "instance_group", _INSTANCE_GROUP),
        Field(8, "default_model_filename", _TEXT),
        mapped(9, "cc_model_filenames", _TEXT),
        mapped(10, "metric_tags", _TEXT),
        mapped(14, "parameters", Message("ModelParameter", (Field(1, "string_value", _TEXT),))),
        many(16, "model_warmup", _WARMUP),
        Field(18, "model_operations", _OPERATIONS),
        Field(19, "model_transaction_policy", _TRANSACTION_POLICY),
        Field(23, "model_repository_agents", _AGENTS),
        Field(24, "response_cache", Message("ModelResponseCache", (Field(1, "enable", _BOOL),))),
        Field(26, "model_metrics", _METRICS),
    ),
)
