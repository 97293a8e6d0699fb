"""Each invalid file gives its errors, all of them, and nothing else."""

from pathlib import Path

import pytest

from gateway.settings.load import load
from gateway.settings.problems import SettingsError
from tests.settings.invalid_files import InvalidFile, read_invalid_files

ENVIRON = {"HOST": "triton", "PORT": "8000", "EMPTY": ""}
CASES = read_invalid_files()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_invalid_file_gives_all_its_errors(
    case: InvalidFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("gateway.yaml")
    file.write_bytes(case.text.encode())
    with pytest.raises(SettingsError) as error:
        load(file, ENVIRON)
    assert str(error.value) == case.errors
