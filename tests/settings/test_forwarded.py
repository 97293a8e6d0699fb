import pytest

from gateway.settings.forwarded import Forwarded


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
