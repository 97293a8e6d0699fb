"""Where calls go, and the limits that apply to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.codec.offload_interface import Offloader
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.buffered_response import ResponsePlan
from gateway.errors import ErrorKind, GatewayError, upstream_name
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.dialects import Dialect
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.tensors import MAX_TENSORS
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryBudget, RetryPolicy
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import BoundedCache
from gateway.upstream.grpc.choices import GrpcCancellation, InferenceProtocol, drains_cancelled
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool.dialect import DialectState
from gateway.upstream.pool.pool import Pool
from gateway.upstream.shared_memory import NOT_SHARED, SharedMemoryLanes

_MIN_OFFLOADED_BODY: Final = 192 * 1024
"""Bytes of the smallest body of which parts are offloaded."""

_UNBOUNDED: Final = 2**63

ResponsePlans = BoundedCache[
    tuple[tuple[bytes, ...], tuple[object, ...], bool, bool], tuple[Dialect, ResponsePlan]
]
"""What becomes of responses: by the key of the head, the encoding, and two flags.

The flags are whether the response came over gRPC, and whether the client gets another form than
V2's. The dialect is the one that decided it.
"""

_HTTP: Final = InferenceProtocol()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call: sizes in bytes, times in seconds, rates in bytes a second."""

    max_request_bytes: int
    max_inference_header_bytes: int
    max_json_depth: int
    max_buffered_body_bytes: int
    idle_timeout: float
    request_timeout: float
    min_body_rate: int = 0
    min_body_rate_grace: float = 0.0
    max_decompression_ratio: int = 100
    """How many times larger than received a compressed body may become."""
    max_tensors: int = MAX_TENSORS
    """Inputs of a request, and outputs that it lists."""

    @property
    def reader_caps(self) -> tuple[int, int, int]:
        """Return what readers of requests take: the bytes of JSON, its nesting, the tensors."""
        return self.max_inference_header_bytes, self.max_json_depth, self.max_tensors

    def new_deadline(self, spent: float = 0.0, client_timeout: float | None = None) -> Deadline:
        """Return the deadline of a call that has taken ``spent`` seconds already.

        ``client_timeout`` is that of a gRPC client, which counts if it is shorter.
        """
        timeout, is_of_client = self.request_timeout, False
        if client_timeout is not None and client_timeout < timeout:
            timeout, is_of_client = client_timeout, True
        rate, grace = self.min_body_rate, self.min_body_rate_grace
        return Deadline(self.idle_timeout, timeout, spent, rate, grace, is_of_client)


@dataclass(frozen=True, slots=True)
class Upstream:
    """A named group of servers that speak one dialect."""

    name: str
    dialect_state: DialectState
    pool: Pool
    metadata: MetadataCache
    retry_budget: RetryBudget = field(default_factory=RetryBudget)
    concurrency_limit: ConcurrencyLimit | None = None
    required: bool = True
    """Whether the gateway is ready only if this upstream is."""
    inference_protocol: InferenceProtocol = _HTTP
    """The protocols of its endpoints, and the one that inference of HTTP clients takes."""

    grpc_cancellation: GrpcCancellation = "auto"
    """What its servers learn of gRPC calls that are cancelled, or miss their deadline."""

    lanes: SharedMemoryLanes | None = None
    """Where its endpoints have shared memory, if they may."""

    @property
    def shared_memory(self) -> SharedMemoryLanes | None:
        """Return the shared memory that its servers may have, of this gateway or of another one.

        Clients may not name its regions. None without a server on this machine that may have the
        extension.
        """
        return self.lanes if self.lanes is not None and self.lanes.are_guarded else None

    @property
    def min_shared_bytes(self) -> int:
        """Return the bytes of tensors from which on they go through shared memory.

        ``NOT_SHARED`` while no endpoint has any.
        """
        return NOT_SHARED if self.lanes is None else self.lanes.min_bytes

    @property
    def drains_cancelled(self) -> bool:
        """Tell whether its servers see neither cancellations nor deadlines of gRPC calls."""
        return drains_cancelled(self.grpc_cancellation, self.dialect_state.dialect)

    @property
    def speaks_grpc(self) -> bool:
        """Tell whether its endpoints have a gRPC address, to which gRPC calls pass through."""
        return self.inference_protocol.has_grpc

    @property
    def infers_over_grpc(self) -> bool:
        """Tell whether inference of HTTP clients goes to its endpoints over gRPC.

        If the dialect decides, it has to be known.
        """
        protocol = self.inference_protocol
        return protocol.has_grpc and bool(protocol.is_grpc(self.dialect_state.dialect))

    @property
    def dialect(self) -> Dialect:
        """Return the dialect; a call that needs it waits first (``wait_for_dialects``).

        Raises GatewayError (503) if it is not known.
        """
        if (dialect := self.dialect_state.dialect) is None:
            what = f"the dialect of {upstream_name(self.name)}"
            raise GatewayError(
                ErrorKind.NOT_READY,
                f"{what} is not known: {self.dialect_state.reason}",
                public_message=None if self.pool.exposes_endpoints else f"{what} is not known",
            )
        return dialect


@dataclass(frozen=True, slots=True)
class Destination:
    """Where calls go, and what applies to them on the way."""

    upstream: Upstream
    policies: JsonPolicies
    limits: Limits
    offloader: Offloader | None = None
    """Converts numbers on other cores, if there are any."""
    scheduler: ConversionScheduler = field(default_factory=ConversionScheduler)
    memory_budget: MemoryBudget = field(default_factory=lambda: MemoryBudget(_UNBOUNDED))
    retry_policy: RetryPolicy = SAFE_RETRIES_ONLY
    concurrency_limits: tuple[ConcurrencyLimit, ...] = ()
    """A call takes a slot of each while it is at a server, in this order.

    The limit of the upstream comes first, then limits that upstreams share.
    """
    declared_models: Mapping[str, DeclaredModel] = field(default_factory=dict)
    """Models of the settings, by their names at the servers."""
    response_plans: ResponsePlans = field(
        init=False, compare=False, default_factory=lambda: BoundedCache(CACHED_HEADS)
    )
    """What becomes of responses that are fully buffered."""

    def over_grpc(self) -> Destination:
        """Return the destination with the dialect that its servers have over gRPC."""
        upstream = self.upstream
        if not upstream.inference_protocol.has_http:
            return self  # that is its dialect
        state = DialectState(upstream.dialect.over_grpc())
        return replace(self, upstream=replace(upstream, dialect_state=state))

    def policies_for(self, encoding: OutputEncoding) -> JsonPolicies:
        """Return the policies, with the outputs that a request wants as base64."""
        policies = self.policies
        return replace(policies, as_base64=encoding.as_base64) if encoding.as_base64 else policies

    def offloader_for(self, size: int | None) -> Offloader | None:
        """Return the offloader for a body of ``size`` bytes; None if the body is too small."""
        return None if size is not None and size < _MIN_OFFLOADED_BODY else self.offloader
