"""The TLS that is spoken with clients: the files it is made of, and their renewal.

Why a renewal makes a new context, which the connections that come then are given, and does not load
the files into the one in use: a load that fails half way leaves a context with a certificate and no
key for it; an authority can be added to a context but not taken away; and clients could go on with
sessions that began under the old files. A context lives as long as the connections that it serves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
from dataclasses import dataclass

LOOK = 2.0
"""Seconds between two looks at the files; what is new is loaded when it looks the same twice."""

_log = logging.getLogger("tensorgate.listener")


class TlsFileError(Exception):
    """A file that cannot be used; the message names the setting and the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Name the files of a server, PEM: who it is, and who issues its clients' certificates.

    With ``client_ca`` clients are asked for a certificate; they must show one if it is
    ``required``, and else are served without one too, but not with one that is wrong.
    """

    certificate: str
    key: str
    client_ca: str | None = None
    required: bool = True


class ServerTls:
    """Holds the context for connections that come now. Raises TlsFileError."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._loaded = self._seen = _identities(files)
        self._told = ""
        self.context = server_context(files)

    async def watch(self) -> None:
        """Renew the context whenever the files change; until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK)

    def look(self) -> None:
        """Renew the context if the files have changed, and not since the last look.

        Files that are written in place are seen half written, and of two files one changes first.
        """
        before, self._seen = self._seen, _identities(self._files)
        if self._seen == self._loaded or self._seen != before:
            return
        try:
            self.context = server_context(self._files)
        except TlsFileError as error:
            self._tell(f"{error}; new connections go on with the certificate from before")
        else:
            self._loaded = self._seen
            self._told = ""
            _log.info("the certificate in %s is in use from now on", self._files.certificate)

    def _tell(self, fault: str) -> None:
        """Log a fault, but once: it is met again with each look."""
        if fault != self._told:
            self._told = fault
            _log.error("%s", fault)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Make a context for connections of clients. Raises TlsFileError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A new handshake within a connection costs the server more than the client: RFC 5246 has it.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        _show(context, files.certificate, files.key)
        if files.client_ca is not None:
            _trust(context, files.client_ca)
    except OSError as error:  # one has vanished since it was looked into
        raise TlsFileError(f"tls: a file cannot be read: {error.strerror}") from None
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED if files.required else ssl.CERT_OPTIONAL
    return context


def readable_by_others(file: str) -> bool:
    """Tell whether users beyond the file's owner and group may read it."""
    try:
        return bool(os.stat(file).st_mode & stat.S_IROTH)
    except OSError:
        return False


def _show(context: ssl.SSLContext, certificate: str, key: str) -> None:
    _look_into("certificate", certificate)
    _look_into("key", key)
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _EncryptedKeyError:
        raise TlsFileError(
            f"tls.key: {key} is encrypted; a key without a password is needed"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFileError(f"tls.key: {key} is not the key of {certificate}") from None
        raise TlsFileError(_unusable(certificate, key, error)) from None


def _trust(context: ssl.SSLContext, client_ca: str) -> None:
    _look_into("client_ca", client_ca)
    try:
        context.load_verify_locations(client_ca)
    except ssl.SSLError:
        raise TlsFileError(
            f"tls.client_ca: {client_ca} holds no certificates in PEM form"
        ) from None


def _look_into(setting: str, file: str) -> None:
    """Raise TlsFileError where a file cannot be read: ssl does not tell which one it was."""
    try:
        with open(file, "rb") as opened:
            opened.read(1)
    except OSError as error:
        raise TlsFileError(f"tls.{setting}: cannot read {file}: {error.strerror}") from None


def _unusable(certificate: str, key: str, error: ssl.SSLError) -> str:
    """Tell which of two files is at fault."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except ssl.SSLError:
        return f"tls.certificate: {certificate} holds no certificate in PEM form"
    if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        weakness = error.reason.replace("_", " ").lower()
        return f"tls.certificate: {certificate} is too weak: {weakness}"
    return f"tls.key: {key} holds no private key in PEM form"


class _EncryptedKeyError(Exception):
    """A key that needs a password."""


def _no_password() -> str:
    # Without this, OpenSSL would ask for it on the terminal.
    raise _EncryptedKeyError


_Identity = tuple[int, int, int, int] | None


def _identities(files: TlsFiles) -> tuple[_Identity, ...]:
    named = (files.certificate, files.key, files.client_ca)
    return tuple(_identity(file) for file in named if file is not None)


def _identity(file: str) -> _Identity:
    """Give what tells a file from the one before it, at the end of symbolic links too."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
