"""What the way through the gateway adds to a small request, with nothing else to do."""

from __future__ import annotations

from benchmarks.client import Connection
from benchmarks.lab import Lab, in_rounds, medians
from benchmarks.processes import gateway_before, server
from benchmarks.report import Row, below, milliseconds
from benchmarks.wire import json_of_doubles, normal

_MOST_ADDED = 0.0002  # seconds


def added(lab: Lab) -> list[Row]:
    """Compare with a server that gives its answer in JSON at once, one request at a time."""
    request = json_of_doubles("static", normal(16))
    with server("static_server") as static:
        json_port, binary_port = static.ports
        with (
            gateway_before(binary_port) as gateway,
            Connection(gateway.port) as through,
            Connection(json_port) as directly,
        ):
            times = in_rounds(
                lab.rounds(3000),
                {
                    "direct": lambda: directly.time(request),
                    "gateway": lambda: through.time(request),
                },
            )
    took = medians(times)
    added = took["gateway"] - took["direct"]
    return [
        Row(
            "JSON 16 FP32, the server's answer at hand",
            milliseconds(took["direct"]),
            milliseconds(took["gateway"]),
            f"{milliseconds(added)} added",
            below(added, _MOST_ADDED, milliseconds(_MOST_ADDED)),
        )
    ]
