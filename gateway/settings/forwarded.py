"""The settings of what servers are told of clients."""

from ipaddress import ip_address, ip_network
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool

from gateway.settings.values.fields import OneOrMore, Section
from gateway.settings.values.wording import describe, did_you_mean

_ALL = ("0.0.0.0/0", "::/0")


def parse_network(value: object) -> str:
    """Return what ``10.0.0.0/8`` or a single address names, as a network. Raises ValueError."""
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


def _networks(value: object) -> object:
    """Return the networks that are meant by a word."""
    match value:
        case "none":
            return ()
        case "all":
            return _ALL
        case str() if "." in value or ":" in value:
            return value
        case list() | tuple():
            return value
    wanted = "none, all or networks such as [10.0.0.0/8, 127.0.0.1]"
    hint = did_you_mean("all" if value == "*" else value, ("none", "all"))
    raise ValueError(f"expected {wanted}, got {describe(value)}{hint}")


_Network = Annotated[str, PlainValidator(parse_network, json_schema_input_type=str)]


class Forwarded(Section):
    """Say what servers are told of clients, and whom to believe what came before."""

    headers: StrictBool = Field(
        default=True,
        description="Whether servers get X-Forwarded-For, -Proto and -Host, and Forwarded where the"
        " client sends it.",
    )
    trusted_proxies: Annotated[
        OneOrMore[_Network],
        BeforeValidator(_networks, json_schema_input_type=str | list[str]),
    ] = Field(
        default=(),
        description="Which addresses are believed what they say in those headers: none, all, or a"
        " list of networks. Peers on Unix sockets are, always.",
        json_schema_extra={"default": "none"},
    )
    via: StrictBool = Field(
        default=True,
        description="Whether servers get a Via that names the gateway; with false, CDN-Loop does.",
    )
