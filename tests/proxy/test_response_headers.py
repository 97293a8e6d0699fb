"""Headers that routes change in their responses."""

import pytest
from multidict import CIMultiDict

from gateway.proxy.response_headers import ResponseHeaderPolicy


@pytest.mark.parametrize(
    ("said", "vary"),
    [
        ([], "Accept-Encoding"),
        ([""], "Accept-Encoding"),
        (["Origin"], "Origin, Accept-Encoding"),
        (["Origin", "Accept"], "Origin, Accept, Accept-Encoding"),
        (["Origin, accept-encoding"], "Origin, accept-encoding"),
        (["*"], "*"),
    ],
)
def test_vary_names_accept_encoding(said: list[str], vary: str) -> None:
    headers = CIMultiDict([("X-A", "1"), *(("Vary", value) for value in said)])
    policy = ResponseHeaderPolicy(adds_vary=True)
    assert policy.apply_to_lines(tuple(headers.items())) == (("X-A", "1"), ("Vary", vary))
    policy.apply(headers)
    assert list(headers.items()) == [("X-A", "1"), ("Vary", vary)]


def test_policy_without_changes_keeps_the_headers() -> None:
    headers = CIMultiDict({"Vary": "Origin"})
    ResponseHeaderPolicy().apply(headers)
    assert headers == {"Vary": "Origin"}
