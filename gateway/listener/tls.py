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

from gateway.system.certificates import CertificateFileError, load_authorities, load_certificate
from gateway.system.files import POLL_INTERVAL, FileWatch

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


class ReloadingTlsContext:
    """Holds the context for connections that come now. Raises TlsFileError."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watch = FileWatch(_named(files))
        self._told = ""
        self.context = server_context(files)

    async def watch(self) -> None:
        """Renew the context whenever the files change; until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(POLL_INTERVAL)

    def look(self) -> None:
        """Renew the context if the files have changed, and not since the last look."""
        if not self._watch.changed():
            return
        try:
            self.context = server_context(self._files)
        except TlsFileError as error:
            self._tell(f"{error}; new connections go on with the certificate from before")
        else:
            self._watch.mark_used()
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
        load_certificate(context, files.certificate, files.key)
        if files.client_ca is not None:
            load_authorities(context, files.client_ca, "client_ca")
    except CertificateFileError as error:
        raise TlsFileError(f"tls.{error}") from None
    except OSError as error:  # one has vanished since it was looked into
        raise TlsFileError(f"tls: a file cannot be read: {error.strerror}") from None
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED if files.required else ssl.CERT_OPTIONAL
    return context


def is_world_readable(file: str) -> bool:
    """Tell whether users beyond the file's owner and group may read it."""
    try:
        return bool(os.stat(file).st_mode & stat.S_IROTH)
    except OSError:
        return False


def _named(files: TlsFiles) -> tuple[str, ...]:
    named = (files.certificate, files.key, files.client_ca)
    return tuple(file for file in named if file is not None)
