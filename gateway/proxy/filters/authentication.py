"""Authenticates clients by API keys, and writes the challenge for those without a key."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from multidict import CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError

_AUTHORIZATION = "Authorization"
_REALM = 'realm="tensorgate"'

# RFC 6750, section 2.1; schemes are case-insensitive: RFC 9110, section 11.1.
_BEARER = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)


class KeyGroup:
    """Equivalent API keys, stored as digests.

    ``header`` is the one that holds the key and nothing else. Without it, clients send
    ``Authorization: Bearer KEY``.
    """

    def __init__(self, name: str, header: str | None, keys: Iterable[str]) -> None:
        self.name = name
        self.header = header
        self.replace_keys(keys)

    def replace_keys(self, keys: Iterable[str]) -> None:
        """Replace all keys."""
        self._digests = tuple(map(_digest, keys))

    @property
    def header_name(self) -> str:
        """Return the name of the header that holds a key."""
        return self.header or _AUTHORIZATION

    def authenticates(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request has one of the keys."""
        values = headers.getall(self.header_name, [])
        if len(values) != 1:
            return False  # of several values none is certain
        key = values[0] if self.header else _bearer(values[0])
        return key is not None and self.contains(key)

    def contains(self, key: str) -> bool:
        """Tell whether a key is in the group.

        Its digest is compared with all digests, so that timing reveals nothing of a key.
        """
        digest = _digest(key)
        return sum([compare_digest(digest, each) for each in self._digests]) > 0


class UnauthenticatedError(GatewayError):
    """A request without a valid key; ``challenge`` is for WWW-Authenticate."""

    def __init__(self, message: str, challenge: str) -> None:
        super().__init__(ErrorKind.UNAUTHENTICATED, message)
        self.challenge = challenge


class Authenticator:
    """Authenticates requests against the key groups of all routes.

    An unauthenticated client gets the same error for every path, so that it does not learn which
    models and routes exist.
    """

    def __init__(self, groups: Iterable[KeyGroup]) -> None:
        self._groups = tuple(dict.fromkeys(groups))
        self._headers = tuple(dict.fromkeys(group.header for group in self._groups))

    def authenticated_groups(self, headers: CIMultiDictProxy[str]) -> frozenset[KeyGroup]:
        """Return the groups of which a request has a key."""
        return frozenset([group for group in self._groups if group.authenticates(headers)])

    def __bool__(self) -> bool:
        """Tell whether there are any key groups."""
        return bool(self._groups)

    def uses_authorization(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether Authorization holds a key of any group; a repeated header counts as one."""
        values = headers.getall(_AUTHORIZATION, ())
        if len(values) != 1:
            return bool(values)  # comparing each of many values with all keys would cost too much
        key = _bearer(values[0])
        return key is not None and any(group.contains(key) for group in self._groups)

    def unauthenticated_error(self, headers: CIMultiDictProxy[str]) -> UnauthenticatedError:
        """Return the error of a request without a key."""
        wanted = " or ".join(map(_describe_header, self._headers))
        has_bearer = _bearer(headers.get(_AUTHORIZATION, "")) is not None
        challenges = [_challenge(header, has_bearer) for header in self._headers]
        return UnauthenticatedError(f"a valid API key is needed: {wanted}", ", ".join(challenges))


def _digest(key: str) -> bytes:
    return sha256(key.encode("latin-1")).digest()


def _bearer(value: str) -> str | None:
    match = _BEARER.fullmatch(value)
    return match[1] if match else None


def _describe_header(header: str | None) -> str:
    return "as 'Authorization: Bearer KEY'" if header is None else f"in the header {header}"


def _challenge(header: str | None, has_bearer: bool) -> str:
    """Write a challenge: RFC 9110, section 11.6.1, and RFC 6750, section 3."""
    if header is not None:
        return f'ApiKey {_REALM}, header="{header}"'
    return f"Bearer {_REALM}" + (', error="invalid_token"' if has_bearer else "")
