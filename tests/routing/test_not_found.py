from __future__ import annotations

import pytest

from gateway.protocol.operations import OPERATION_KINDS
from gateway.routing.matcher import Match, Pattern
from gateway.routing.not_found import not_found_text


def _match(
    model: str | None = None, version: str | None = None, *kinds: str, **headers: str
) -> Match:
    return Match(
        Pattern.of(model) if model else None,
        Pattern.of(version) if version else None,
        tuple((name, Pattern.of(value)) for name, value in headers.items()),
        frozenset(kind for word in kinds for kind in OPERATION_KINDS[word]) or None,
    )


@pytest.mark.parametrize(
    ("matches", "served"),
    [
        ([_match()], ""),
        ([_match("resnet*"), _match("re:bert-.+"), _match("resnet*")], "resnet*, re:bert-.+"),
        ([_match("m", "2"), _match("m", "re:[34]"), _match()], "m version 2, m version re:[34]"),
        ([_match(None, None, "health", "metadata")], "any (health, metadata)"),
        # Names and values of headers are not public.
        ([_match("m", tenant="secret")], "m with certain headers"),
        (
            [_match(f"m{i}") for i in range(23)],
            ", ".join(f"m{i}" for i in range(20)) + " and 3 more",
        ),
    ],
)
def test_served_models_are_listed(matches: list[Match], served: str) -> None:
    listed = f"; models that are served: {served}" if served else ""
    for with_key, key in ((False, ""), (True, " with this key")):
        message = not_found_text("GET", "/v2/models/m", matches, with_key)
        assert message == f"no route for GET /v2/models/m{key}{listed}"


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("/v2/models/m/infer?token=secret", "/v2/models/m/infer"),
        ("/" + "x" * 199, "/" + "x" * 199),
        ("/" + "x" * 200, "/" + "x" * 199 + "..."),
        ("/v2/models/m%2Finfer", "/v2/models/m%2Finfer; its path can be read in more than one way"),
    ],
)
def test_path_is_quoted(target: str, shown: str) -> None:
    message = not_found_text("POST", target, [_match("m")], with_key=False)
    assert message == f"no route for POST {shown}; models that are served: m"
