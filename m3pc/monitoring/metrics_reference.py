"""The table of all metrics: the content of docs/METRICS.md."""

from m3pc.telemetry import catalogue
from m3pc.telemetry.recorder import SLOT, Metric

_HEAD = """\
# Metrics

What a run exposes at `/metrics`, printed by `m3pc monitor metrics`. Names, types and labels are a
stable interface for dashboards and alerts. A label takes only the values that are listed. Counters
and histograms exist from the start, with 0; a gauge exists once it was set. Prometheus adds `run`,
`job` and `instance`.

| name | type | label | values or buckets | help |
|---|---|---|---|---|
"""
_TAIL = """
In addition: `m3pc_build_info{version, ray, auth}`, which is 1, with `auth` either `token` or `off`;
`process_*` and `python_gc_*` of the driver's process, by the Prometheus client.
"""


def metrics_table() -> str:
    """The table in Markdown, in the order of declaration."""
    metrics = [value for value in vars(catalogue).values() if isinstance(value, Metric)]
    return _HEAD + "".join(f"{_line(metric)}\n" for metric in metrics) + _TAIL


def _line(metric: Metric) -> str:
    label = f"`{metric.label}`" if metric.label else ""
    values = ", ".join(metric.values) or ("0 to 255" if metric.label == SLOT else "")
    if metric.kind == "histogram":
        values = f"{values}{'; ' * bool(values)}{', '.join(f'{b:g}' for b in metric.buckets)}"
    return f"| `{metric.name}` | {metric.kind} | {label} | {values} | {metric.help} |"
