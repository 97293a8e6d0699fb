"""Settings → TLS contexts, to clients and to upstreams."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from gateway.app.build.listen import ListenError
from gateway.listener.tls import ReloadingTlsContext, TlsFileError, TlsFiles, is_world_readable
from gateway.settings.schema import ClientTls, Settings
from gateway.settings.upstreams import Upstream, UpstreamTls
from gateway.settings.values.addresses import is_grpc
from gateway.system.certificates import CertificateFileError
from gateway.upstream.tls import CertificateFiles, client_context


class UpstreamTlsError(Exception):
    """A file for TLS to an upstream that cannot be used; the message names it."""


def load_server_tls(declared: ClientTls) -> ReloadingTlsContext:
    """Load the certificate that clients see. Raises ListenError."""
    required = declared.client_certificates != "optional"
    files = TlsFiles(declared.certificate, declared.key, declared.client_ca, required)
    try:
        return ReloadingTlsContext(files)
    except TlsFileError as error:
        raise ListenError(str(error)) from error


def upstream_ssl_context(name: str, upstream: Upstream) -> ssl.SSLContext | None:
    """Load the TLS context of an upstream; None without TLS. Raises UpstreamTlsError."""
    if not _uses_tls(upstream):
        return None
    declared = upstream.tls or UpstreamTls()
    files = CertificateFiles(declared.ca, declared.certificate, declared.key)
    try:
        return client_context(files, declared.verify, any(map(is_grpc, upstream.endpoints)))
    except CertificateFileError as error:
        raise UpstreamTlsError(f"upstreams.{name}.tls.{error}") from error
    except OSError as error:  # a file has vanished meanwhile
        raise UpstreamTlsError(
            f"upstreams.{name}.tls: a file cannot be read: {error.strerror}"
        ) from error


def upstream_tls_files(upstream: Upstream) -> tuple[str, ...]:
    """Return the files of TLS to an upstream."""
    declared = upstream.tls
    if declared is None or not _uses_tls(upstream):
        return ()
    named = (declared.ca, declared.certificate, declared.key)
    return tuple(file for file in named if file is not None)


def server_tls_files(declared: ClientTls | None) -> tuple[str, ...]:
    """Return the files of TLS to clients."""
    if declared is None:
        return ()
    named = (declared.certificate, declared.key, declared.client_ca)
    return tuple(file for file in named if file is not None)


def tls_warnings(settings: Settings) -> Iterator[str]:
    """Yield what is allowed but unwise."""
    if settings.tls is not None and is_world_readable(settings.tls.key):
        yield f"tls.key: every user of this machine can read {settings.tls.key}"
    for name, upstream in settings.upstreams.items():
        if _uses_tls(upstream) and upstream.tls is not None and not upstream.tls.verify:
            yield (
                f"upstreams.{name}.tls.verify: certificates are not checked, so that anybody on"
                " the way can pose as a server"
            )


def _uses_tls(upstream: Upstream) -> bool:
    return any(url.startswith(("https:", "grpcs:")) for url in upstream.endpoints)
