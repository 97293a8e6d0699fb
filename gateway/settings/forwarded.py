"""Settings of the section ``forwarded``: which headers tell servers about clients."""

from ipaddress import ip_address, ip_network
from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool

from gateway.settings.values.fields import Check, OneOrMore, Section
from gateway.settings.values.wording import describe, did_you_mean

_ALL = ("0.0.0.0/0", "::/0")


def parse_network(value: object) -> str:
    """Return a network, or an address as a network of one. Raises ValueError."""
    wrong = f"expected a network such as 10.0.0.0/8 or an address, got {describe(value)}"
    if not isinstance(value, str):
        raise ValueError(wrong)
    try:
        network = ip_network(value, strict=False)
    except ValueError:
        raise ValueError(wrong) from None
    if network.network_address != ip_address(value.partition("/")[0]):
        raise ValueError(f"{wrong}; did you mean {network}?")
    return str(network)


def _networks_of_word(value: object) -> object:
    """Return the networks of the words none and all; lists stay as they are."""
    match value:
        case "none":
            return ()
        case "all":
            return _ALL
        case str() if "." in value or ":" in value:
            return value
        case list() | tuple():
            return value
    expected = "none, all or networks such as [10.0.0.0/8, 127.0.0.1]"
    hint = did_you_mean("all" if value == "*" else value, ("none", "all"))
    raise ValueError(f"expected {expected}, got {describe(value)}{hint}")


_Network = Annotated[str, Check(parse_network, str)]


class Forwarded(Section):
    """Which headers tell servers about clients, and which proxies are trusted to have set them."""

    headers: StrictBool = True
    """Whether servers get X-Forwarded-For, X-Forwarded-Proto and X-Forwarded-Host. They get
    Forwarded too, where the client sends it."""
    trusted_proxies: Annotated[
        OneOrMore[_Network],
        BeforeValidator(_networks_of_word, json_schema_input_type=str | list[str]),
    ] = Field(default=(), json_schema_extra={"default": "none"})
    """Proxies whose own values of those headers are kept: none, all, or a list of networks and
    addresses. Peers on Unix sockets are always trusted."""
    via: StrictBool = True
    """Whether servers get a Via header that names the gateway. With false, they get CDN-Loop
    instead. Either shows requests that come back to the gateway."""
