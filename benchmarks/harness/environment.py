"""The servers that measurements share, and how jobs are timed."""

from __future__ import annotations

import gc
import http.client
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from time import perf_counter
from types import TracebackType
from typing import Self

from benchmarks.harness.client import HOST, Connection
from benchmarks.harness.processes import Gateway, running_gateway, server
from benchmarks.harness.requests import Request, json_of_doubles, normal
from benchmarks.harness.rounds import run_rounds
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer

_MODELS = ("identity_fp32", "identity_fp16", "image", "versioned")

Job = Callable[[], object]


class Environment:
    """Starts each shared server on its first use, and ends it with the context.

    ``quick`` asks for fewer rounds.
    """

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self._open = ExitStack()
        self.triton_version: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def rounds(self, usual: int) -> int:
        """Return the number of rounds to run."""
        return max(3, usual // 5) if self.quick else usual

    @cached_property
    def triton_port(self) -> int:
        """The port of a real Triton."""
        triton = self._open.enter_context(TritonServer(named(*_MODELS)))
        self.triton_version = _version(triton.http_port)
        return triton.http_port

    @cached_property
    def gateway(self) -> Gateway:
        """A gateway in front of Triton, with its offload threads running."""
        gateway = self._open.enter_context(running_gateway(self.triton_port))
        start_offload(gateway)
        return gateway

    @cached_property
    def to_server(self) -> Connection:
        """A connection to Triton."""
        return self._open.enter_context(Connection(self.triton_port))

    @cached_property
    def to_gateway(self) -> Connection:
        """A connection to the gateway in front of Triton."""
        return self._open.enter_context(Connection(self.gateway.port))

    @cached_property
    def raw_port(self) -> int:
        """The port of the raw server."""
        return self._open.enter_context(server("raw_server")).ports[0]


def start_offload(gateway: Gateway, request: Request | None = None) -> None:
    """Have the gateway start its offload threads by a large request."""
    with Connection(gateway.port) as connection:
        connection.fetch(request or json_of_doubles("identity_fp32", normal(100_000)))


def time_jobs(rounds: int, jobs: Mapping[str, Job], repeats: int = 1) -> dict[str, list[float]]:
    """Return the seconds of each job in each round.

    Each job runs once untimed, then in every round, so that disturbances hit all jobs alike. A job
    runs ``repeats`` times in a row and the median counts, if the previous job's use of the CPU
    caches would slow it down.
    """
    for job in jobs.values():
        job()
    gc.collect()
    timed = {name: partial(_median_time, job, repeats) for name, job in jobs.items()}
    return run_rounds(rounds, timed, short=repeats == 1)


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of the seconds of each job."""
    return {name: statistics.median(taken) for name, taken in times.items()}


def _median_time(job: Job, repeats: int) -> float:
    return statistics.median(_time(job) for _ in range(repeats))


def _time(job: Job) -> float:
    began = perf_counter()
    job()
    return perf_counter() - began


def _version(port: int) -> str:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", "/v2")
        return str(json.loads(connection.getresponse().read())["version"])
    finally:
        connection.close()
