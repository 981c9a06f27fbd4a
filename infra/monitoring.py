"""Alert rules for Prometheus and a board for Grafana, from one list: `python -m infra.monitoring` writes them.

Names are those of `GET /metrics`: `atelier_admission_*` is the queue, `ray_atelier_*` what replicas count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

FOLDER: Final = Path(__file__).parent / "deploy/monitoring"
_COLUMNS: Final = 3
_WIDTH, _HEIGHT = 8, 8  # of a panel, in Grafana's grid of 24 columns


class Alert(NamedTuple):
    """A rule: `wait` is how long it has to hold. Operators read `meaning`, which docs/operations/start.md explains."""

    name: str
    expression: str
    wait: str
    severity: str
    meaning: str


class Panel(NamedTuple):
    """A chart of the board. `legend` is Grafana's text for each series."""

    title: str
    expression: str
    unit: str
    legend: str


ALERTS: Final = (
    Alert("AtelierDown", 'up{job="atelier"} == 0', "2m", "page", "the door does not answer"),
    Alert(
        "AtelierNodeMetricsMissing",
        "atelier_node_metrics_up == 0",
        "5m",
        "ticket",
        "the exporter of the node at {{ $labels.address }} does not answer",
    ),
    Alert(
        "AtelierRefuses",
        "sum by (model) (rate(atelier_admission_refused_total[5m])) > 0.05 * sum by (model)"
        " (rate(atelier_admission_started_total[5m]) + rate(atelier_admission_refused_total[5m]))",
        "10m",
        "page",
        "more than 5 % of the requests for {{ $labels.model }} are refused",
    ),
    Alert(
        "AtelierFails",
        'sum by (model) (rate(ray_atelier_requests_total{status=~"5.."}[5m])) > 0.05 * sum by (model)'
        " (rate(ray_atelier_requests_total[5m]))",
        "10m",
        "page",
        "more than 5 % of the requests for {{ $labels.model }} fail",
    ),
    Alert(
        "AtelierFirstTokenSlow",
        "histogram_quantile(0.95, sum by (le) (rate(ray_atelier_first_token_ms_bucket[5m]))) > 10000",
        "10m",
        "ticket",
        "a twentieth of the texts begin after ten seconds",
    ),
    Alert(
        "AtelierWaits",
        "max by (model) (atelier_admission_oldest_age_seconds) > 60",
        "5m",
        "ticket",
        "a request for {{ $labels.model }} waits for longer than a minute",
    ),
    Alert(
        "AtelierWorkersMissing",
        'max(ray_atelier_workers{which="reporting"}) < max(ray_atelier_workers{which="wanted"})',
        "10m",
        "ticket",
        "fewer workers report than are wanted",
    ),
    Alert(
        "AtelierControllerSlow",
        "sum(rate(ray_atelier_controller_tick_s_measured_total[5m]))"
        " / sum(rate(ray_atelier_controller_tick_s_count[5m])) > 1",
        "10m",
        "ticket",
        "a tick of the controller takes more than a second",
    ),
    Alert(
        "AtelierKvCacheFull",
        'sum by (model, replica) (atelier_kv_blocks{state="used"}) > 0.95 * sum by (model, replica)'
        ' (atelier_kv_blocks{state="total"})',
        "10m",
        "ticket",
        "the KV cache of {{ $labels.model }} on {{ $labels.replica }} is full",
    ),
    Alert(
        "AtelierEvicts",
        "sum by (node) (rate(atelier_node_evicted_total[10m])) > 1",
        "15m",
        "ticket",
        "node {{ $labels.node }} drops weights all the time, and reads them again",
    ),
)
PANELS: Final = (
    Panel("Requests", "sum by (model) (rate(ray_atelier_requests_total[1m]))", "reqps", "{{model}}"),
    Panel("Requests by status", "sum by (status) (rate(ray_atelier_requests_total[1m]))", "reqps", "{{status}}"),
    Panel("Tokens", "sum by (direction) (rate(ray_atelier_tokens_total[1m]))", "short", "{{direction}}"),
    Panel(
        "First token, 95 %",
        "histogram_quantile(0.95, sum by (le) (rate(ray_atelier_first_token_ms_bucket[5m])))",
        "ms",
        "first token",
    ),
    Panel(
        "Between tokens, 95 %",
        "histogram_quantile(0.95, sum by (le) (rate(ray_atelier_between_tokens_ms_bucket[5m])))",
        "ms",
        "between tokens",
    ),
    Panel("Steps", "sum by (kind) (rate(ray_atelier_steps_total[1m]))", "ops", "{{kind}}"),
    Panel(
        "Requests in a step",
        "sum by (kind) (rate(ray_atelier_step_outputs_total[5m])) / sum by (kind) (rate(ray_atelier_steps_total[5m]))",
        "short",
        "{{kind}}",
    ),
    Panel("Refused", "sum by (model) (rate(atelier_admission_refused_total[1m]))", "reqps", "{{model}}"),
    Panel("Waiting", "sum by (model) (atelier_admission_waiting)", "short", "{{model}}"),
    Panel("Longest wait", "max by (model) (atelier_admission_oldest_age_seconds)", "s", "{{model}}"),
    Panel("Running", "sum by (pool) (atelier_admission_running)", "short", "{{pool}}"),
    Panel(
        "Mean time by phase",
        "sum by (phase) (rate(ray_atelier_phase_ms_measured_total[5m]))"
        " / sum by (phase) (rate(ray_atelier_phase_ms_count[5m]))",
        "ms",
        "{{phase}}",
    ),
    Panel("Decisions", "sum by (action) (rate(ray_atelier_decisions_total[5m]))", "ops", "{{action}}"),
    Panel("Attached by switches", "sum(rate(ray_atelier_attached_bytes_total[5m]))", "Bps", "bytes"),
    Panel("Loaded", "sum by (stage) (rate(ray_atelier_load_stage_bytes_total[5m]))", "Bps", "{{stage}}"),
    Panel(
        "Encodings from the cache",
        'sum(rate(ray_atelier_encodings_total{source="cache"}[5m])) / sum(rate(ray_atelier_encodings_total[5m]))',
        "percentunit",
        "share",
    ),
    Panel(
        "Weights in memory / budget",
        'sum by (node) (atelier_node_weights_bytes{state="resident"}) / sum by (node) (atelier_node_budget_bytes)',
        "percentunit",
        "{{node}}",
    ),
    Panel(
        "Weights read", "sum by (node, source) (rate(atelier_node_read_bytes_total[5m]))", "Bps", "{{node}} {{source}}"
    ),
    Panel("On devices", "sum by (replica, state) (atelier_device_bytes)", "bytes", "{{replica}} {{state}}"),
    Panel(
        "KV cache in use",
        'sum by (model, replica) (atelier_kv_blocks{state="used"})'
        ' / sum by (model, replica) (atelier_kv_blocks{state="total"})',
        "percentunit",
        "{{model}} {{replica}}",
    ),
    Panel("Switches", "sum by (replica) (rate(atelier_replica_switches_total[5m]))", "ops", "{{replica}}"),
    Panel("Workers", "max by (which) (ray_atelier_workers)", "short", "{{which}}"),
    Panel("Nodes whose metrics are missing", "sum(1 - atelier_node_metrics_up)", "short", "nodes"),
    Panel("Held for a worker", "max(ray_atelier_held_requests)", "short", "requests"),
)


def alert_rules() -> str:
    """Return the rules as Prometheus reads them."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.meaning},
        }
        for alert in ALERTS
    ]
    return yaml.safe_dump({"groups": [{"name": "atelier", "rules": rules}]}, sort_keys=False, width=120)


def board() -> str:
    """Return the board as Grafana provisions it, with the data source `prometheus`."""
    source = {"type": "prometheus", "uid": "prometheus"}
    panels: list[dict[str, Any]] = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": source,
            "gridPos": {
                "x": number % _COLUMNS * _WIDTH,
                "y": number // _COLUMNS * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "expr": panel.expression, "legendFormat": panel.legend, "datasource": source}],
        }
        for number, panel in enumerate(PANELS)
    ]
    found = {
        "uid": "atelier",
        "title": "Atelier",
        "schemaVersion": 41,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "15s",
        "panels": panels,
    }
    return json.dumps(found, indent=1) + "\n"


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "alerts.yaml").write_text(alert_rules())
    (FOLDER / "dashboard.json").write_text(board())


if __name__ == "__main__":
    main()
