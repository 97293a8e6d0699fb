"""The limits of exchanges, as far as they are the same for all routes."""

from typing import Annotated

from pydantic import Field

from gateway.settings.fields import (
    HeaderBytes,
    IdleTime,
    JsonDepth,
    RequestBytes,
    Section,
    SpoolBytes,
    TotalTime,
    count,
    time,
)

_MIB = 2**20


class Limits(Section):
    """Bound what one exchange may take: sizes in bytes, times in seconds."""

    request_bytes: RequestBytes = Field(default=64 * _MIB, description="The largest request body.")
    header_bytes: HeaderBytes = Field(
        default=1 * _MIB,
        description="The largest JSON part of a request, its data arrays cut out, or of an answer.",
    )
    json_depth: JsonDepth = Field(
        default=64, description="How deep the JSON of a request may nest."
    )
    spool_bytes: SpoolBytes = Field(
        default=64 * _MIB,
        description="What is held of a body whose length is not known, or of an answer in mixed"
        " form.",
    )
    connect_time: Annotated[float, time("1ms", "1h")] = Field(
        default=5.0, description="How long connecting to a server may take."
    )
    idle_time: IdleTime = Field(
        default=300.0, description="How long no byte may move in a direction where one should."
    )
    total_time: TotalTime = Field(default=3600.0, description="How long one exchange may take.")
    drain_time: Annotated[float, time("1ms", "24h")] = Field(
        default=30.0, description="How long running exchanges may go on after SIGTERM."
    )
    metadata_time: Annotated[float, time("1ms", "24h")] = Field(
        default=60.0,
        description="How long a model's metadata is used before it is asked for again.",
    )
    metadata_models: Annotated[int, count("1", "1000000")] = Field(
        default=1024, description="How many models' metadata is kept."
    )
