from __future__ import annotations

import pytest

from gateway.upstream.http.stale_retry import StaleRetry, may_send_again


@pytest.mark.parametrize("is_idempotent", [False, True])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("policy", ["safe", "infer", "all"])
def test_safe_methods_are_always_sent_again(
    policy: StaleRetry, method: str, is_idempotent: bool
) -> None:
    assert may_send_again(policy, method, is_idempotent=is_idempotent)


@pytest.mark.parametrize(
    ("policy", "is_idempotent", "again"),
    [
        ("safe", False, False),
        ("safe", True, False),
        ("infer", False, False),
        ("infer", True, True),
        ("all", False, True),
        ("all", True, True),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "get"])
def test_other_methods_are_sent_again_by_the_policy(
    policy: StaleRetry, method: str, is_idempotent: bool, again: bool
) -> None:
    assert may_send_again(policy, method, is_idempotent=is_idempotent) is again
