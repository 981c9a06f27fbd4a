"""The page of metrics under vLLM's names as well, for dashboards, autoscalers and endpoint pickers that know these.

It is made of the page's own samples: Ray's counts of each process are added up by model. Times are in seconds there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple


class _Source(NamedTuple):
    """A metric of the page, the labels that its samples must have, and the divisor of its values."""

    name: str
    only: frozenset[tuple[str, str]] = frozenset()
    divisor: float = 1.0


class _Metric(NamedTuple):
    """A metric of vLLM's, with its older names, and the source of its values."""

    names: tuple[str, ...]
    kind: str
    text: str
    source: _Source


_FIRST: Final = _Source("ray_atelier_first_token_ms", divisor=1000.0)
_BETWEEN: Final = _Source("ray_atelier_between_tokens_ms", divisor=1000.0)
_METRICS: Final = (
    _Metric(("num_requests_running",), "gauge", "Requests that have a place.", _Source("atelier_admission_running")),
    _Metric(("num_requests_waiting",), "gauge", "Requests that wait.", _Source("atelier_admission_waiting")),
    _Metric(
        ("prompt_tokens_total",),
        "counter",
        "Tokens of prompts.",
        _Source("ray_atelier_tokens_total", frozenset({("direction", "in")})),
    ),
    _Metric(
        ("generation_tokens_total",),
        "counter",
        "Tokens of answers.",
        _Source("ray_atelier_tokens_total", frozenset({("direction", "out")})),
    ),
    _Metric(
        ("request_success_total",),
        "counter",
        "Texts that were answered.",
        _Source("ray_atelier_requests_total", frozenset({("kind", "text"), ("status", "200")})),
    ),
    _Metric(("time_to_first_token_seconds",), "histogram", "Time to the first token.", _FIRST),
    _Metric(
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "histogram",
        "Mean time between two tokens of an answer.",
        _BETWEEN,
    ),
)
_USAGE: Final = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_BLOCKS: Final = "atelier_kv_blocks"
_PARTS: Final = ("_bucket", "_sum", "_count")  # of a histogram
_NAMES: Final = "|".join(sorted({metric.source.name for metric in _METRICS} | {_BLOCKS}, key=len, reverse=True))
_SAMPLE: Final = re.compile(rf"^({_NAMES})(_bucket|_sum|_count)?\{{(.*)\}} (\S+)", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_Key = tuple[str, str, str]  # a part of a histogram or "", the model, and the bound of a bucket or ""


def vllm_metrics(page: str) -> str:
    """Return a page of metrics under vLLM's names."""
    sums: dict[str, dict[_Key, float]] = {metric.names[0]: {} for metric in _METRICS}
    blocks: dict[str, dict[str, float]] = {}
    for found in _SAMPLE.finditer(page):
        labels = dict(_LABEL.findall(found[3]))
        try:
            value = float(found[4])
        except ValueError:
            continue
        if found[1] == _BLOCKS:
            for model in labels.get("model", "").split(","):
                own = blocks.setdefault(model, {})
                own[labels.get("state", "")] = own.get(labels.get("state", ""), 0.0) + value
            continue
        for metric in _METRICS:
            if metric.source.name == found[1] and metric.source.only <= labels.items():
                key = found[2] or "", labels.get("model", ""), labels.get("le", "")
                own_sums = sums[metric.names[0]]
                own_sums[key] = own_sums.get(key, 0.0) + value
    lines = [
        line for metric in _METRICS for name in metric.names for line in _lines(name, metric, sums[metric.names[0]])
    ]
    lines += [line for name in _USAGE for line in _usage(name, blocks)]
    return "".join(f"{line}\n" for line in lines)


def _lines(name: str, metric: _Metric, found: dict[_Key, float]) -> Iterator[str]:
    yield f"# HELP vllm:{name} {metric.text}"
    yield f"# TYPE vllm:{name} {metric.kind}"
    for (part, model, bound), value in sorted(found.items(), key=_in_order):
        divisor = metric.source.divisor
        at_most = ""
        if part == "_bucket":
            at_most = f',le="{bound if bound == "+Inf" else f"{float(bound) / divisor:g}"}"'
        shown = value / divisor if part == "_sum" or not part else value
        yield f'vllm:{name}{part}{{model_name="{model}"{at_most}}} {shown!r}'


def _in_order(sample: tuple[_Key, float]) -> tuple[str, int, float]:
    """Order the samples of a histogram by model, part and bound."""
    (part, model, bound), _ = sample
    return model, _PARTS.index(part) if part else 0, float(bound or 0)


def _usage(name: str, blocks: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"# HELP vllm:{name} Share of the KV cache's blocks that is used, of all replicas."
    yield f"# TYPE vllm:{name} gauge"
    for model, found in sorted(blocks.items()):
        if total := found.get("total"):
            yield f'vllm:{name}{{model_name="{model}"}} {found.get("used", 0.0) / total!r}'
