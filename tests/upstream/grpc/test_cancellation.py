from __future__ import annotations

from typing import get_args

import pytest

from gateway.protocol.dialects import KSERVE, TRITON, Dialect
from gateway.settings.upstreams import Upstream
from gateway.upstream.grpc.choices import GrpcCancellation, drains_cancelled


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
