"""Parse where the admin address is: HOST:PORT, a URL, or a Unix socket."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.settings.values.addresses import UnixAddress, parse_address
from gateway.settings.values.wording import describe

_URL = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?P<rest>.*)")
_PATH = re.compile(r"[!-~]{0,1000}")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the admin address is: a TCP port or a socket, with or without TLS.

    A proxy before it may have it below a path.
    """

    shown: str
    """As the operator knows it."""
    host: str = "localhost"
    port: int = 80
    socket: str | None = None
    tls: bool = False
    prefix: str = ""


def parse_admin_address(value: str) -> AdminAddress:
    """Return the address of ``HOST:PORT``, ``http://HOST/PATH`` or ``unix:/PATH``.

    Raises ValueError.
    """
    found = _URL.fullmatch(value)
    if found is None:
        address = parse_address(value)
        if isinstance(address, UnixAddress):
            return AdminAddress(str(address), socket=address.path)
        return _with_port(AdminAddress(str(address), address.host, address.port))
    if "@" in found["authority"]:
        raise ValueError("a user name or password in the URL is not supported")
    if found["rest"].startswith("?"):
        raise ValueError(f"expected no query in the URL, got {describe(found['rest'])}")
    if not _PATH.fullmatch(found["path"]):
        raise ValueError(f"expected a path of ASCII characters, got {describe(found['path'])}")
    scheme, authority = found["scheme"], found["authority"]
    has_port = re.search(r":[0-9]+$", authority) and not authority.endswith("::")
    address = parse_address(authority if has_port else f"{authority}:{_PORTS[scheme]}")
    assert not isinstance(address, UnixAddress)
    prefix = found["path"].rstrip("/")
    shown = f"{scheme}://{authority}{prefix}"
    tls = scheme == "https"
    return _with_port(AdminAddress(shown, address.host, address.port, tls=tls, prefix=prefix))


def _with_port(address: AdminAddress) -> AdminAddress:
    if address.port == 0:
        raise ValueError("expected a port from 1 to 65535, got 0")
    return address
