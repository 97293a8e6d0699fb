"""Parse addresses: where the gateway listens, and where its servers are."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from gateway.settings.values.wording import describe

_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<name>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_ALL_DIGITS = re.compile(r"[0-9.]+")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>.*)")
_DEFAULT_PORTS = {"http": 8000, "https": 8000, "grpc": 8001, "grpcs": 8001}
"""The schemes of servers, with the ports that Triton listens on."""
_PATH = re.compile(r"/[!-~]{0,1023}")
_UNIX_PATH_BYTES = 107  # sun_path of Linux holds 108 with its closing NUL


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port of a host; with port 0 the system chooses one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket, by its absolute path."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(value: object) -> Address:
    """Return the address of ``host:port``, ``[::1]:port`` or ``unix:/path``. Raises ValueError."""
    match value:
        case TcpAddress() | UnixAddress():
            return value
        case str() if value.startswith("unix:"):
            return _unix(value.removeprefix("unix:"))
        case str() if found := _AUTHORITY.fullmatch(value):
            return _tcp(found)
        case int() if not isinstance(value, bool) and 0 <= value <= 65535:
            hint = f"; did you mean 127.0.0.1:{value}?"
        case str() if (url := _URL.fullmatch(value)) and _AUTHORITY.fullmatch(url["authority"]):
            hint = f"; did you mean {url['authority']}?"
        case _:
            hint = ""
    expected = "expected HOST:PORT, [IPv6]:PORT or unix:/PATH"
    raise ValueError(f"{expected}, got {describe(value)}{hint}")


def parse_endpoint(value: object) -> str:
    """Return a server's URL: ``http://host:port``, ``grpc://host:port`` or ``unix:/path``.

    With TLS it begins with ``https`` or ``grpcs``. The port is required, as inference servers
    seldom use 80. Raises ValueError.
    """
    if isinstance(value, str) and value.startswith("unix:"):
        return str(_unix(value.removeprefix("unix:")))
    found = _URL.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        is_address = isinstance(value, str) and _AUTHORITY.fullmatch(value)
        hint = f"; did you mean http://{value}?" if is_address else ""
        wanted = "expected a URL such as http://127.0.0.1:8000"
        raise ValueError(f"{wanted}, got {describe(value)}{hint}")
    scheme = found["scheme"].lower()
    if scheme not in _DEFAULT_PORTS:
        expected = "expected http://, https://, grpc://, grpcs:// or unix:/"
        raise ValueError(f"{expected}, got {describe(scheme)}")
    if "@" in found["authority"]:
        raise ValueError("a user name or password in the URL is not supported")
    if found["rest"] not in ("", "/"):
        server = _server(scheme, found["authority"])
        got, hint = describe(found["rest"]), f"did you mean {scheme}://{server}?"
        raise ValueError(f"expected no path or query after the port, got {got}; {hint}")
    return f"{scheme}://{_server(scheme, found['authority'])}"


def address_of(url: str) -> Address:
    """Return the address of a URL that ``parse_endpoint`` gave."""
    return parse_address(url.partition("://")[2] or url)


def parse_endpoint_over(scheme: str) -> Callable[[object], str]:
    """Return a function that does as ``parse_endpoint``, for one scheme, with TLS or without."""

    def parse(value: object) -> str:
        url = parse_endpoint(value)
        if not url.startswith((f"{scheme}://", f"{scheme}s://")):
            raise ValueError(f"expected {scheme}:// or {scheme}s://, got {describe(url)}")
        return url

    return parse


def parse_path(value: object) -> str:
    """Return a request target: a path, and perhaps a query. Raises ValueError."""
    if isinstance(value, str) and _PATH.fullmatch(value) and "#" not in value:
        return value
    raise ValueError(f"expected a path such as /v2/health/ready, got {describe(value)}")


def is_grpc(url: str) -> bool:
    """Tell whether the gateway speaks gRPC to a URL."""
    return url.lower().startswith(("grpc://", "grpcs://"))


def has_host_name(url: str) -> bool:
    """Tell whether a URL has a host name, and no IP address or socket."""
    found = _URL.fullmatch(url)
    host = found["authority"].rpartition(":")[0] if found else ""
    return bool(host) and not host.startswith("[") and not _ALL_DIGITS.fullmatch(host)


def parse_host(value: object) -> str:
    """Return a host name or an IP address. Raises ValueError."""
    match value:
        case str() if _ALL_DIGITS.fullmatch(value):
            return _ip(IPv4Address, value)
        case str() if ":" in value:
            return _ip(IPv6Address, value.removeprefix("[").removesuffix("]"))
        case str() if _HOST_NAME.fullmatch(value):
            return value
    raise ValueError(f"expected a host name or an IP address, got {describe(value)}")


def _server(scheme: str, authority: str) -> TcpAddress:
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        no_port = _HOST_NAME.fullmatch(authority) and "," not in authority
        port = _DEFAULT_PORTS[scheme]
        hint = f"; the port is missing, as in {scheme}://{authority}:{port}" if no_port else ""
        wanted = f"expected a host and a port after {scheme}://"
        raise ValueError(f"{wanted}, got {describe(authority)}{hint}")
    address = _tcp(found)
    if address.port == 0:
        raise ValueError("expected a port from 1 to 65535, got 0")
    return address


def _tcp(found: re.Match[str]) -> TcpAddress:
    port = int(found["port"])
    if port > 65535:
        raise ValueError(f"expected a port up to 65535, got {port}")
    if found["ipv6"] is not None:
        return TcpAddress(_ip(IPv6Address, found["ipv6"]), port)
    name = found["name"]
    if not name:
        hint = f"did you mean 127.0.0.1:{port}, or 0.0.0.0:{port}?"
        raise ValueError(f"a host is missing before :{port}; {hint}")
    return TcpAddress(parse_host(name), port)


def _ip(kind: type[IPv4Address | IPv6Address], text: str) -> str:
    try:
        return str(kind(text))
    except ValueError:
        version = "6" if kind is IPv6Address else "4"
        raise ValueError(f"expected an IPv{version} address, got {describe(text)}") from None


def _unix(path: str) -> UnixAddress:
    if not path.startswith("/") or path.endswith("/"):
        raise ValueError(f"expected unix: and the absolute path of a socket, got {describe(path)}")
    if len(path.encode()) > _UNIX_PATH_BYTES:
        raise ValueError(f"a socket's path may hold {_UNIX_PATH_BYTES} bytes, not more")
    return UnixAddress(path)
