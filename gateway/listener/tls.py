"""TLS for client connections: loads its files, and reloads them when they change.

A reload makes a new SSL context, for new connections. It does not load the files into the context
in use, for three reasons. A load that fails half-way leaves a certificate without its key. An
authority cannot be removed from a context. And clients could resume sessions of the old files.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from dataclasses import dataclass

from gateway.system.certificates import CertificateFileError, load_authorities, load_certificate
from gateway.system.file_watcher import FileWatch

_log = logging.getLogger("tensorgate.listener")


class TlsFileError(Exception):
    """A TLS file is unusable; the message names the setting and the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of a server: its certificate and key, and the authorities of its clients.

    With ``client_ca`` the server asks clients for a certificate. If one is ``required``, it rejects
    clients without one. It always rejects an invalid one.
    """

    certificate: str
    key: str
    client_ca: str | None = None
    required: bool = True


class ReloadingTlsContext:
    """Holds the SSL context for new connections, and replaces it when its files change.

    Raises TlsFileError if the files are unusable at first.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        paths = (files.certificate, files.key, files.client_ca)
        self._watch = FileWatch(tuple(file for file in paths if file is not None))
        self._last_error = ""
        self.context = make_server_context(files)

    def reload_if_changed(self) -> str | None:
        """Make a new context if the files have changed, but not since the last check.

        Return why they cannot be used, once for each reason; an empty text if they are in use now,
        and None if there is nothing new.
        """
        if not self._watch.changed():
            return None
        try:
            self.context = make_server_context(self._files)
        except TlsFileError as error:
            message = str(error)
            if message == self._last_error:
                return None
            self._last_error = message
            _log.error("%s; new connections still use the previous certificate", message)
            return message
        self._watch.mark_used()
        self._last_error = ""
        _log.info("new connections use the certificate in %s", self._files.certificate)
        return ""


def make_server_context(files: TlsFiles) -> ssl.SSLContext:
    """Make an SSL context for connections of clients; raises TlsFileError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Renegotiation (TLS 1.2) costs the server more than the client, so it is an attack surface.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        load_certificate(context, files.certificate, files.key)
        if files.client_ca is not None:
            load_authorities(context, files.client_ca, "client_ca")
    except CertificateFileError as error:
        raise TlsFileError(f"tls.{error}") from None
    except OSError as error:  # a file was deleted after its check
        raise TlsFileError(f"tls: a file cannot be read: {error.strerror}") from None
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED if files.required else ssl.CERT_OPTIONAL
    return context


def is_world_readable(file: str) -> bool:
    """Whether users other than the file's owner and group can read it."""
    try:
        return bool(os.stat(file).st_mode & stat.S_IROTH)
    except OSError:
        return False
