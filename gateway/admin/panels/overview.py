"""The overview: how the gateway is doing, and what is wrong now, in one sentence each."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from gateway.admin.history import (
    INTERVAL,
    UPSTREAM,
    Percentiles,
    Window,
    rates_of,
    rounded,
    summarize,
)
from gateway.admin.status import State, Status, isoformat
from gateway.build_info import describe_build
from gateway.observe import families
from gateway.observe.metric_store import Family, clean_label
from gateway.settings.schema import Settings

_MAX_PROBLEMS = 50
_STUCK_AFTER = 5.0
"""Seconds after which a worker that did not publish its status is reported."""
_MANY_ERRORS, _MIN_ERRORS_PER_SECOND = 0.05, 0.1
"""The share of failed calls, and their rate, from which they are reported."""
_NEARLY_FULL = 0.9
_OF_SLOTS, _MEMORY = ("concurrency", "queue_timeout"), "memory"
"""The limits that refuse calls for want of a slot, and for want of memory."""
_GATEWAY = ""
"""The upstream of limits of the whole gateway."""
_PROBLEMS = ("ejected", "unhealthy", "unreachable", "failing", "slow")
"""The states of endpoints that are wrong."""


@dataclass(frozen=True, slots=True)
class _Problem:
    level: str
    panel: str
    """The panel that shows more of it."""
    text: str
    upstream: str | None = None
    endpoint: str | None = None
    since: str | None = None


def describe_overview(state: State, settings: Settings, started_at: float) -> dict[str, Any]:
    """Return the overview, without its history."""
    status, window = state.status, state.window
    return {
        "time": state.time,
        "version": status["version"],
        "build": describe_build(),
        "python": platform.python_version(),
        "started_at": started_at,
        "draining": status["draining"],
        "settings": status["settings"],
        "actions": settings.admin.actions,
        "try_it": settings.admin.payloads,
        "workers": status["workers"],
        "now": _now(status, window) | Percentiles(state.minute, families.CALL_LATENCY).describe(),
        "problems": find_problems(status, window, settings),
    }


def find_problems(
    status: Status, window: Window | None, settings: Settings
) -> list[dict[str, Any]]:
    """Return what is wrong now, at most fifty problems; what is worst comes first."""
    upstreams = list(_upstream_problems(status))
    # One cause is one problem: errors and queues that an upstream causes are its own.
    troubled = {each.upstream for each in upstreams}
    without_slot, without_memory = _refused(window)
    limits = list(_slot_problems(status, without_slot, troubled))
    limits += _memory_problems(status, settings, without_memory)
    troubled |= {each.upstream for each in limits if each.upstream}
    problems = [
        *upstreams,
        *_call_problems(
            window, troubled | _recovered(status, window), without_slot[_GATEWAY] + without_memory
        ),
        *_settings_problems(status),
        *_worker_problems(status),
        *_log_problems(window),
        *limits,
    ]
    problems.sort(key=lambda each: each.level)
    return [asdict(each) for each in problems[:_MAX_PROBLEMS]]


def _upstream_problems(status: Status) -> Iterator[_Problem]:
    for name, upstream in status["upstreams"].items():
        serious = "error" if upstream["required"] else "warning"
        endpoints = upstream["endpoints"]
        problems = list(_endpoint_problems(name, endpoints, serious))
        if upstream["unreachable_reason"]:
            text = f"no endpoint of {name} can be used: {upstream['unreachable_reason']}"
            since = min((each.since for each in problems if each.since), default=None)
            problems = [_Problem(serious, "topology", text, name, since=since)]
        elif not endpoints:
            problems = [_Problem(serious, "topology", f"{name} has no endpoint", name)]
        elif upstream["dialect"]["name"] is None and not problems:
            text = f"the dialect of {name} is not known: {upstream['dialect']['reason']}"
            problems = [_Problem("warning", "topology", text, name)]
        yield from problems
        if drained := [each["state_since"] for each in endpoints if each["drained"]]:
            level, what = "warning", f"{len(drained)} of {len(endpoints)} endpoints"
            if len(drained) == len(endpoints):
                level, what = serious, "all endpoints" if len(drained) > 1 else "the only endpoint"
            text = f"operators have drained {what} of {name}"
            yield _Problem(level, "topology", text, name, since=min(drained))


def _endpoint_problems(
    upstream: str, endpoints: Sequence[Status], serious: str
) -> Iterator[_Problem]:
    for endpoint in endpoints:
        state = endpoint["state"]
        if state in _PROBLEMS:
            level = "warning" if state == "slow" else serious
            why = endpoint["state_text"]
            said = why if why.startswith(state) else f"{state}: {why}"
            text = f"{endpoint['url']} of {upstream} is {said}"
            since = endpoint["state_since"]
            yield _Problem(level, "topology", text, upstream, endpoint["url"], since)


def _recovered(status: Status, window: Window | None) -> set[str]:
    """Return the upstreams with an endpoint in use since a time of which the window has calls.

    Those that failed before were named with their cause, and that is over.
    """
    if window is None:
        return set()
    began = time.time() - window.seconds - 2 * INTERVAL  # sample and status are of some time ago
    return {
        name
        for name, upstream in status["upstreams"].items()
        for endpoint in upstream["endpoints"]
        if endpoint["state"] == "in_use"
        and datetime.fromisoformat(endpoint["state_since"]).timestamp() > began
    }


def _call_problems(
    window: Window | None, troubled: Set[str | None], refused: int
) -> Iterator[_Problem]:
    """Yield that many calls fail, other than those to upstreams that are or were in trouble.

    ``refused`` calls failed by limits of the gateway, which are said to have refused them.
    """
    if window is None:
        return
    summary = summarize(
        (labels, rate)
        for labels, rate in rates_of(window, families.DURATION)
        if troubled.isdisjoint(labels[UPSTREAM].split(","))
    )
    calls, errors = (
        (summary[name] or 0.0) * window.seconds - refused
        for name in ("calls_per_second", "errors_per_second")
    )
    if errors >= max(_MANY_ERRORS * calls, _MIN_ERRORS_PER_SECOND * window.seconds):
        ratio = errors / calls
        text = f"{ratio:.0%} of the calls of the last seconds failed"
        if troubled or refused:
            text = f"{ratio:.0%} of the other calls of the last seconds failed"
        yield _Problem("error", "calls", text)


def _settings_problems(status: Status) -> Iterator[_Problem]:
    if failure := status["settings"]["last_failure"]:
        text = f"newer settings are not in use: {failure}"
        since = isoformat(status["settings"]["failed_at"])
        yield _Problem("error", "overview", text, since=since)


def _worker_problems(status: Status) -> Iterator[_Problem]:
    for worker in status["workers"]:
        if (age := worker["seconds_since_update"]) > _STUCK_AFTER:
            text = f"worker {worker['pid']} has not said anything for {age:.0f} s"
            yield _Problem("error", "overview", text, since=worker["updated_at"])
    if lagging := [each for each in status["workers"] if each["event_loop_lag"]]:
        worker, lag = lagging[0], lagging[0]["event_loop_lag"]
        text = f"the event loop of worker {worker['pid']} {lag['text']}"
        if len(lagging) > 1:
            text += f"; those of {len(lagging)} workers lag"
        since = min(each["event_loop_lag"]["since"] for each in lagging)
        yield _Problem("warning", "overview", text, since=since)
    if ended := status["ended_processes"]:
        text = f"{ended[0]['name']} {ended[0]['why']}; another one takes its place"
        if len(ended) > 1:
            text += f"; {len(ended)} processes have ended in the last minute"
        yield _Problem("error", "overview", text, since=ended[-1]["ended_at"])


def _log_problems(window: Window | None) -> Iterator[_Problem]:
    if lines := round(_sum(window, families.DROPPED_LOG_LINES)):
        what = _plural(lines, "line")
        text = f"{what} of the access log of the last seconds could not be written"
        yield _Problem("warning", "overview", text)


def _refused(window: Window | None) -> tuple[Counter[str], int]:
    """Return how many calls of the last seconds got no slot, by upstream, and no memory."""
    without_slot: Counter[str] = Counter()
    without_memory = 0
    for (limit, upstream), rate in rates_of(window, families.REFUSALS):
        count = round(rate * (window.seconds if window else 0.0))
        if limit in _OF_SLOTS:
            without_slot[upstream] += count
        elif limit == _MEMORY:
            without_memory += count
    return without_slot, without_memory


def _slot_problems(
    status: Status, refused: Counter[str], troubled: Set[str | None]
) -> Iterator[_Problem]:
    for name, part in {_GATEWAY: status, **status["upstreams"]}.items():
        limit = part["concurrency"]
        if not limit or name in troubled:
            continue
        owner, upstream = name or "the gateway", name or None
        queued, slots = limit["queued"], limit["max_requests"]
        whose = f"one of the {slots} slots" if slots != 1 else "the only slot"
        if count := refused[clean_label(name)]:
            text = f"{_plural(count, 'call')} of the last seconds did not get {whose} of {owner}"
            yield _Problem("error", "topology", text, upstream)
        elif queued:
            waits = f"{_plural(queued, 'call')} wait{'s' if queued == 1 else ''}"
            yield _Problem("warning", "topology", f"{waits} for {whose} of {owner}", upstream)


def _memory_problems(status: Status, settings: Settings, refused: int) -> Iterator[_Problem]:
    room = settings.limits.max_buffered_bytes
    if refused:
        calls = _plural(refused, "call")
        text = f"{calls} of the last seconds found no memory (limits.max_buffered_bytes)"
        yield _Problem("error", "overview", text)
    elif status["buffered_bytes"] > _NEARLY_FULL * room:
        share = status["buffered_bytes"] / room
        text = f"bodies take {share:.0%} of the memory for them (limits.max_buffered_bytes)"
        yield _Problem("warning", "overview", text)


def _plural(count: int, one: str) -> str:
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def _now(status: Status, window: Window | None) -> dict[str, float | None]:
    now: dict[str, float | None] = {
        name: status[name] for name in ("requests_in_progress", "connections", "buffered_bytes")
    }
    if window is not None:
        now |= summarize(rates_of(window, families.DURATION))
        sizes = {"request": families.REQUEST_BYTES, "response": families.RESPONSE_BYTES}
        for name, family in sizes.items():
            now[f"{name}_bytes_per_second"] = rounded(_sum(window, family) / window.seconds)
    return now


def _sum(window: Window | None, family: Family) -> float:
    """Return the change of all series of a family."""
    return 0.0 if window is None else float(window.change(family).sum())
