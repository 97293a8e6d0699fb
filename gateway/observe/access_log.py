"""The access log: one line per call."""

from __future__ import annotations

import logging

from gateway.observe.call_record import CallRecord

_log = logging.getLogger("tensorgate.access")


class AccessLog:
    """Writes one line per finished call."""

    def write(self, record: CallRecord) -> None:
        """Write the line of a call that has ended."""
        shown = (record.status, record.response_bytes, record.seconds * 1000)
        request_id = record.request_id or "-"
        _log.info("%s %s %d %d B %.1f ms %s", record.method, record.target, *shown, request_id)
