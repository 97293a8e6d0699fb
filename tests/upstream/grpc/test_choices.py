"""How an upstream uses gRPC, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from gateway.protocol.dialects import JSON, KSERVE, TRITON, Dialect
from gateway.settings.upstreams import Upstream
from gateway.upstream.grpc.choices import GrpcCancellation, InferenceProtocol, drains_cancelled


@pytest.mark.parametrize(
    ("setting", "dialect", "drains"),
    [
        ("auto", TRITON, True),
        ("auto", KSERVE, False),
        ("auto", None, True),
        ("forward", TRITON, False),
        ("forward", None, False),
        ("drain", KSERVE, True),
    ],
)
def test_setting_decides_before_the_dialect(
    setting: GrpcCancellation, dialect: Dialect | None, drains: bool
) -> None:
    assert drains_cancelled(setting, dialect) is drains


def test_settings_have_the_same_words() -> None:
    field = Upstream.model_fields["grpc_cancellation"]
    assert get_args(field.annotation) == get_args(GrpcCancellation)


BOTH = InferenceProtocol(has_http=True, has_grpc=True)


@pytest.mark.parametrize(
    ("dialect", "name", "reason"),
    [
        (TRITON, "http", "dialect triton takes binary tensors over HTTP"),
        (KSERVE, "grpc", "dialect kserve is faster over gRPC"),
        (
            replace(JSON, faster_over_grpc=False),
            "http",
            "dialect json is not known to be faster over gRPC",
        ),
        (None, None, "the dialect is not known"),
    ],
)
def test_dialect_decides_for_endpoints_with_both_addresses(
    dialect: Dialect | None, name: str | None, reason: str
) -> None:
    assert (BOTH.name(dialect), BOTH.reason(dialect)) == (name, reason)


@pytest.mark.parametrize("dialect", [TRITON, KSERVE, None])
def test_setting_decides_whatever_the_dialect(dialect: Dialect | None) -> None:
    for name in ("http", "grpc"):
        configured = replace(BOTH, setting=name)
        assert (configured.name(dialect), configured.reason(dialect)) == (name, "configured")


@pytest.mark.parametrize("dialect", [TRITON, KSERVE, None])
def test_single_address_leaves_no_choice(dialect: Dialect | None) -> None:
    http, grpc = InferenceProtocol(), InferenceProtocol(has_http=False, has_grpc=True)
    assert (http.name(dialect), http.reason(dialect)) == (
        "http",
        "the endpoints have no gRPC address",
    )
    assert (grpc.name(dialect), grpc.reason(dialect)) == (
        "grpc",
        "the endpoints have no HTTP address",
    )
    assert http.describe(TRITON) == grpc.describe(TRITON) == ""


def test_choice_is_described_for_the_log() -> None:
    assert BOTH.describe(KSERVE) == "inference over gRPC: dialect kserve is faster over gRPC"
    assert replace(BOTH, setting="http").describe(KSERVE) == "inference over HTTP: configured"
