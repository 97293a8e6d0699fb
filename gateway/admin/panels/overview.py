"""The overview: how the gateway is doing, and what is wrong now, in one sentence each."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.admin.history import Window, rounded, summarize
from gateway.build_info import describe_build
from gateway.observe.call_metrics import REQUEST_BYTES, RESPONSE_BYTES
from gateway.observe.metric_store import Family
from gateway.settings.schema import Settings

_MAX_PROBLEMS = 50
_STUCK_AFTER = 5.0
"""Seconds after which a worker that did not publish its status is reported."""
_MANY_ERRORS, _MIN_ERRORS_PER_SECOND = 0.05, 0.1
"""The share of failed calls, and their rate, from which they are reported."""
_NEARLY_FULL = 0.9

Status = Mapping[str, Any]


def describe_overview(
    time: float, status: Status, window: Window | None, settings: Settings, started_at: float
) -> dict[str, Any]:
    """Return the overview, without its history."""
    return {
        "time": time,
        "version": status["version"],
        "build": describe_build(),
        "python": platform.python_version(),
        "started_at": started_at,
        "draining": status["draining"],
        "settings": status["settings"],
        "actions": settings.admin_actions,
        "try_it": settings.admin_payloads,
        "workers": status["workers"],
        "now": _now(status, window),
        "problems": list(find_problems(status, window, settings))[:_MAX_PROBLEMS],
    }


def describe_endpoint_state(endpoint: Status) -> tuple[str, str]:
    """Return the state of an endpoint as a word and as a sentence, which is empty for ``ok``."""
    if endpoint["drained"]:
        return "drained", "taken out of use by an operator"
    if endpoint["draining"]:
        return "leaving", "its name does not lead there any more: calls in progress finish"
    if endpoint["consecutive_ejections"]:
        seconds = endpoint["ejection_remaining_seconds"]
        until = f"for {seconds:.0f} s" if seconds >= 1 else "until a trial call succeeds"
        return "ejected", _with_reason(f"ejected {until}", _failures_in_a_row(endpoint))
    if endpoint["healthy"] is False:
        return "unhealthy", _with_reason("its health check fails", endpoint["health_check_result"])
    if endpoint["consecutive_failures"]:
        return "ok", _failures_in_a_row(endpoint)
    if endpoint["healthy"] is None and not endpoint["calls_total"]:
        return "unknown", "no call has gone there yet"
    return "ok", ""


def find_problems(
    status: Status, window: Window | None, settings: Settings
) -> Iterator[dict[str, Any]]:
    """Yield what is wrong now; what is worst comes first."""
    problems = [
        *_upstream_problems(status),
        *_call_problems(window),
        *_settings_problems(status),
        *_worker_problems(status),
        *_limit_problems(status, settings),
    ]
    yield from sorted(problems, key=lambda each: str(each["level"]))


def _upstream_problems(status: Status) -> Iterator[dict[str, Any]]:
    for name, upstream in status["upstreams"].items():
        endpoints = upstream["endpoints"]
        if upstream["unreachable_reason"]:
            text = f"no endpoint of {name} can be used: {upstream['unreachable_reason']}"
            yield _problem("error", "topology", text, name)
        elif not endpoints:
            yield _problem("error", "topology", f"{name} has no endpoint", name)
        if drained := sum(each["drained"] for each in endpoints):
            level, what = "warning", f"{drained} of {len(endpoints)} endpoints"
            if drained == len(endpoints):
                level, what = "error", "all endpoints" if drained > 1 else "the only endpoint"
            text = f"operators have drained {what} of {name}"
            yield _problem(level, "topology", text, name)
        dialect = upstream["dialect"]
        if dialect["name"] is None:
            text = f"the dialect of {name} is not known: {dialect['reason']}"
            yield _problem("warning", "topology", text, name)
        for endpoint in endpoints:
            state, sentence = describe_endpoint_state(endpoint)
            if state in ("ejected", "unhealthy") or (state == "ok" and sentence):
                level = "warning" if state == "ok" else "error"
                text = f"{endpoint['url']} of {name}: {sentence}"
                yield _problem(level, "topology", text, name, endpoint["url"])


def _call_problems(window: Window | None) -> Iterator[dict[str, Any]]:
    if window is None:
        return
    summary = summarize(window)
    ratio, rate = summary["error_ratio"] or 0.0, summary["errors_per_second"] or 0.0
    if ratio >= _MANY_ERRORS and rate >= _MIN_ERRORS_PER_SECOND:
        text = f"{ratio:.0%} of the calls of the last seconds failed"
        yield _problem("error", "calls", text)


def _settings_problems(status: Status) -> Iterator[dict[str, Any]]:
    if failure := status["settings"]["last_failure"]:
        text = f"newer settings are not in use: {failure}"
        yield _problem("error", "overview", text)


def _worker_problems(status: Status) -> Iterator[dict[str, Any]]:
    for worker in status["workers"]:
        if (age := worker["seconds_since_update"]) > _STUCK_AFTER:
            text = f"worker {worker['pid']} has not said anything for {age:.0f} s"
            yield _problem("error", "overview", text)


def _limit_problems(status: Status, settings: Settings) -> Iterator[dict[str, Any]]:
    limits = [("the gateway", None, status["concurrency"])]
    limits += [(name, name, each["concurrency"]) for name, each in status["upstreams"].items()]
    for owner, upstream, limit in limits:
        if limit and limit["queued"]:
            queued, slots = limit["queued"], limit["max_requests"]
            calls = f"{queued} calls wait" if queued != 1 else "1 call waits"
            whose = f"one of the {slots} slots" if slots != 1 else "the only slot"
            yield _problem("warning", "topology", f"{calls} for {whose} of {owner}", upstream)
    room = settings.limits.max_buffered_bytes * len(status["workers"])
    if status["buffered_bytes"] > _NEARLY_FULL * room:
        share = status["buffered_bytes"] / room
        text = f"bodies take {share:.0%} of the memory for them (limits.max_buffered_bytes)"
        yield _problem("warning", "overview", text)


def _problem(
    level: str, panel: str, text: str, upstream: str | None = None, endpoint: str | None = None
) -> dict[str, Any]:
    return {
        "level": level,
        "panel": panel,
        "upstream": upstream,
        "endpoint": endpoint,
        "text": text,
    }


def _failures_in_a_row(endpoint: Status) -> str:
    count, reason = endpoint["consecutive_failures"], endpoint["last_error"]
    if not count:  # another worker's
        return reason or ""
    return _with_reason(f"{count} failure{'s' if count != 1 else ''} in a row", reason)


def _with_reason(sentence: str, reason: str | None) -> str:
    return f"{sentence}: {reason}" if reason else sentence


def _now(status: Status, window: Window | None) -> dict[str, float | None]:
    now: dict[str, float | None] = {
        name: status[name] for name in ("requests_in_progress", "connections", "buffered_bytes")
    }
    if window is not None:
        now |= summarize(window)
        now["request_bytes_per_second"] = _rate(window, REQUEST_BYTES)
        now["response_bytes_per_second"] = _rate(window, RESPONSE_BYTES)
    return now


def _rate(window: Window, family: Family) -> float | None:
    return rounded(float(window.change(family).sum()) / window.seconds)
