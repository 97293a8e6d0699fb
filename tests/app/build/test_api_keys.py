"""API keys of files and variables: which are refused, and how changes are followed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.app.build.api_keys import MAX_KEYS, ApiKeys, parse_keys
from gateway.app.build.listening import UnusableSettingsError
from gateway.settings.schema import Settings


def _settings(**groups: dict[str, str]) -> Settings:
    return Settings.model_validate(
        {
            "upstreams": {"u": {"endpoints": ["http://127.0.0.1:1"]}},
            "api_keys": groups,
            "routes": [{"upstream": "u", "auth": list(groups)}],
        }
    )


def _keys_of(file: Path, **more: str) -> ApiKeys:
    return ApiKeys(_settings(team={"file": str(file), **more}), {})


def _accepted(keys: ApiKeys, *shown: str, group: str = "team") -> list[bool]:
    headers: list[dict[str, Any]] = [{"Authorization": f"Bearer {key}"} for key in shown]
    return [
        keys.groups[group].authenticates(CIMultiDictProxy(CIMultiDict(each))) for each in headers
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# the team\nold\nkept\n")
    path.chmod(0o600)
    return path


def test_file_holds_keys_and_comments(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _accepted(_keys_of(file), "old", "kept", "the", "#") == [True, True, False, False]
    file.write_bytes(b"\xef\xbb\xbfold\r\nkept\r\n")
    assert _accepted(_keys_of(file), "old", "kept") == [True, True]
    assert caplog.records == []


def test_group_has_a_header_of_its_own(file: Path) -> None:
    group = _keys_of(file, header="X-Key").groups["team"]
    assert group.authenticates(CIMultiDictProxy(CIMultiDict({"x-key": "old"})))
    assert group.header_name == "X-Key"


@pytest.mark.parametrize("value", ["old,kept", " old,\n kept, "])
def test_environment_variable_holds_keys(value: str) -> None:
    keys = ApiKeys(_settings(team={"environment": "TEAM"}), {"TEAM": value})
    assert _accepted(keys, "old", "kept", "") == [True, True, False]
    assert not keys.refresh()


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({}, "is not set"),
        ({"TEAM": " , "}, "there is no key"),
        (
            {"TEAM": "good secr\xe9t"},
            "word 2 is not a key; a key is 1 to 512 visible ASCII characters",
        ),
    ],
)
def test_unusable_variables_are_refused(environ: dict[str, str], error: str) -> None:
    with pytest.raises(UnusableSettingsError) as caught:
        ApiKeys(_settings(team={"environment": "TEAM"}), environ)
    assert str(caught.value).startswith("api_keys.team.environment: TEAM")
    assert error in str(caught.value)
    assert "secr" not in str(caught.value)


def _missing(file: Path) -> None:
    file.unlink()


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (_missing, "cannot be read: No such file or directory"),
    "a directory": (_directory, "cannot be read: Is a directory"),
    "a pipe": (_pipe, "there is no key"),
    "no text": (lambda file: file.write_bytes(b"good\nsecret\xff\n"), "line 2 is not a key"),
    "large": (lambda file: file.write_bytes(b"#" * 1024 * 1024 + b"\n"), "is larger than"),
}


def test_world_readable_file_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.chmod(0o644)
    _keys_of(file)
    assert caplog.messages == [f"api_keys.team.file: every user of this machine can read {file}"]


# ---------------------------------------------------------------------------------- renewal


def _replace(file: Path, text: str) -> None:
    new = file.with_name("new")
    new.write_text(text)
    new.rename(file)


def _write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.mark.parametrize("change", [_replace, _write])
def test_new_keys_are_used_once_the_file_stays_the_same(
    file: Path, change: Callable[[Path, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = _keys_of(file)
    assert not keys.refresh()
    change(file, "kept\nsecret-new\nand-one\n")
    assert not keys.refresh()
    assert _accepted(keys, "old", "kept", "secret-new") == [True, True, False]
    assert keys.refresh()
    assert _accepted(keys, "old", "kept", "secret-new") == [False, True, True]
    assert not keys.refresh()
    assert caplog.messages == [f"api_keys.team.file: keys loaded from {file}: 3"]


@pytest.mark.parametrize(("make", "error"), FILES.values(), ids=FILES)
def test_unusable_file_is_refused_at_the_start_and_leaves_the_old_keys_later(
    file: Path, make: Callable[[Path], object], error: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = _keys_of(file)
    make(file)
    with pytest.raises(UnusableSettingsError) as caught:
        _keys_of(file)
    assert str(caught.value).startswith(f"api_keys.team.file: {file}")
    assert error in str(caught.value)
    assert "secr" not in str(caught.value)
    for _ in range(5):
        assert not keys.refresh()
    assert _accepted(keys, "old", "kept") == [True, True]
    (message,) = caplog.messages
    assert message.startswith(f"api_keys.team.file: {file}")
    assert error in message
    assert message.endswith("; keeping the previous keys")
    assert "secr" not in message
    if file.is_dir():
        file.rmdir()
    _replace(file, "mended")
    assert [keys.refresh(), keys.refresh()] == [False, True]
    assert _accepted(keys, "old", "mended") == [False, True]


def test_groups_follow_their_own_files(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("one", "two")}
    for file in files.values():
        file.write_text("old")
    keys = ApiKeys(_settings(**{n: {"file": str(f)} for n, f in files.items()}), {})
    _replace(files["two"], "new")
    assert [keys.refresh(), keys.refresh()] == [False, True]
    assert _accepted(keys, "old", "new", group="one") == [True, False]
    assert _accepted(keys, "old", "new", group="two") == [False, True]


# ------------------------------------------------------------------------------------ lists of keys


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("# people\n\n  a  \n\t\n#b\nc#d\n", ("a", "c#d")),
        ("a\nb\na\n", ("a", "b")),
        ("x" * 512, ("x" * 512,)),
        ("\n".join(map(str, range(MAX_KEYS))), tuple(map(str, range(MAX_KEYS)))),
    ],
)
def test_keys_are_parsed(text: str, keys: tuple[str, ...]) -> None:
    assert parse_keys(text.splitlines()) == keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n# none\n  \n", "there is no key"),
        ("a\n\nsecret key\n", "line 3 is not a key"),
        ("secret,key", "line 1 is not a key"),
        ("x" * 513, "line 1 is not a key"),
        ("\n".join(map(str, range(MAX_KEYS + 1))), f"there are more than {MAX_KEYS} keys"),
    ],
)
def test_invalid_key_list_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_keys(text.splitlines())
    assert "secr" not in str(caught.value)
    assert "xx" not in str(caught.value)
