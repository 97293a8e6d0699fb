"""Settings → TLS contexts, to clients and to upstreams."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import NamedTuple

from gateway.app.build.listening import UnusableSettingsError
from gateway.listener.tls import ReloadingTlsContext, TlsFileError, TlsFiles, is_world_readable
from gateway.settings.schema import ClientTls, Settings
from gateway.settings.upstreams import Upstream, UpstreamTls, urls_of
from gateway.settings.values.wording import SettingWarning
from gateway.system.certificates import CertificateFileError, CertificateFiles, client_context


class UpstreamTlsContexts(NamedTuple):
    """The TLS contexts of an upstream, by protocol; None without TLS."""

    http: ssl.SSLContext | None = None
    grpc: ssl.SSLContext | None = None


def load_server_tls(declared: ClientTls) -> ReloadingTlsContext:
    """Load the certificate that clients see. Raises UnusableSettingsError."""
    required = declared.client_certificates != "optional"
    files = TlsFiles(declared.certificate, declared.key, declared.client_ca, required)
    try:
        return ReloadingTlsContext(files)
    except TlsFileError as error:
        raise UnusableSettingsError(str(error)) from error


def upstream_tls_contexts(name: str, upstream: Upstream) -> UpstreamTlsContexts:
    """Load the TLS contexts of an upstream. Raises UnusableSettingsError."""
    declared = upstream.tls or UpstreamTls.model_construct()
    files = CertificateFiles(declared.ca, declared.certificate, declared.key)
    try:
        return UpstreamTlsContexts(
            client_context(files, declared.verify) if _has_scheme(upstream, "https") else None,
            client_context(files, declared.verify, is_http2=True)
            if _has_scheme(upstream, "grpcs")
            else None,
        )
    except CertificateFileError as error:
        raise UnusableSettingsError(f"upstreams.{name}.tls.{error}") from error
    except OSError as error:  # a file has vanished meanwhile
        raise UnusableSettingsError(
            f"upstreams.{name}.tls: a file cannot be read: {error.strerror}"
        ) from error


def upstream_tls_files(upstream: Upstream) -> tuple[str, ...]:
    """Return the files of TLS to an upstream."""
    declared = upstream.tls
    if declared is None or not _uses_tls(upstream):
        return ()
    return tuple(filter(None, (declared.ca, declared.certificate, declared.key)))


def server_tls_files(declared: ClientTls | None) -> tuple[str, ...]:
    """Return the files of TLS to clients."""
    if declared is None:
        return ()
    return tuple(filter(None, (declared.certificate, declared.key, declared.client_ca)))


def tls_warnings(settings: Settings) -> Iterator[SettingWarning]:
    """Yield what is allowed but unwise, each with the setting."""
    if settings.tls is not None and is_world_readable(settings.tls.key):
        yield ("tls", "key"), f"every user of this machine can read {settings.tls.key}"
    for name, upstream in settings.upstreams.items():
        if _uses_tls(upstream) and upstream.tls is not None and not upstream.tls.verify:
            yield (
                ("upstreams", name, "tls", "verify"),
                "certificates are not checked, so that anybody on the way can pose as a server",
            )


def _uses_tls(upstream: Upstream) -> bool:
    return _has_scheme(upstream, "https") or _has_scheme(upstream, "grpcs")


def _has_scheme(upstream: Upstream, scheme: str) -> bool:
    urls = (url for endpoint in upstream.endpoints for url in urls_of(endpoint))
    return any(url.startswith(f"{scheme}:") for url in urls)
