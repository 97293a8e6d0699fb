"""API keys: which authenticate, and what unauthenticated clients get."""

from __future__ import annotations

import hmac
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import OPERATION_KINDS
from gateway.proxy.destination import Destination
from gateway.proxy.filters import authentication as keys_module
from gateway.proxy.filters.authentication import Authenticator, KeyGroup
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match, Pattern
from tests.support.doubles.fast_path import ReadyEndpoint
from tests.support.doubles.streaming import make_destination


def _headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def _bearer(key: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {key}"


# ------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("key", ["a", "b64-._~+/token==", "x" * 512, "!#$%&'()*:;<=>?@[]^`{|}\"\\"])
def test_key_authenticates_a_request(key: str) -> None:
    for keys in ([key], ["other", key], [key, "other"]):
        assert KeyGroup("g", None, keys).authenticates(_headers(_bearer(key)))
        assert KeyGroup("g", "X-Key", keys).authenticates(_headers(("x-key", key)))
        for scheme in ("bearer", "BEARER "):
            headers = _headers(("AUTHORIZATION", f"{scheme} {key}"))
            assert KeyGroup("g", None, keys).authenticates(headers)


@pytest.mark.parametrize(
    ("header", "values"),
    [
        *((None, (f"Bearer {key}",)) for key in ("Key", "ke", "keyy", "key,other", "\xff")),
        *((None, (each,)) for each in ("key", "Bearerkey", "Bearer\tkey", "X Bearer key", "")),
        # It is unknown which one a server would use.
        (None, ("Bearer no", "Bearer key")),
        (None, ()),
        *(("X-Key", (each,)) for each in ("", "Bearer key", "key ", "KEY", "key, other", "\xff")),
        ("X-Key", ("key", "key")),
        ("X-Key", ()),
    ],
)
def test_invalid_key_does_not_authenticate(header: str | None, values: tuple[str, ...]) -> None:
    group = KeyGroup("g", header, ["key", "other"])
    elsewhere = _bearer("key") if header else ("X-Key", "key")
    headers = _headers(*((group.header_name, value) for value in values), elsewhere)
    assert not group.authenticates(headers)
    assert not KeyGroup("g", header, []).authenticates(headers)


def test_keys_can_be_replaced() -> None:
    group = KeyGroup("g", None, ["old", "kept"])
    group.replace_keys(["kept", "new"])
    let_in = [group.authenticates(_headers(_bearer(key))) for key in ("old", "kept", "new")]
    assert let_in == [False, True, True]


def test_key_digest_is_compared_with_all_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(keys_module, "compare_digest", noting)
    group = KeyGroup("g", None, ["first", "second", "third"])
    for key in ("first", "third", "none"):
        compared.clear()
        group.authenticates(_headers(_bearer(key)))
        assert len(compared) == 3
        assert {len(each) for pair in compared for each in pair} == {32}
    assert "second" not in str(vars(group))


# -------------------------------------------------------------------------- unauthenticated clients

PEOPLE = KeyGroup("people", None, ["p-key"])
OTHERS = KeyGroup("others", None, ["o-key"])
ROBOTS = KeyGroup("robots", "X-Api-Key", ["r-key"])


@pytest.mark.parametrize(
    ("groups", "message", "challenge"),
    [
        (
            (ROBOTS,),
            "a valid API key is needed: in the header X-Api-Key",
            'ApiKey realm="tensorgate", header="X-Api-Key"',
        ),
        (
            (PEOPLE, ROBOTS, PEOPLE),
            "a valid API key is needed: as 'Authorization: Bearer KEY' or in the header X-Api-Key",
            'Bearer realm="tensorgate", ApiKey realm="tensorgate", header="X-Api-Key"',
        ),
    ],
)
def test_unauthenticated_client_gets_a_challenge(
    groups: tuple[KeyGroup, ...], message: str, challenge: str
) -> None:
    error = Authenticator(groups).unauthenticated_error(_headers())
    assert error.kind is ErrorKind.UNAUTHENTICATED
    assert (error.message, error.challenge) == (message, challenge)


@pytest.mark.parametrize(
    ("value", "with_error"), [("Bearer wrong", True), ("Basic eDp5", False), ("Bearer", False)]
)
def test_wrong_key_gets_invalid_token(value: str, with_error: bool) -> None:
    # RFC 6750, section 3.1: a request without credentials gets no error code
    error = Authenticator([PEOPLE]).unauthenticated_error(_headers(("Authorization", value)))
    challenge = 'Bearer realm="tensorgate"' + ', error="invalid_token"' * with_error
    assert error.challenge == challenge
    assert "wrong" not in error.message


def test_request_belongs_to_the_groups_of_its_keys() -> None:
    doorkeeper = Authenticator([PEOPLE, OTHERS, ROBOTS])
    assert doorkeeper.authenticated_groups(_headers()) == set()
    assert doorkeeper.authenticated_groups(_headers(_bearer("o-key"))) == {OTHERS}
    both = _headers(("X-Api-Key", "r-key"), _bearer("p-key"))
    assert doorkeeper.authenticated_groups(both) == {PEOPLE, ROBOTS}
    assert doorkeeper
    assert not Authenticator([])


# ------------------------------------------------------------------------------------------- routes


def _route(
    model: str | None,
    *keys: KeyGroup,
    kinds: str = "",
    destination: Destination | None = None,
    **more: Any,
) -> Route:
    match = Match(
        model=Pattern.of(model) if model else None, kinds=OPERATION_KINDS[kinds] if kinds else None
    )
    withheld = frozenset(group.header_name.lower() for group in keys)
    router = (destination or make_destination(ReadyEndpoint()),)
    return Route(match, router, dropped_headers=withheld, keys=keys, **more)


def _find(router: Router, model: str, *pairs: tuple[str, str]) -> str:
    """Return the headers dropped from a request, or the status and message of its error."""
    try:
        found = router.find("POST", f"/v2/models/{model}/infer", _headers(*pairs))
    except GatewayError as error:
        return f"{error.kind.value.status} {error.message}"
    return " ".join(sorted(found.dropped_headers))


ROUTES = [_route("p", PEOPLE), _route("pr", PEOPLE, ROBOTS), _route("o", OTHERS), _route("open")]


@pytest.mark.parametrize(
    ("pairs", "withheld"),
    [
        ((("authorization", "bearer  p-key"),), "authorization"),
        ((_bearer("wrong"), _bearer("p-key")), "authorization"),
        ((_bearer("wrong"),), ""),
    ],
)
def test_key_is_dropped_on_an_open_route(pairs: tuple[tuple[str, str], ...], withheld: str) -> None:
    assert _find(Router(ROUTES), "open", *pairs) == withheld


@pytest.mark.parametrize(
    ("pair", "closed", "listed"),
    [(_bearer("p-key"), "o", "p, pr, open"), (("X-Api-Key", "r-key"), "p", "pr, open")],
)
def test_route_for_other_keys_is_a_404(pair: tuple[str, str], closed: str, listed: str) -> None:
    for model in (closed, "unknown"):
        assert _find(Router(ROUTES), model, pair) == (
            f"404 no route for POST /v2/models/{model}/infer with this key;"
            f" models that are served: {listed}"
        )


def test_first_matching_rule_decides_whatever_the_key() -> None:
    router = Router([_route("p", PEOPLE), _route(None, OTHERS)])
    assert _find(router, "p", _bearer("o-key")).startswith("404 ")
    assert _find(router, "x", _bearer("o-key")) == "authorization"


def test_authentication_comes_before_denied_operations() -> None:
    router = Router(
        [
            _route("p", PEOPLE, denied_kinds=OPERATION_KINDS["infer"]),
            _route(None, denied_kinds=OPERATION_KINDS["infer"]),
        ]
    )
    assert _find(router, "p").startswith("401 ")
    assert _find(router, "p", _bearer("p-key")).startswith("403 ")
    assert _find(router, "x").startswith("403 ")


@pytest.mark.parametrize(
    ("pairs", "listed"),
    [
        ((), "open all"),
        ((("X-Api-Key", "r-key"), _bearer("o-key")), "both others open all"),
    ],
)
def test_model_list_holds_only_routes_open_to_the_client(
    pairs: tuple[tuple[str, str], ...], listed: str
) -> None:
    names = ("people", "both", "others", "open", "all")
    people, both, others, some, rest = (
        make_destination(ReadyEndpoint(), name=name) for name in names
    )
    router = Router(
        [
            _route("p", PEOPLE, destination=people),
            _route("pr", PEOPLE, ROBOTS, destination=both),
            _route("o", OTHERS, destination=others),
            _route(None, kinds="health", destination=people),  # open for health probes
            _route("open", destination=some),
            _route(None, destination=rest),
        ]
    )
    for method, target in (
        ("POST", "/v2/repository/index"),
        ("GET", "/v2/models/stats"),
        ("GET", "/v1/models"),
    ):
        found = router.find(method, target, _headers(*pairs))
        assert " ".join(upstream.name for upstream in found.upstreams) == listed
