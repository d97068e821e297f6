"""The table of all metrics, as docs/METRICS.md has it."""

from m3pc.telemetry import catalogue
from m3pc.telemetry.recorder import SLOT, Metric

_HEAD = """\
# Metrics

What a run tells at `/metrics`, printed by `m3pc monitor metrics`. Names, types and labels are an
interface: dashboards and alerts of others may be built on them. A label takes the values that are
listed and no others. Counters and histograms are there from the start, with 0; a gauge is once it
was set. Prometheus adds `run`, `job` and `instance`.

| name | type | label | values or buckets | help |
|---|---|---|---|---|
"""
_TAIL = """
Beside them: `m3pc_build_info{version, ray, auth}`, which is 1, with `auth` either `token` or `off`;
`process_*` and `python_gc_*` of the driver's process, by the Prometheus client.
"""


def metrics_table() -> str:
    """Markdown, in the order in which metrics are declared."""
    found = [each for each in vars(catalogue).values() if isinstance(each, Metric)]
    return _HEAD + "".join(f"{_line(metric)}\n" for metric in found) + _TAIL


def _line(metric: Metric) -> str:
    label = f"`{metric.label}`" if metric.label else ""
    values = ", ".join(metric.values) or ("0 to 255" if metric.label == SLOT else "")
    if metric.kind == "histogram":
        values = f"{values}{'; ' * bool(values)}{', '.join(f'{b:g}' for b in metric.buckets)}"
    return f"| `{metric.name}` | {metric.kind} | {label} | {values} | {metric.help} |"
