"""Decides which requests are sent again after a server has closed a reused connection on them."""

from __future__ import annotations

from typing import Literal

StaleRetry = Literal["safe", "infer", "all"]
"""What may be sent again: safe methods, idempotent infer requests as well, or every request."""

# RFC 9110, section 9.2.1. TRACE is not forwarded. PUT and DELETE are idempotent by the RFC, but an
# unknown server need not keep to it.
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))


def may_send_again(policy: StaleRetry, method: str, *, is_idempotent: bool) -> bool:
    """Tell whether a request may be sent again although a server may have executed it.

    ``is_idempotent`` is that of UpstreamRequest. RFC 9110, section 9.2.2, forbids more than the
    policy ``infer``.
    """
    if policy == "all" or method in _SAFE_METHODS:
        return True
    return policy == "infer" and is_idempotent
