"""TLS files: which ones are unusable, and what happens when they change."""

import logging
import os
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from gateway.listener.tls import ReloadingTlsContext, TlsFileError, TlsFiles
from tests.support.certificates import authority, ca_file, certificate_files


def _new(folder: Path) -> TlsFiles:
    """Write a new certificate and its key."""
    folder.mkdir(exist_ok=True)
    return TlsFiles(*certificate_files(folder, authority().issue_cert("127.0.0.1")))


def _shown(context: ssl.SSLContext) -> bytes:
    """Return the certificate that a client of this context gets."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority().configure_trust(trusting)
    client = trusting.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def _written(certificate: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(certificate).read_text())


@pytest.mark.parametrize(
    ("setting", "text", "error"),
    [
        ("certificate", "FOLDER", "cannot read {certificate}: Is a directory"),
        ("key", None, "cannot read {key}: No such file or directory"),
        ("client_ca", "", "{client_ca} holds no certificates in PEM form"),
        ("certificate", "KEY", "{certificate} holds no certificate in PEM form"),
        ("key", "CERTIFICATE", "{key} holds no private key in PEM form"),
        ("key", "OTHER KEY", "{key} is not the key of {certificate}"),
        ("key", "ENCRYPTED", "{key} is encrypted; a key without a password is needed"),
    ],
)
def test_unusable_file_raises(tmp_path: Path, setting: str, text: str | None, error: str) -> None:
    certificate, key = certificate_files(tmp_path)
    files = {"certificate": certificate, "key": key, "client_ca": ca_file(tmp_path)}
    texts = {
        "KEY": Path(key).read_text(),
        "CERTIFICATE": Path(certificate).read_text(),
        "OTHER KEY": authority().issue_cert("x").private_key_pem.bytes().decode(),
        "ENCRYPTED": load_pem_private_key(Path(key).read_bytes(), None)
        .private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
        .decode(),
    }
    if text in (None, "FOLDER"):
        os.unlink(files[setting])
        if text is not None:
            os.mkdir(files[setting])
    else:
        assert text is not None
        Path(files[setting]).write_text(texts.get(text, text))
    with pytest.raises(TlsFileError) as caught:
        ReloadingTlsContext(TlsFiles(files["certificate"], files["key"], files["client_ca"]))
    assert str(caught.value) == f"tls.{setting}: {error.format(**files)}"


def test_file_deleted_during_loading_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificate_files(tmp_path)
    load = ssl.SSLContext.load_cert_chain

    def load_late(context: ssl.SSLContext, *files: Any) -> None:
        os.unlink(key)
        load(context, *files)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_late)
    with pytest.raises(TlsFileError, match="a file cannot be read: No such file or directory"):
        ReloadingTlsContext(TlsFiles(certificate, key))


def test_weak_certificate_raises(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 1024)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weak")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    certificate, file = certificate_files(tmp_path)
    Path(certificate).write_bytes(made.sign(key, SHA256()).public_bytes(Encoding.PEM))
    Path(file).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(TlsFileError) as caught:
        ReloadingTlsContext(TlsFiles(certificate, file))
    assert str(caught.value) == f"tls.certificate: {certificate} is too weak: ee key too small"


def test_replaced_files_are_reloaded(tmp_path: Path) -> None:
    files, new = _new(tmp_path / "now"), _new(tmp_path / "then")
    files = TlsFiles(files.certificate, files.key, ca_file(tmp_path))
    tls_context = ReloadingTlsContext(files)
    old, first = tls_context.context, _written(files.certificate)
    expected = _written(new.certificate)
    assert expected != first
    os.rename(new.certificate, files.certificate)
    os.rename(new.key, files.key)
    other = trustme.CA()
    other.cert_pem.write_to_path(str(files.client_ca))
    tls_context.reload_if_changed()
    assert tls_context.context is old  # the files may be incomplete
    tls_context.reload_if_changed()
    renewed = tls_context.context
    assert renewed is not old  # open connections keep the old context
    (trusted,) = renewed.get_ca_certs(binary_form=True)
    assert trusted == ssl.PEM_cert_to_DER_cert(other.cert_pem.bytes().decode())
    tls_context.reload_if_changed()
    assert tls_context.context is renewed


def test_unusable_new_files_are_logged_once_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files, new = _new(tmp_path / "now"), _new(tmp_path / "then")
    tls_context = ReloadingTlsContext(files)
    old = tls_context.context

    told: list[str] = []

    def look() -> None:
        found = [tls_context.reload_if_changed() for _ in range(4)]
        told.extend(failure for failure in found if failure is not None)

    look()
    assert caplog.messages == []
    assert told == []
    shutil.copyfile(new.certificate, files.certificate)  # the key of the old one is still there
    look()
    os.unlink(files.key)
    look()
    goes_on = "; new connections still use the previous certificate"
    assert caplog.messages == [
        f"tls.key: {files.key} is not the key of {files.certificate}{goes_on}",
        f"tls.key: cannot read {files.key}: No such file or directory{goes_on}",
    ]
    assert [f"{failure}{goes_on}" for failure in told] == caplog.messages
    assert tls_context.context is old
    caplog.clear()
    told.clear()
    shutil.copyfile(new.key, files.key)
    look()
    assert told == [""]
    assert caplog.messages == [f"new connections use the certificate in {files.certificate}"]
    assert _shown(tls_context.context) == _written(new.certificate)
