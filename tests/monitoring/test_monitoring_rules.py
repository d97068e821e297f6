"""Alerts and recording rules: each has cases in which it fires and is silent, and a runbook."""

import re
from typing import Any

import pytest
import yaml

from m3pc.config.overrides import settings
from tests.support.servers.prometheus_server import promtool
from tests.support.servers.shipped_monitoring import MONITORING, RULES, rules

CASES = RULES / "tests"
RUNBOOKS = MONITORING.parent / "docs" / "runbooks"
SEVERITIES = {"critical", "warning", "info", "none"}
WITHOUT_RUN = {"Watchdog", "RuleFailures"}  # about the monitoring itself
ALWAYS_FIRES = {"Watchdog"}
SECTIONS = ("## What it means", "## What to look at", "## What to do")


def cases() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in sorted(CASES.glob("*.yml"))]
    return [case for file in files for case in file["tests"]]


def test_the_shipped_configuration_is_valid() -> None:
    done = promtool("check", "config", "prometheus.yml", cwd=MONITORING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


def test_rules_are_valid() -> None:
    files = sorted(RULES.glob("*.yml"))
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", *files)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("*.yml")))
def test_rules_do_as_their_cases_say(name: str) -> None:
    done = promtool("test", "rules", CASES / name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    firing: set[str] = set()
    silent: set[str] = set()
    for case in cases():
        for test in case.get("alert_rule_test", ()):
            (firing if test["exp_alerts"] else silent).add(test["alertname"])
    assert firing == set(rules("alert"))
    assert silent == set(rules("alert")) - ALWAYS_FIRES


def test_every_recording_rule_has_a_case_with_a_value() -> None:
    tests = [test for case in cases() for test in case.get("promql_expr_test", ())]
    expressions = " ".join(test["expr"] for test in tests)
    assert [name for name in rules("record") if name not in expressions] == []


@pytest.mark.parametrize("name", rules("alert"))
def test_alerts_have_a_severity_a_run_and_a_runbook(name: str) -> None:
    rule = rules("alert")[name]
    annotations = rule["annotations"]
    assert rule["labels"]["severity"] in SEVERITIES
    assert annotations["runbook"] == f"docs/runbooks/{name}.md"
    assert set(annotations) == {"summary", "description", "runbook"}
    assert ("{{ $labels.run }}" in annotations["description"]) == (name not in WITHOUT_RUN)
    if name not in WITHOUT_RUN:
        assert re.search(r"by \(run\b", rule["expr"]) or "run:" in rule["expr"], rule["expr"]


def test_recording_rules_are_named_by_level_metric_and_operation() -> None:
    assert [name for name in rules("record") if not re.fullmatch(r"run(:\w+){2}", name)] == []


# Runbooks


def test_every_alert_has_a_runbook_and_none_is_left_over() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(rules("alert"))


@pytest.mark.parametrize("name", rules("alert"))
def test_runbooks_are_short_and_complete(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    lines = text.splitlines()
    assert lines[0] == f"# {name}"
    assert lines[2].startswith(f"Severity: {rules('alert')[name]['labels']['severity']}.")
    assert 10 <= len(lines) <= 25
    places = [text.index(section) for section in SECTIONS]
    assert places == sorted(places)
    look, do = text[places[1] :].split(SECTIONS[2])
    assert look.count("\n- ") >= 2 and do.count("\n- ") >= 2


def test_runbooks_name_only_what_exists() -> None:
    """Commands, settings and other runbooks."""
    from typer.main import get_command

    from m3pc.cli import app

    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    fields = set(settings())
    sections = {field.partition(".")[0] for field in fields if "." in field}
    wrong = []
    for path in sorted(RUNBOOKS.glob("*.md")):
        text = path.read_text()
        used = re.findall(r"`m3pc ([\w-]+)", text)
        wrong += [f"{path.name}: m3pc {name}" for name in used if name not in commands]
        named = re.findall(r"`(\w+\.\w+)", text)
        named = [field for field in named if field.partition(".")[0] in sections]
        wrong += [f"{path.name}: {field}" for field in named if field not in fields]
        links = re.findall(r"\]\((\S+)\)", text)
        wrong += [f"{path.name}: {link}" for link in links if not (RUNBOOKS / link).is_file()]
    assert wrong == []
