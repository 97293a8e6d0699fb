"""Which form of the gateway runs, as `tensorgate --version` and the log tell."""

from pathlib import Path

import pytest

from gateway import build_info


@pytest.mark.parametrize(
    ("compiled", "native", "expected"),
    [
        (True, True, "compiled"),
        (True, False, "compiled, without the C module"),
        (False, True, "pure Python with the C module"),
        (False, False, "pure Python"),
    ],
)
def test_the_form_is_told(
    compiled: bool, native: bool, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build_info, "COMPILED", compiled)
    monkeypatch.setattr(build_info, "NATIVE", native)
    monkeypatch.setattr(build_info, "__file__", str(tmp_path / "build_info.py"))
    assert build_info.describe_build() == expected


def test_pure_python_is_told_with_the_reason_that_its_build_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "not_compiled.txt").write_text("there is no C compiler\n")
    monkeypatch.setattr(build_info, "COMPILED", False)
    monkeypatch.setattr(build_info, "NATIVE", False)
    monkeypatch.setattr(build_info, "__file__", str(tmp_path / "build_info.py"))
    assert build_info.describe_build() == "pure Python: there is no C compiler"
