"""The limits of exchanges, as far as they are the same for all routes."""

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from gateway.settings.values.fields import (
    BodyGrace,
    BodyRate,
    HeaderBytes,
    IdleTime,
    Inflation,
    JsonDepth,
    MaxTensors,
    RequestBytes,
    Section,
    SpoolBytes,
    TotalTime,
    count,
    size,
    time,
)
from gateway.settings.values.units import Bounded, parse_count
from gateway.settings.values.wording import describe, did_you_mean

_MIB = 2**20
_GIB = 2**30
_REQUESTS = Bounded(parse_count, "1", "1000000")


def _requests(value: object) -> int | Literal["unlimited"]:
    if value == "unlimited":
        return "unlimited"
    try:
        return _REQUESTS(value)
    except ValueError:
        hint = did_you_mean(value, ["unlimited"])
        wanted = "expected 1 to 1000000, or unlimited"
        raise ValueError(f"{wanted}, got {describe(value)}{hint}") from None


class Concurrency(Section):
    """Bound how many requests may be at servers at a time."""

    max_requests: Annotated[
        int | Literal["unlimited"],
        PlainValidator(_requests, json_schema_input_type=int | Literal["unlimited"]),
    ] = Field(default="unlimited", description="How many requests may be at servers at a time.")
    max_queue: Annotated[int, count("0", "1000000")] = Field(
        default=100, description="How many more may wait for one of those to end."
    )
    queue_timeout: Annotated[float, time("1ms", "1h")] = Field(
        default=1.0, description="How long they may wait."
    )


class Limits(Section):
    """Bound what one exchange may take: sizes in bytes, times in seconds."""

    request_bytes: RequestBytes = Field(default=64 * _MIB, description="The largest request body.")
    max_decompression_ratio: Inflation = Field(
        default=100,
        description="How many times larger than it came a compressed body may become, beyond its"
        " first mebibyte.",
    )
    header_bytes: HeaderBytes = Field(
        default=1 * _MIB,
        description="The largest JSON part of a request, its data arrays cut out, or of an answer.",
    )
    json_depth: JsonDepth = Field(
        default=64, description="How deep the JSON of a request may nest."
    )
    max_tensors: MaxTensors = Field(
        default=1024, description="How many inputs a request may have, and outputs it may ask for."
    )
    spool_bytes: SpoolBytes = Field(
        default=64 * _MIB,
        description="What is held of a body whose length is not known or that goes to several"
        " servers, or of an answer in mixed form, or in binary form from a server of JSON only.",
    )
    max_buffered_bytes: Annotated[int, size("1MiB", "1TiB")] = Field(
        default=1 * _GIB, description="What all exchanges together may hold of bodies."
    )
    min_body_rate: BodyRate = Field(
        default=240,
        description="How many bytes a second a client's body has to come at, on average, after"
        " min_body_rate_grace; 0 for any.",
    )
    min_body_rate_grace: BodyGrace = Field(
        default=10.0,
        description="How long a client's body has to gather speed, or to make up for a pause.",
    )
    request_header_timeout: Annotated[float, time("1ms", "1h")] = Field(
        default=60.0, description="How long the head of a request may take to come."
    )
    keep_alive_timeout: Annotated[float, time("1s", "24h")] = Field(
        default=3600.0, description="How long a client's connection may be without a request."
    )
    connect_timeout: Annotated[float, time("1ms", "1h")] = Field(
        default=5.0, description="How long connecting to a server may take."
    )
    idle_timeout: IdleTime = Field(
        default=300.0, description="How long no byte may move in a direction where one should."
    )
    request_timeout: TotalTime = Field(
        default=3600.0, description="How long one exchange may take."
    )
    drain_timeout: Annotated[float, time("1ms", "24h")] = Field(
        default=30.0, description="How long running exchanges may go on after SIGTERM."
    )
    drain_grace: Annotated[float, time("0s", "1h")] = Field(
        default=1.0,
        description="How long connections without a request stay open after SIGTERM, within"
        " drain_timeout.",
    )
    metadata_ttl: Annotated[float, time("1ms", "24h")] = Field(
        default=60.0,
        description="How long a model's metadata is used before it is asked for again.",
    )
    metadata_cache_size: Annotated[int, count("1", "1000000")] = Field(
        default=1024, description="How many models' metadata is kept."
    )
