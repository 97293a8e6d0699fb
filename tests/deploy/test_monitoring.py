"""Dashboard, alert rules and the settings of Prometheus know the gateway's metrics."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import FILES, FOLDER, TRITON, Manifest, documents
from tests.deploy.monitoring import (
    ALERTS,
    PROMETHEUS,
    SCRAPED,
    Dashboard,
    Expression,
    Selector,
    adapter_rule,
    alert_rules,
    documented_series,
    read_expression,
)
from tests.docs.markdown import PAGES, blocks, name

SERIES = documented_series()
OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""
NOT_SHOWN = {"process_virtual_memory_bytes"}
"""Metrics that no query needs: resident memory is what counts."""
DASHBOARD = Dashboard()
SHOWN = [
    pytest.param(block.text, id=f"{name(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page)
    if block.language == "promql"
]
QUERIES = [pytest.param(each, id=each.place) for each in DASHBOARD.queries()]
RULES = [pytest.param(each, id=each["alert"]) for each in alert_rules()]
JOB = "tensorgate"


def known_labels(selector: Selector) -> set[str]:
    return SERIES.get(selector.metric, set()) | SCRAPED


def assert_documented(expression: Expression) -> None:
    """Check that an expression uses nothing but what the page on metrics lists."""
    assert expression.metrics
    assert expression.metrics <= SERIES.keys() | OF_PROMETHEUS
    for selector in expression.selectors:
        assert selector.labels <= known_labels(selector), selector
    assert expression.grouping <= set().union(*map(known_labels, expression.selectors))


def labels_of_result(expression: Expression) -> set[str]:
    """Return the labels that a result may have."""
    if expression.grouping:
        return set(expression.grouping)
    return set.intersection(*map(known_labels, expression.selectors))


# How expressions are read


# The dashboard


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_of_the_dashboard_uses_documented_metrics(query: Any) -> None:
    expression = read_expression(query.text)
    assert_documented(expression)
    assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= labels_of_result(expression)


@pytest.mark.parametrize(("name", "series", "label"), list(DASHBOARD.label_values()))
def test_each_variable_of_the_dashboard_is_a_documented_label(
    name: str, series: str, label: str
) -> None:
    expression = read_expression(series)
    assert_documented(expression)
    (selector,) = expression.selectors
    assert label in known_labels(selector)
    assert label == name


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_of_the_dashboard_heeds_the_variables(query: Any) -> None:
    """Each metric is chosen by job and instance, and by the others where it has their label."""
    wanted = {name for name, _, _ in DASHBOARD.label_values()}
    for selector in read_expression(query.text).selectors:
        assert wanted & known_labels(selector) <= selector.labels
    known = DASHBOARD.variables.keys() | {"__rate_interval", "__range"}
    assert set(re.findall(r"\$(\w+)", query.text)) <= known


def test_dashboard_or_alert_rules_show_each_metric() -> None:
    texts = [query.text for query in DASHBOARD.queries()] + [rule["expr"] for rule in alert_rules()]
    shown = set().union(*(read_expression(text).metrics for text in texts))
    shown |= {f"{each.rpartition('_')[0]}_{part}" for each in shown for part in ("sum", "count")}
    shown |= {each.removesuffix("_count") + "_bucket" for each in shown}
    assert SERIES.keys() - shown == NOT_SHOWN


def test_the_data_source_of_the_dashboard_can_be_chosen() -> None:
    """So it can be imported as it stands."""
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert DASHBOARD.variables["datasource"]["type"] == "datasource"
    for panel in DASHBOARD.panels:
        assert [panel["datasource"], *(each["datasource"] for each in panel["targets"])] == [
            chosen
        ] * (1 + len(panel["targets"]))
        assert len({each["refId"] for each in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("text", SHOWN)
def test_each_query_of_the_documentation_uses_documented_metrics(text: str) -> None:
    assert_documented(read_expression(text))


# The alert rules


@pytest.mark.parametrize("rule", RULES)
def test_each_alert_rule_uses_documented_metrics(rule: dict[str, Any]) -> None:
    expression = read_expression(rule["expr"])
    assert_documented(expression)
    told = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels_of_result(expression)


def test_each_alert_rule_has_a_test() -> None:
    """``promtool test rules`` runs them, in ``make test-system``."""
    (tests,) = documents(PROMETHEUS / "alerts_test.yaml")
    assert tests["rule_files"] == [ALERTS.name]
    cases = [case for test in tests["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    names = {rule["alert"] for rule in alert_rules()}
    assert fires == silent == names


# What scrapes the gateway


def test_the_job_is_named_the_same_everywhere() -> None:
    (example,) = documents(PROMETHEUS / "prometheus.yml")
    assert [each["job_name"] for each in example["scrape_configs"]] == [JOB]
    assert example["rule_files"] == [ALERTS.name]
    asked = [rule["expr"] for rule in alert_rules() if "job=" in rule["expr"]]
    assert asked == [f'up{{job="{JOB}"}} == 0']


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_service_monitor_finds_the_gateways(file: Path) -> None:
    (monitor,) = documents(FOLDER / "servicemonitor.yaml")
    spec = monitor["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    services = [
        each
        for each in Manifest(file).all("Service")
        if wanted <= each["metadata"]["labels"].items()
    ]
    (service,) = services
    assert service["metadata"]["labels"][spec["jobLabel"]] == JOB
    (port,) = service["spec"]["ports"]
    (endpoint,) = spec["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")


# The autoscaler


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_autoscaler_scales_the_servers_by_their_calls(file: Path, tmp_path: Path) -> None:
    (scaler,) = documents(FOLDER / "autoscaler.yaml")
    manifest = Manifest(file)
    pod = manifest.pod_with(TRITON)
    target = {key: pod.workload[key] for key in ("apiVersion", "kind")} | {"name": pod.name}
    assert scaler["spec"]["scaleTargetRef"] == target
    (metric,) = scaler["spec"]["metrics"]
    wanted = metric["external"]["metric"]
    assert wanted["name"] == adapter_rule()["name"]["as"]
    upstream = wanted["selector"]["matchLabels"].pop("upstream")
    assert upstream in manifest.write_settings(tmp_path).upstreams
    assert not wanted["selector"]["matchLabels"]


def test_the_adapter_makes_the_metric_of_documented_ones() -> None:
    rule = adapter_rule()
    query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"])
    expression = read_expression(query.replace("<<.LabelMatchers>>", 'upstream="triton"'))
    assert_documented(expression)
    assert rule["seriesQuery"] in expression.metrics
