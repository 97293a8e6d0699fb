"""Settings → what TLS takes, with clients and with servers."""

from __future__ import annotations

import logging
import ssl

from gateway.app.listen import ListenError
from gateway.certificates import CertificateFileError
from gateway.listener.tls import ServerTls, TlsFileError, TlsFiles, readable_by_others
from gateway.settings.schema import Settings
from gateway.settings.upstreams import UpstreamTls
from gateway.upstream.tls import CertificateFiles, client_context

_log = logging.getLogger("tensorgate")


class UpstreamTlsError(Exception):
    """A file that TLS to servers needs, and that cannot be used; the message names it."""


def client_tls(settings: Settings) -> ServerTls | None:
    """Load what TLS with clients takes; None where it is not spoken. Raises ListenError."""
    declared = settings.tls
    if declared is None:
        return None
    required = declared.client_certificates != "optional"
    files = TlsFiles(declared.certificate, declared.key, declared.client_ca, required)
    try:
        tls = ServerTls(files)
    except TlsFileError as error:
        raise ListenError(str(error)) from error
    if readable_by_others(files.key):
        _log.warning("tls.key: every user of this machine can read %s", files.key)
    return tls


def server_contexts(settings: Settings) -> dict[str, ssl.SSLContext]:
    """Load what TLS takes towards the upstreams with https endpoints. Raises UpstreamTlsError."""
    contexts = {}
    for name, upstream in settings.upstreams.items():
        if not any(url.startswith("https:") for url in upstream.endpoints):
            continue
        declared = upstream.tls or UpstreamTls()
        files = CertificateFiles(declared.ca, declared.certificate, declared.key)
        try:
            contexts[name] = client_context(files, declared.verify)
        except CertificateFileError as error:
            raise UpstreamTlsError(f"upstreams.{name}.tls.{error}") from error
        if not declared.verify:
            _log.warning(
                "upstreams.%s.tls.verify: certificates are not checked, so that anybody on the way"
                " can pose as a server",
                name,
            )
    return contexts
