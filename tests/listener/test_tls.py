"""The files of TLS: which cannot be used, and what becomes of them when they change."""

import asyncio
import logging
import os
import shutil
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

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

from gateway.listener import tls
from gateway.listener.tls import ReloadingTlsContext, TlsFileError, TlsFiles, is_world_readable
from gateway.system import certificates
from tests.support.certificates import authority, ca_file, certificate_files
from tests.support.gateway import until


def _new(folder: Path) -> TlsFiles:
    """Write a certificate of its own, and its key."""
    folder.mkdir(exist_ok=True)
    return TlsFiles(*certificate_files(folder, authority().issue_cert("127.0.0.1")))


def _shown(context: ssl.SSLContext) -> bytes:
    """Give the certificate that a client of this context is shown."""
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


def test_what_is_spoken(tmp_path: Path) -> None:
    context = ReloadingTlsContext(_new(tmp_path)).context
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_COMPRESSION
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("required", "mode"), [(True, ssl.CERT_REQUIRED), (False, ssl.CERT_OPTIONAL)]
)
def test_whether_clients_show_a_certificate(
    tmp_path: Path, required: bool, mode: ssl.VerifyMode
) -> None:
    files = TlsFiles(*certificate_files(tmp_path), ca_file(tmp_path), required)
    assert ReloadingTlsContext(files).context.verify_mode is mode


@pytest.mark.parametrize(
    ("setting", "text", "fault"),
    [
        ("certificate", None, "cannot read {certificate}: No such file or directory"),
        ("key", None, "cannot read {key}: No such file or directory"),
        ("client_ca", None, "cannot read {client_ca}: No such file or directory"),
        ("certificate", "", "{certificate} holds no certificate in PEM form"),
        ("key", "", "{key} holds no private key in PEM form"),
        ("client_ca", "", "{client_ca} holds no certificates in PEM form"),
        ("certificate", "KEY", "{certificate} holds no certificate in PEM form"),
        ("key", "CERTIFICATE", "{key} holds no private key in PEM form"),
        ("key", "OTHER KEY", "{key} is not the key of {certificate}"),
        ("key", "ENCRYPTED", "{key} is encrypted; a key without a password is needed"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, setting: str, text: str | None, fault: str
) -> None:
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
    if text is None:
        os.unlink(files[setting])
    else:
        Path(files[setting]).write_text(texts.get(text, text))
    with pytest.raises(TlsFileError) as caught:
        ReloadingTlsContext(TlsFiles(files["certificate"], files["key"], files["client_ca"]))
    assert str(caught.value) == f"tls.{setting}: {fault.format(**files)}"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    _, key = certificate_files(tmp_path)
    with pytest.raises(TlsFileError) as caught:
        ReloadingTlsContext(TlsFiles(str(tmp_path), key))
    assert str(caught.value) == f"tls.certificate: cannot read {tmp_path}: Is a directory"


def test_a_file_that_vanishes_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificate_files(tmp_path)
    monkeypatch.setattr(certificates, "_look_into", lambda *_: None)
    os.unlink(key)
    with pytest.raises(TlsFileError, match="a file cannot be read: No such file or directory"):
        ReloadingTlsContext(TlsFiles(certificate, key))


def test_a_certificate_that_is_too_weak(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 1024)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weak")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    certificate, file = certificate_files(tmp_path)
    Path(certificate).write_bytes(made.sign(key, SHA256()).public_bytes(Encoding.PEM))
    Path(file).write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
    with pytest.raises(TlsFileError) as caught:
        ReloadingTlsContext(TlsFiles(certificate, file))
    assert str(caught.value) == f"tls.certificate: {certificate} is too weak: ee key too small"


@pytest.mark.parametrize(("mode", "open_to_all"), [(0o600, False), (0o640, False), (0o644, True)])
def test_who_may_read_a_file(tmp_path: Path, mode: int, open_to_all: bool) -> None:
    file = tmp_path / "key.pem"
    file.touch()
    file.chmod(mode)
    assert is_world_readable(str(file)) is open_to_all


def _in_place(files: TlsFiles, new: TlsFiles) -> None:
    shutil.copyfile(new.certificate, files.certificate)
    shutil.copyfile(new.key, files.key)


def _by_rename(files: TlsFiles, new: TlsFiles) -> None:
    os.rename(new.certificate, files.certificate)
    os.rename(new.key, files.key)


@pytest.mark.parametrize("replace", [_in_place, _by_rename])
def test_files_that_are_replaced(
    tmp_path: Path, replace: Callable[[TlsFiles, TlsFiles], None]
) -> None:
    files, new = _new(tmp_path / "now"), _new(tmp_path / "then")
    here = ReloadingTlsContext(files)
    old, first = here.context, _written(files.certificate)
    expected = _written(new.certificate)
    assert _shown(here.context) == first != expected
    replace(files, new)
    here.look()
    assert here.context is old  # they may still be being written
    here.look()
    assert _shown(here.context) == expected
    assert _shown(old) == first  # whoever has it keeps it
    renewed = here.context
    here.look()
    assert here.context is renewed


def test_a_symbolic_link_that_is_swapped(tmp_path: Path) -> None:
    """As Kubernetes does it: the files are links into a folder, which is a link itself."""
    new = _new(tmp_path / "2"), _new(tmp_path / "1")
    data = tmp_path / "data"
    data.symlink_to("1")
    here = ReloadingTlsContext(TlsFiles(str(data / "certificate.pem"), str(data / "key.pem")))
    assert _shown(here.context) == _written(new[1].certificate)
    (tmp_path / "next").symlink_to("2")
    os.rename(tmp_path / "next", data)
    here.look()
    here.look()
    assert _shown(here.context) == _written(new[0].certificate)


def test_another_authority_for_clients(tmp_path: Path) -> None:
    files = TlsFiles(*certificate_files(tmp_path), ca_file(tmp_path))
    here = ReloadingTlsContext(files)
    other = trustme.CA()
    other.cert_pem.write_to_path(str(files.client_ca))
    here.look()
    here.look()
    (trusted,) = here.context.get_ca_certs(binary_form=True)
    assert trusted == ssl.PEM_cert_to_DER_cert(other.cert_pem.bytes().decode())


def test_broken_files_keep_the_old_and_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files, new = _new(tmp_path / "now"), _new(tmp_path / "then")
    here = ReloadingTlsContext(files)
    old = here.context

    def look() -> None:
        for _ in range(4):
            here.look()

    look()
    assert caplog.messages == []
    shutil.copyfile(new.certificate, files.certificate)  # the key of the old one is still there
    look()
    os.unlink(files.key)
    look()
    goes_on = "; new connections go on with the certificate from before"
    assert caplog.messages == [
        f"tls.key: {files.key} is not the key of {files.certificate}{goes_on}",
        f"tls.key: cannot read {files.key}: No such file or directory{goes_on}",
    ]
    assert here.context is old
    caplog.clear()
    shutil.copyfile(new.key, files.key)
    look()
    assert caplog.messages == [f"the certificate in {files.certificate} is in use from now on"]
    assert _shown(here.context) == _written(new.certificate)


async def test_the_files_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "POLL_INTERVAL", 0.01)
    files, new = _new(tmp_path / "now"), _new(tmp_path / "then")
    here = ReloadingTlsContext(files)
    old = here.context
    watch = asyncio.create_task(here.watch())
    await asyncio.sleep(0.03)
    assert here.context is old
    _in_place(files, new)
    await until(lambda: here.context is not old)
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch
