"""What the gateway refuses, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.errors import ErrorKind, GatewayError


@contextmanager
def refused(kind: ErrorKind, text: str) -> Iterator[None]:
    """Check that the code inside raises a GatewayError with this text."""
    with pytest.raises(GatewayError) as caught:
        yield
    assert (caught.value.kind, caught.value.message) == (kind, text)


@contextmanager
def refused_with(kind: ErrorKind, *parts: str) -> Iterator[None]:
    """Check that the code inside raises a GatewayError whose text has these parts."""
    with pytest.raises(GatewayError) as caught:
        yield
    assert caught.value.kind is kind
    assert all(part in caught.value.message for part in parts), caught.value.message
