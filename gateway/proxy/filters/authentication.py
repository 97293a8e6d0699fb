"""Keys by which clients are let in: what a request shows, and what it is told that shows none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from multidict import CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError

MAX_KEYS = 1000
"""Keys of a group at most: each request with a head that is not remembered is compared with all."""

_AUTHORIZATION = "Authorization"
_REALM = 'realm="tensorgate"'

# Visible ASCII but for the comma, which would divide a header's value.
_KEY = re.compile(r"[!-+\--~]{1,512}")
# RFC 6750, section 2.1; the scheme's case does not count: RFC 9110, section 11.1.
_BEARER = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)


class KeyGroup:
    """Keys of which each is as good as the other, kept as digests.

    ``header`` is the one that holds a key and nothing else; without it, clients show theirs as
    ``Authorization: Bearer KEY``.
    """

    def __init__(self, name: str, header: str | None, keys: Iterable[str]) -> None:
        self.name = name
        self.header = header
        self.replace_keys(keys)

    def replace_keys(self, keys: Iterable[str]) -> None:
        """Take these keys for those that there were."""
        self._digests = tuple(map(_digest, keys))

    @property
    def header_name(self) -> str:
        """Give the name of the header in which clients show a key."""
        return self.header or _AUTHORIZATION

    def authenticates(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request shows one of the keys."""
        values = headers.getall(self.header_name, [])
        if len(values) != 1:
            return False  # which of several is meant, servers would have to guess
        key = values[0] if self.header else _bearer(values[0])
        return key is not None and self.contains(key)

    def contains(self, key: str) -> bool:
        """Tell whether a key is one of these.

        What is compared are digests, with all of them, so that time tells nothing of a key.
        """
        shown = _digest(key)
        return sum([compare_digest(shown, digest) for digest in self._digests]) > 0


class UnauthenticatedError(GatewayError):
    """A request without a key that lets it in; ``challenge`` is for WWW-Authenticate."""

    def __init__(self, message: str, challenge: str) -> None:
        super().__init__(ErrorKind.UNAUTHENTICATED, message)
        self.challenge = challenge


class Authenticator:
    """Knows all groups of keys that any route asks for.

    Who shows no key of these is told the same whatever it asks for, so that nobody learns which
    models and routes there are.
    """

    def __init__(self, groups: Iterable[KeyGroup]) -> None:
        self._groups = tuple(dict.fromkeys(groups))
        self._headers = tuple(dict.fromkeys(group.header for group in self._groups))

    def known(self, headers: CIMultiDictProxy[str]) -> frozenset[KeyGroup]:
        """Give the groups of which a request shows a key."""
        return frozenset([group for group in self._groups if group.authenticates(headers)])

    def __bool__(self) -> bool:
        """Tell whether there are any keys."""
        return bool(self._groups)

    def is_in_authorization(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether Authorization holds a key of any group; given twice, it is taken to."""
        values = headers.getall(_AUTHORIZATION, ())
        if len(values) != 1:
            return bool(values)  # a head has room for many, and each would be compared with all
        key = _bearer(values[0])
        return key is not None and any(group.contains(key) for group in self._groups)

    def unauthenticated_error(self, headers: CIMultiDictProxy[str]) -> UnauthenticatedError:
        """Make the error of a request that shows no key."""
        wanted = " or ".join(map(_how, self._headers))
        shows_one = _bearer(headers.get(_AUTHORIZATION, "")) is not None
        challenges = [_challenge(header, shows_one) for header in self._headers]
        return UnauthenticatedError(f"a valid key is needed: {wanted}", ", ".join(challenges))


def parse_keys(lines: Iterable[str], word: str = "line") -> tuple[str, ...]:
    """Read keys, one on each line; empty lines and those that begin with # do not count.

    Raises ValueError, which says which ``word`` is no key, by its number, and does not repeat it.
    """
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not _KEY.fullmatch(line):
            raise ValueError(
                f"{word} {number} is no key, which is 1 to 512 visible ASCII characters"
                " without a comma"
            )
        keys.append(line)
    if not keys:
        raise ValueError("there is no key")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"there are more than {MAX_KEYS} keys")
    return tuple(dict.fromkeys(keys))


def _digest(key: str) -> bytes:
    return sha256(key.encode("latin-1")).digest()


def _bearer(value: str) -> str | None:
    found = _BEARER.fullmatch(value)
    return found[1] if found else None


def _how(header: str | None) -> str:
    return "as 'Authorization: Bearer KEY'" if header is None else f"in the header {header}"


def _challenge(header: str | None, shows_one: bool) -> str:
    """Write a challenge: RFC 9110, section 11.6.1, and RFC 6750, section 3."""
    if header is not None:
        return f'ApiKey {_REALM}, header="{header}"'
    return f"Bearer {_REALM}" + (', error="invalid_token"' if shows_one else "")
