"""Each broken/NAME.yaml is answered with the text in broken/NAME.txt."""

from pathlib import Path

import pytest

from gateway.settings.load import load
from gateway.settings.problems import SettingsError

BROKEN = Path(__file__).parent / "broken"
ENVIRON = {"HOST": "triton", "PORT": "8000", "EMPTY": ""}


@pytest.mark.parametrize("name", sorted(file.stem for file in BROKEN.glob("*.yaml")))
def test_a_broken_file_is_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BROKEN)
    with pytest.raises(SettingsError) as error:
        load(Path(f"{name}.yaml"), ENVIRON)
    assert f"{error.value}\n" == Path(f"{name}.txt").read_text()
