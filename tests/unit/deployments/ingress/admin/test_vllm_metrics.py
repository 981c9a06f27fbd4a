"""The metrics that vLLM's dashboards and autoscalers ask for, made of ours; read by Prometheus' own parser."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deployments.ingress.admin.vllm_metrics import vllm_metrics

PAGE = r"""# TYPE atelier_admission_waiting gauge
atelier_admission_waiting{pool="worker",model="chat"} 3
atelier_admission_waiting{pool="worker",model="a \"b\" {c}"} 1
atelier_admission_running{pool="worker",model="chat"} 2
atelier_admission_running{pool="encoder",model="chat"} 1
atelier_kv_blocks{service="workers",replica="r1",model="chat,other",state="used"} 10
atelier_kv_blocks{service="workers",replica="r1",model="chat,other",state="total"} 40
atelier_kv_blocks{service="workers",replica="r2",model="chat",state="used"} 50
atelier_kv_blocks{service="workers",replica="r2",model="chat",state="total"} 60
ray_atelier_tokens_total{NodeAddress="10.0.0.1",WorkerId="1",direction="in",model="chat"} 7.0
ray_atelier_tokens_total{NodeAddress="10.0.0.2",WorkerId="2",direction="in",model="chat"} 5.0
ray_atelier_tokens_total{NodeAddress="10.0.0.2",WorkerId="2",direction="out",model="chat"} 4.0
ray_atelier_requests_total{kind="text",model="chat",status="200"} 9.0
ray_atelier_requests_total{kind="text",model="chat",status="429"} 1.0
ray_atelier_requests_total{kind="image",model="chat",status="200"} 1.0
ray_atelier_first_token_ms_bucket{WorkerId="1",le="100.0",model="chat"} 1.0
ray_atelier_first_token_ms_bucket{WorkerId="2",le="100.0",model="chat"} 2.0
ray_atelier_first_token_ms_bucket{WorkerId="1",le="+Inf",model="chat"} 1.0
ray_atelier_first_token_ms_bucket{WorkerId="2",le="+Inf",model="chat"} 3.0
ray_atelier_first_token_ms_count{WorkerId="2",model="chat"} 4.0
ray_atelier_first_token_ms_sum{WorkerId="2",model="chat"} 250.0
ray_atelier_first_token_ms_measured_total{WorkerId="2",model="chat"} 250.0
ray_atelier_between_tokens_ms_sum{WorkerId="2",model="chat"} nonsense
"""


def samples(page: str) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            found[(one.name.removeprefix("vllm:"), *(value for _, value in sorted(one.labels.items())))] = one.value
    return found


def test_what_is_counted_is_added_up_by_model() -> None:
    expected: dict[Any, float] = {
        ("num_requests_waiting", "chat"): 3,
        ("num_requests_waiting", 'a "b" {c}'): 1,
        ("num_requests_running", "chat"): 3,
        ("prompt_tokens_total", "chat"): 12,
        ("generation_tokens_total", "chat"): 4,
        ("request_success_total", "chat"): 9,
        ("time_to_first_token_seconds_bucket", "0.1", "chat"): 3,
        ("time_to_first_token_seconds_bucket", "+Inf", "chat"): 4,
        ("time_to_first_token_seconds_count", "chat"): 4,
        ("time_to_first_token_seconds_sum", "chat"): 0.25,
    }
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        expected |= {(name, "chat"): 0.6, (name, "other"): 0.25}
    assert samples(vllm_metrics(PAGE)) == expected


def test_a_page_without_any_has_no_samples() -> None:
    assert samples(vllm_metrics("")) == {}
    assert samples(vllm_metrics("nothing {\n}} 7\natelier_kv_blocks{} x\n")) == {}
