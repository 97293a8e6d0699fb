"""The settings file: what is read, and which changes are noticed."""

import os
from pathlib import Path

import pytest

from gateway.app.reload.source import SettingsSource
from gateway.settings.problems import SettingsError


def _text(port: int = 1, more: str = "") -> str:
    return f"upstreams: {{u: {{endpoints: ['https://127.0.0.1:{port}']{more}}}}}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file."""
    file = tmp_path / "gateway.yaml"
    file.write_text(_text())
    return file


def _changed(source: SettingsSource, after_failure: bool = False) -> bool:
    return [source.changed(after_failure) for _ in range(3)].count(True) > 0


def test_source_has_not_changed_after_read(file: Path) -> None:
    source = SettingsSource(file, {})
    file.write_text(_text(22))
    assert source.read().upstreams["u"].endpoints == ("https://127.0.0.1:22",)
    assert not _changed(source)
    file.write_text(_text(333))
    assert _changed(source)
    assert not _changed(source)


def test_change_before_the_first_read_is_noticed(file: Path) -> None:
    source = SettingsSource(file, {})
    file.write_text("upstreams: {}\n")
    with pytest.raises(SettingsError):
        source.read()
    file.write_text(_text())
    assert _changed(source)


def test_environment_variables_are_filled_in(file: Path) -> None:
    file.write_text(_text().replace("127.0.0.1", "${HOST}"))
    assert SettingsSource(file, {"HOST": "h"}).read().upstreams["u"].endpoints == ("https://h:1",)


def test_changed_upstream_certificate_is_noticed(file: Path, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("one")
    file.write_text(_text(more=f", tls: {{ca: {ca}}}"))
    source = SettingsSource(file, {})
    source.read()
    assert not _changed(source)
    ca.write_text("another")
    assert _changed(source)
    assert not _changed(source)
    file.write_text(_text())
    source.read()
    ca.unlink()  # which the settings do not name any more
    assert not _changed(source)


def test_changed_server_certificate_is_noticed_after_a_failure(file: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text("c")
    key.write_text("zero")
    file.write_text(f"{_text()}tls: {{certificate: {certificate}, key: {key}}}\n")
    source = SettingsSource(file, {})
    source.read()
    key.write_text("one")
    assert not _changed(source)
    key.write_text("another")
    assert _changed(source, after_failure=True)


def test_missing_named_file_is_an_error_at_the_start_only(file: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("k")
    file.write_text(f"{_text()}tls: {{certificate: {key}, key: {key}}}\n")
    source = SettingsSource(file, {})
    source.read()
    key.unlink()
    source.read()  # what was loaded stays in use
    with pytest.raises(SettingsError, match=r"gateway.yaml:2: tls.key: .* cannot be read"):
        SettingsSource(file, {}).read()


def test_pipe_is_not_read_again(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, _text().encode())
    os.close(writing)
    try:
        source = SettingsSource(Path(f"/dev/fd/{reading}"), {})
        assert list(source.read().upstreams) == ["u"]
        assert not _changed(source)
        with pytest.raises(SettingsError, match="is no file that can be read again"):
            source.read()
    finally:
        os.close(reading)


def test_new_warnings_are_logged_with_file_and_line(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*models: str) -> None:
        routes = [f"- {{match: {{model: '{model}'}}, upstream: u}}\n" for model in models]
        file.write_text(f"{_text()}routes:\n{''.join(routes)}")

    def warned() -> list[str]:
        places = [message.partition(" looks like")[0] for message in caplog.messages]
        caplog.clear()
        return places

    source = SettingsSource(file, {})
    write("a*", "^b.*$")
    before = source.read()
    source.log_warnings()
    assert warned() == [f"{file}:4: routes[1].match.model: '^b.*$'"]
    write("^c.*$", "^b.*$")
    source.read()
    source.log_warnings(before)
    assert warned() == [f"{file}:3: routes[0].match.model: '^c.*$'"]
