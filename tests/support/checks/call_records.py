"""Collects the records of calls, in place of the access log."""

from __future__ import annotations

import pytest

from gateway.observe.access_log import AccessLog
from gateway.observe.call_record import CallRecord


@pytest.fixture
def call_records(monkeypatch: pytest.MonkeyPatch) -> list[CallRecord]:
    """Return a list to which each call is added that ends in a gateway of the test process."""
    records: list[CallRecord] = []
    monkeypatch.setattr(AccessLog, "write", lambda _, record: records.append(record))
    return records
