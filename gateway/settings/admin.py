"""Settings of the admin address, for operators."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, StrictBool

from gateway.settings.values.addresses import Address, TcpAddress
from gateway.settings.values.fields import ListenAddress, OneOrMore, Section


def _fixed_port(address: Address) -> Address:
    if isinstance(address, TcpAddress) and address.port == 0:
        raise ValueError("expected a port from 1 to 65535, got 0")
    return address


def _host_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        raise ValueError(f"expected a host name in lower case, without a port, got {name!r}")
    return name


class Admin(Section):
    """The address for operators, and what they may do there."""

    listen: Annotated[ListenAddress, AfterValidator(_fixed_port)] | None = None
    """Address for operators, over plain HTTP: HOST:PORT, [IPv6]:PORT or unix:/PATH. Without it,
    there is none."""
    hosts: OneOrMore[Annotated[str, AfterValidator(_host_name)]] = ()
    """Host names by which operators open the page of the admin address, and by which Prometheus
    reads it, beside localhost and IP addresses. Others are refused, as web pages of others could
    use them. Only /live and /ready respond to any name."""
    actions: StrictBool = False
    """Whether operators with an API key can drain and restore endpoints, and change trace settings.
    It needs keys."""
    payloads: StrictBool = False
    """Whether operators with an API key can send inference requests from the page, and see the
    values of their tensors. It needs keys."""
    keys: str | None = None
    """The group of api_keys that actions and payloads ask for."""


def as_admin_section(value: object) -> object:
    """Return the section; an address alone is its short form."""
    return value if isinstance(value, Mapping | Admin) else {"listen": value}
