"""The dialects of server families: all their differences are in this table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.protocol.grpc.methods import INFERENCE_SERVICE, TORCHSERVE_SERVICE
from gateway.protocol.operations import model_path


@dataclass(frozen=True, slots=True)
class TracePaths:
    """The paths of a server family's trace settings.

    ``suffix`` follows a model's path, or ``/v2``. ``per_version`` tells whether a model's version
    has settings of its own.
    """

    suffix: str
    per_version: bool

    def path(self, model: str | None, version: str | None) -> str:
        """Return the path of a model's trace settings, or of the global ones."""
        if model is None:
            return "/v2" + self.suffix
        return model_path(model, version if self.per_version else None) + self.suffix


@dataclass(frozen=True, slots=True)
class GrpcForm:
    """What servers of a family do in their own way over gRPC."""

    service: str = INFERENCE_SERVICE
    """The service with the methods of the protocol."""
    takes_raw: bool = True
    """Whether it takes raw contents; otherwise all that can be is typed."""
    checks_tensors: bool = True
    """Whether it refuses tensors that do not fit their data; otherwise the gateway does."""
    wraps_streamed: bool = True
    """Whether ModelStreamInfer sends ModelStreamInferResponse, as Triton's clients expect it."""
    loads_by_first_field: bool = False
    """Whether loads have the model's name in field 1, where others have the repository's."""

    survives_cancellation: bool = True
    """Whether calls can be cancelled, or miss a deadline that it knows, without harm to it."""

    @property
    def infer_passes(self) -> bool:
        """Tell whether infer requests pass to it as they came."""
        return self.takes_raw and self.checks_tensors


@dataclass(frozen=True, slots=True)
class Dialect:
    """What servers of a family do in their own way."""

    name: str
    binary: bool = True
    """Whether the server takes and sends binary tensors; otherwise all tensors are JSON."""
    binary_only_if_listed: bool = False
    """Whether only outputs that a request lists can be binary."""
    honors_output_encoding: bool = False
    """Whether every output reliably has the requested encoding."""
    versioned_paths: bool = True
    """Whether paths may name a model's version."""
    has_config: bool = False
    """Whether ``/config`` tells if the first dimension is the batch."""
    requires_json_type: bool = False
    """Whether the server refuses a JSON body without the content type of JSON."""
    trace: TracePaths | None = None
    """The paths of its trace settings; None without the trace extension."""
    triton_extensions: bool = False
    """Whether it gives parameters the meaning of Triton's extensions: request_features.py."""
    limits_chunks: bool = False
    """Whether a body of very many chunks crashes it, so that the gateway joins chunks."""
    speaks_v1: bool = False
    """Whether it serves V1 clients, too, at KServe's paths."""
    has_model_list: bool = True
    """Whether it may have a list of models; if not, it responds to the path with 400."""
    max_head_part: int | None = None
    """The most bytes of a target, or of a header's name or value, that it accepts."""
    faster_over_grpc: bool = False
    """Whether inference is faster over gRPC than over HTTP."""
    grpc: GrpcForm = GrpcForm()

    def over_grpc(self) -> Dialect:
        """Return the dialect of such a server that is reached over gRPC.

        The columns about HTTP describe what the gateway makes of its messages: all outputs are
        binary, and nothing but the protocol is served.
        """
        return replace(
            self,
            binary=True,
            binary_only_if_listed=False,
            honors_output_encoding=True,
            requires_json_type=False,
            limits_chunks=False,
            speaks_v1=False,
            max_head_part=None,
        )


# Triton serves `trace/setting`, although the specification says `trace`. Its settings are per
# model: a version's path is 404. Its HTTP parser accepts 8,191 bytes of a part. It counts a byte of
# the target twice at the end of each read, every 4 KiB and between segments: 15 reads are spare.
# Up to 2.58 it dies at times if a call is cancelled while it responds: see dialect_detection.py.
TRITON: Final = Dialect(
    "triton",
    honors_output_encoding=True,
    has_config=True,
    trace=TracePaths("/trace/setting", per_version=False),
    triton_extensions=True,
    limits_chunks=True,
    max_head_part=8_176,
    grpc=GrpcForm(survives_cancellation=False),
)
# KServe takes binary tensors but does not list them in `GET /v2`. Its models may respond in JSON.
# For 150,528 FP32 there and back it needs 30 ms to 55 ms in binary form over HTTP, 4 ms over gRPC.
KSERVE: Final = Dialect(
    "kserve",
    versioned_paths=False,
    requires_json_type=True,
    speaks_v1=True,
    faster_over_grpc=True,
    grpc=GrpcForm(loads_by_first_field=True, checks_tensors=False),
)
# OpenVINO ignores `binary_data_output`. Of the listed outputs, only the last one is binary. An
# unknown path is a 400.
OPENVINO: Final = Dialect("openvino", binary_only_if_listed=True, has_model_list=False)
# Any server that lists the binary extension under a name that is not known.
BINARY: Final = Dialect("binary", requires_json_type=True)
# Any server that does not show that it takes binary tensors.
JSON = Dialect("json", binary=False, requires_json_type=True, faster_over_grpc=True)
# It streams bare ModelInferResponse messages, of which Triton's clients take names for errors. Of
# tensors that have raw and typed contents it takes one, and it answers INTERNAL if data and shape
# do not fit, as KServe does.
MLSERVER: Final = replace(JSON, grpc=GrpcForm(wraps_streamed=False, checks_tensors=False))
# TorchServe has six methods over gRPC, in a package of its own, and reads no raw contents.
TORCHSERVE: Final = Dialect(
    "torchserve",
    binary=False,
    requires_json_type=True,
    grpc=GrpcForm(TORCHSERVE_SERVICE, takes_raw=False),
)

DIALECTS: Final = {
    dialect.name: dialect for dialect in (TRITON, KSERVE, OPENVINO, TORCHSERVE, JSON)
}
"""The dialects that settings can name; others are detected from a server's metadata."""


def common_dialect(dialects: Sequence[Dialect]) -> Dialect:
    """Return the dialect that servers of all these dialects understand; one at least."""
    first, *others = dialects
    if all(other == first for other in others):
        return first
    limits = [each.max_head_part for each in dialects if each.max_head_part is not None]
    same_trace = all(other.trace == first.trace for other in others)
    same_grpc = all(other.grpc == first.grpc for other in others)
    takes_raw = all(each.grpc.takes_raw for each in dialects)
    checks_tensors = all(each.grpc.checks_tensors for each in dialects)
    survives_cancellation = all(each.grpc.survives_cancellation for each in dialects)
    return Dialect(
        " and ".join(dict.fromkeys(each.name for each in dialects)),
        binary=all(each.binary for each in dialects),
        binary_only_if_listed=any(each.binary_only_if_listed for each in dialects),
        honors_output_encoding=all(each.honors_output_encoding for each in dialects),
        versioned_paths=all(each.versioned_paths for each in dialects),
        has_config=any(each.has_config for each in dialects),
        requires_json_type=any(each.requires_json_type for each in dialects),
        triton_extensions=any(each.triton_extensions for each in dialects),
        limits_chunks=any(each.limits_chunks for each in dialects),
        speaks_v1=all(each.speaks_v1 for each in dialects),
        has_model_list=all(each.has_model_list for each in dialects),
        max_head_part=min(limits, default=None),
        faster_over_grpc=any(each.faster_over_grpc for each in dialects),
        trace=first.trace if same_trace else None,
        grpc=first.grpc
        if same_grpc
        else GrpcForm(
            takes_raw=takes_raw,
            checks_tensors=checks_tensors,
            survives_cancellation=survives_cancellation,
        ),
    )
