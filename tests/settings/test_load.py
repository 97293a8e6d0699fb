import re
from pathlib import Path
from typing import get_args

import pytest

from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.dialects import DIALECTS
from gateway.protocol.operations import OPERATION_KINDS
from gateway.settings.json_schema import settings_schema
from gateway.settings.limits import Limits
from gateway.settings.load import MAX_FILE_BYTES, TIMEOUTS, load
from gateway.settings.log import Log
from gateway.settings.models import Datatype, Tensor
from gateway.settings.problems import Problem, SettingsError
from gateway.settings.routes import OperationName
from gateway.settings.schema import sections_with_key
from gateway.settings.upstreams import Upstream
from gateway.settings.values.addresses import TcpAddress
from tests.settings.loading import ONE_UPSTREAM, InvalidFile, problems, read_invalid_files, route_to


def test_a_file_needs_no_more_than_an_upstream(file: Path) -> None:
    file.write_text(ONE_UPSTREAM)
    settings = load(file, {})
    assert settings.listen == (TcpAddress("127.0.0.1", 8080),)
    assert settings.workers == 1
    assert settings.upstreams == {"triton": Upstream(endpoints=("http://triton:8000",))}
    assert settings.routes == (route_to("triton"),)
    assert settings.limits == Limits()
    assert settings.log == Log()


@pytest.mark.parametrize("written", ["null", "'null'", "~"])
def test_the_nonfinite_policy_null_needs_no_quotes(file: Path, written: str) -> None:
    file.write_text(f"{ONE_UPSTREAM}routes: [{{upstream: triton, nonfinite: {written}}}]")
    assert load(file, {}).routes[0].nonfinite == "null"


def test_values_from_the_environment_are_typed_as_those_of_the_file(file: Path) -> None:
    file.write_text(
        f"{ONE_UPSTREAM}"
        "listen: 127.0.0.1:${PORT:-8080}\n"
        "limits: {max_json_depth: '${DEPTH}'}\n"
        "log: {access: '${ACCESS:-false}'}\n"
    )
    settings = load(file, {"PORT": "9000", "DEPTH": "7"})
    assert settings.listen == (TcpAddress("127.0.0.1", 9000),)
    assert settings.limits.max_json_depth == 7
    assert settings.log.access is None


def test_a_quoted_reference_takes_the_type_that_the_setting_wants(file: Path) -> None:
    file.write_text(
        """
upstreams:
  "7": {endpoints: ['${URL}'], tls: "${NOTHING}", idle_timeout: "${TIME}"}
routes:
  - {upstream: "${NUMBER}", retry_on: ["${STATUS}"], auth: "${NUMBER}"}
api_keys: {"7": {file: "${NUMBER}"}}
models: {m: {inputs: [{name: "${NUMBER}", datatype: "${TYPE}", shape: ["${NUMBER}"]}]}}
admin: "${NOTHING}"
"""
    )
    environ = {"URL": "http://a:1", "NOTHING": "null", "TIME": "1.5", "NUMBER": "7"}
    settings = load(file, {**environ, "STATUS": "503", "TYPE": "FP32"})
    assert settings.upstreams["7"] == Upstream(endpoints=("http://a:1",), idle_timeout=1.5)
    assert settings.admin.listen is None
    assert settings.routes[0] == route_to("7", retry_on=[503], auth=["7"])
    assert settings.api_keys["7"].file == "7"
    assert settings.models["m"].inputs == (Tensor(name="7", datatype="FP32", shape=(7,)),)


@pytest.mark.parametrize("written", ["'false'", "'${A}${B}'", "'${A} '", "$${A}", "'$${A}'"])
def test_quoted_text_that_is_no_reference_stays_text(file: Path, written: str) -> None:
    file.write_text(f"{ONE_UPSTREAM}watch: {written}\n")
    (problem,) = problems(file, A="false", B="")
    assert problem.message.startswith("expected true or false, got ")


SINGLE = """\
upstreams: {u: {endpoints: http://a:1, outlier_detection: {failure_statuses: 500}}}
listen: 127.0.0.1:1
forwarded: {trusted_proxies: 10.0.0.0/8}
api_keys: {a: {file: f}}
routes: [{upstream: u, match: {operations: infer}, deny_operations: trace, retry_on: 503,
  compression: gzip, auth: a}]
"""


def test_a_single_item_is_a_list_of_one(file: Path) -> None:
    keys = (
        "endpoints|failure_statuses|listen|trusted_proxies|operations|deny_operations|retry_on"
        "|compression|auth"
    )
    several = re.sub(rf"\b({keys}): ([^\s,}}]+)", r"\1: [\2]", SINGLE)
    assert several.count("[") == SINGLE.count("[") + 9
    file.write_text(several)
    expected = load(file, {})
    file.write_text(SINGLE)
    assert load(file, {}) == expected


def test_a_byte_order_mark_is_ignored(file: Path) -> None:
    file.write_text(ONE_UPSTREAM, encoding="utf-8-sig")
    load(file, {})


def test_a_file_that_is_no_text_of_the_right_size_is_an_error(file: Path) -> None:
    assert problems(file.parent) == (Problem("", None, None, "cannot be read: Is a directory"),)
    file.write_bytes(b"# fine\n# caf\xe9\n")
    assert problems(file) == (Problem("", 2, None, "not UTF-8 text"),)
    endless = Problem("", None, None, f"larger than {MAX_FILE_BYTES} bytes")
    assert problems(Path("/dev/zero")) == (endless,)


def test_words_are_those_of_the_protocol() -> None:
    assert get_args(OperationName) == tuple(OPERATION_KINDS)
    assert set(get_args(Datatype)) == set(DATATYPES)
    assert get_args(Upstream.model_fields["dialect"].annotation) == ("auto", *DIALECTS)


def test_timeouts_in_messages_are_all_that_there_are() -> None:
    schema = settings_schema()
    keys = {
        key for part in (schema, *schema["$defs"].values()) for key in part.get("properties", ())
    }
    assert {path.rpartition(".")[2] for path in TIMEOUTS} == {
        key for key in keys if "timeout" in key
    }
    for path in TIMEOUTS:
        section, _, key = path.rpartition(".")
        assert section in sections_with_key(key)


def test_unknown_keys_come_first_and_the_rest_in_the_order_of_the_file(file: Path) -> None:
    file.write_text(
        "log: {level: loud}\n"
        "routes: [{upstream: tritom}]\n"
        "limits: {idle_timeout: '${NONE}', idle: 1}\n"
        "listen: 1\n"
        f"{ONE_UPSTREAM}"
        "listen: 2\n"
    )
    found = problems(file)
    assert [(each.line, each.column, each.setting) for each in found] == [
        (3, 35, "limits.idle"),
        (1, 7, "log.level"),
        (2, 11, "routes[0].upstream"),
        (3, 24, "limits.idle_timeout"),
        (4, 1, "listen"),
        (6, 1, "listen"),
    ]


@pytest.mark.parametrize(
    ("written", "workers"), [("1", 1), ("256", 256), ("'2'", 2), ("auto", "auto"), ("${N:-4}", 4)]
)
def test_workers_is_a_number_or_auto(file: Path, written: str, workers: int | str) -> None:
    file.write_text(f"{ONE_UPSTREAM}workers: {written}\n")
    assert load(file, {}).workers == workers


CASE_ENVIRON = {"HOST": "triton", "PORT": "8000", "EMPTY": ""}
CASES = read_invalid_files()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_invalid_file_gives_all_its_errors(
    case: InvalidFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("gateway.yaml")
    file.write_bytes(case.text.encode())
    with pytest.raises(SettingsError) as error:
        load(file, CASE_ENVIRON)
    assert str(error.value) == case.errors
