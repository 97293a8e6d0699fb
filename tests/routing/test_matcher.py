from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.protocol.operations import OPERATION_KINDS, Operation, OperationKind
from gateway.routing.matcher import Match, Pattern, find_first_match, not_found_text

INFER = Operation(OperationKind.INFER, "resnet50", "2")
UNVERSIONED = Operation(OperationKind.INFER, "resnet50")
INDEX = Operation(OperationKind.REPOSITORY)


def _headers(*headers: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(headers))


@pytest.mark.parametrize(
    ("pattern", "fitting", "unfit"),
    [
        ("resnet", ["resnet"], ["Resnet", "resnet5", "xresnet", "", "resnet\n"]),
        ("resnet*", ["resnet", "resnet50", "resnet\n"], ["Resnet50", "aresnet", "resne"]),
        ("*", ["x", ""], []),
        ("*-v?", ["a-v1", "-v-"], ["a-v", "a-v12", "a-V1"]),
        ("a.b+c", ["a.b+c"], ["axbbc", "a.bbc"]),
        ("a%2F*", ["a%2Fb"], ["a/b", "a%2fb"]),
        ("re:resnet[0-9]+", ["resnet5", "resnet50"], ["resnet", "xresnet5", "resnet5x", "RESNET5"]),
    ],
)
def test_pattern_matches_whole_names(pattern: str, fitting: list[str], unfit: list[str]) -> None:
    made = Pattern.of(pattern)
    assert [name for name in fitting + unfit if made.matches(name)] == fitting
    assert made.text == pattern
    assert made == Pattern.of(pattern)


def _match(
    model: str | None = None,
    version: str | None = None,
    headers: dict[str, str] | None = None,
    *kinds: OperationKind,
) -> Match:
    return Match(
        Pattern.of(model) if model else None,
        Pattern.of(version) if version else None,
        tuple((name, Pattern.of(value)) for name, value in (headers or {}).items()),
        frozenset(kinds) or None,
    )


@pytest.mark.parametrize(
    ("match", "asked", "headers", "holds"),
    [
        (_match(), INDEX, (), True),
        (_match("resnet"), INFER, (), False),
        (_match("*"), UNVERSIONED, (), True),
        (_match(version="[3-9]"), INFER, (), False),
        (_match(version="*"), UNVERSIONED, (), False),
        (_match(headers={"x-tenant": "blue"}), INDEX, [("X-TENANT", "blue")], True),
        (_match(headers={"x-tenant": "blue"}), INDEX, [("x-tenant", "blue,red")], False),
        (_match(headers={"x-tenant": "b*"}), INDEX, [("x-tenant", "a"), ("x-tenant", "b")], True),
        (_match(headers={"x-tenant": "*"}), INDEX, (), False),
        (_match(headers={"a": "1", "b": "re:[0-9]"}), INDEX, [("a", "1"), ("b", "7")], True),
        (_match(None, None, None, OperationKind.INFER), INDEX, (), False),
        (_match(None, None, None, OperationKind.INFER, OperationKind.REPOSITORY), INDEX, (), True),
        (_match("x", None, None, OperationKind.INFER), INFER, (), False),
    ],
)
def test_match_needs_all_conditions(
    match: Match, asked: Operation, headers: tuple[tuple[str, str], ...], holds: bool
) -> None:
    assert match.matches(asked, _headers(*headers)) is holds


def test_first_match_wins() -> None:
    matches = [_match("vgg"), _match("resnet*"), _match("resnet50"), _match()]
    assert find_first_match(matches, INFER, _headers()) == 1
    assert find_first_match(matches[::-1], INFER, _headers()) == 0
    assert find_first_match(matches, INDEX, _headers()) == 3
    assert find_first_match(matches[:3], INDEX, _headers()) is None
    assert find_first_match([], INFER, _headers()) is None


# The text for a request that matches no route

HEALTH_OR_METADATA = OPERATION_KINDS["health"] | OPERATION_KINDS["metadata"]


@pytest.mark.parametrize(
    ("matches", "served"),
    [
        ([_match()], ""),
        ([_match("resnet*"), _match("re:bert-.+"), _match("resnet*")], "resnet*, re:bert-.+"),
        ([_match("m", "2"), _match("m", "re:[34]"), _match()], "m version 2, m version re:[34]"),
        ([_match(None, None, None, *HEALTH_OR_METADATA)], "any (health, metadata)"),
        # Names and values of headers are not public.
        ([_match("m", headers={"tenant": "secret"})], "m with certain headers"),
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
