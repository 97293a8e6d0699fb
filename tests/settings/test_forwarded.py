import pytest
from pydantic import ValidationError

from gateway.settings.forwarded import Forwarded, parse_network


@pytest.mark.parametrize(
    ("value", "networks"),
    [
        ("none", ()),
        ("all", ("0.0.0.0/0", "::/0")),
        ("10.0.0.0/8", ("10.0.0.0/8",)),
        ("192.0.2.7", ("192.0.2.7/32",)),
        (["::1", "2001:DB8::/32", "127.0.0.1"], ("::1/128", "2001:db8::/32", "127.0.0.1/32")),
        (["10.0.0.0/255.0.0.0"], ("10.0.0.0/8",)),
    ],
)
def test_trusted_proxies_are_networks(value: object, networks: tuple[str, ...]) -> None:
    assert Forwarded.model_validate({"trusted_proxies": value}).trusted_proxies == networks
    assert Forwarded.model_validate({"trusted_proxies": networks}).trusted_proxies == networks


@pytest.mark.parametrize("value", ["some", None, {}, ["all"], [[]]])
def test_other_trusted_proxies_are_errors(value: object) -> None:
    with pytest.raises(ValidationError):
        Forwarded.model_validate({"trusted_proxies": value})


@pytest.mark.parametrize("value", [7, "", "10.0.0.0/33", "10.0.0", "host"])
def test_an_invalid_network_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match="expected a network such as"):
        parse_network(value)


@pytest.mark.parametrize(
    ("value", "meant"), [("10.1.0.0/8", "10.0.0.0/8"), ("2001:db8::1/64", "2001:db8::/64")]
)
def test_a_network_with_host_bits_is_corrected_in_the_message(value: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {meant}\\?"):
        parse_network(value)
