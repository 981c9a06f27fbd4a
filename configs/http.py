"""The addresses that a cluster listens on, and their servers."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from configs.model import StrictModel

# ComfyUI's paths, which are there under /api too.
COMFYUI_PATHS: Final = (
    *("/prompt", "/queue", "/history", "/view", "/upload", "/interrupt", "/free", "/object_info", "/system_stats"),
    *("/embeddings", "/models", "/features", "/ws"),
)


# Beginnings of the paths that ask models: their POSTs wait for turns and may be sent to another replica. All others,
# probes, lists and operators, never wait behind them.
INFERENCE_PATHS: Final = (
    "/v1/",
    "/v2/models/",
    "/v2/rerank",
    "/chat/",
    "/completions",
    "/embeddings",
    "/rerank",
    "/classify",
    "/score",
    "/pooling",
    "/images/",
    "/responses",
    "/tokenize",
    "/detokenize",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/sdapi/v1/txt2img",
    "/sdapi/v1/img2img",
    *("/prompt", "/api/prompt"),
)
# Beginnings of those whose bodies may have images in them, which have a bound of their own.
UPLOAD_PATHS: Final = (
    *(
        "/v1/images/",
        "/v1/videos",
        "/v1/audio/generations",
        "/v1/jobs",
        "/sdapi/v1/img2img",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
    ),
    *("/api/chat", "/api/generate", "/tokenize", "/v1/pipelines/"),
    "/upload/",
)


# Beginnings of those by which jobs are followed while they are in progress.
JOB_PATHS: Final = (
    *("/v1/jobs", "/v1/videos", "/v1/batches", "/v1/files"),
    *("/prompt", "/queue", "/history", "/view", "/interrupt", "/ws"),
)
# Paths whose POST begins a job, or keeps a file, each time that it arrives.
BEGINNING_PATHS: Final = ("/v1/jobs", "/v1/videos", "/v1/batches", "/v1/files", "/prompt", "/api/prompt")
# Beginnings of those whose bodies are files: they go to the disk piece by piece.
FILE_PATHS: Final = ("/v1/files", "/admin/uploads/")


class CompatConfig(StrictModel):
    """APIs of other servers, in addition to OpenAI's and the Open Inference Protocol."""

    vllm: bool = Field(
        True, description="OpenAI's paths without /v1, and /health, /version, /tokenize, /detokenize: vLLM, llama.cpp"
    )
    anthropic: bool = Field(True, description="/v1/messages")
    ollama: bool = Field(True, description="/api/chat, /api/generate, /api/embed, /api/tags, ...")
    a1111: bool = Field(True, description="/sdapi/v1/txt2img, /sdapi/v1/img2img, ...: Stable Diffusion WebUI")
    comfyui: bool = Field(True, description="/prompt, /queue, /history, /view, /ws, ...: ComfyUI's workflows")


class HaproxyConfig(StrictModel):
    """HAProxy's needs beside the public port. Ports of Serve's without a number are found free when the cluster
    starts."""

    stats_port: int | None = Field(
        None, ge=1, le=65535, description="port of HAProxy's statistics page, on loopback; null: no such page"
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="port of HAProxy's own metrics, on loopback; null: no such page"
    )
    fallback_port: int | None = Field(
        None, ge=1, le=65535, description="port of Serve's proxy, which holds requests while no ingress replica is up"
    )
    first_replica_port: int | None = Field(None, ge=1024, le=65000, description="first port of the ingress replicas")
    num_replica_ports: int = Field(
        100, ge=8, le=1000, description="number of ports for replicas, restarting ones included"
    )
    replica_host: str = Field(
        "127.0.0.1",
        description="address on which ingress replicas listen for HAProxy; with several nodes 0.0.0.0, behind a "
        "firewall",
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="maximum client connections, never more than two fifths of `ulimit -Hn`; others wait",
    )
    max_connections_per_address: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="maximum connections per client address; further ones are closed; null: three quarters of "
        "max_connections. A TLS server on this machine is one address",
    )
    max_requests: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="maximum in-flight inference requests per ingress replica, including queued; HAProxy answers more "
        "with 429",
    )


class HttpConfig(StrictModel):
    """The ingress's HTTP address, and its proxy."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    proxy: Literal["haproxy", "serve"] = Field(
        "haproxy", description="HAProxy, which calls the ingress replicas directly, or Serve's own proxy, in Python"
    )
    route_prefix: str = Field(
        "/",
        pattern=r"^/$|^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$",
        max_length=200,
        description="path below which the cluster answers; clusters that share one Ray need different ones",
    )
    haproxy: HaproxyConfig = HaproxyConfig()
    compat: CompatConfig = CompatConfig()
    web: bool = Field(True, description="pages for people: / to create images, /chat, /cluster, /pipelines")
    request_timeout_s: float = Field(300.0, gt=0, description="maximum duration of a request, over any protocol")

    @property
    def proxy_timeout_s(self) -> float:
        """Timeout of Serve: later, so that the ingress answers, and says what was not done in time."""
        return self.request_timeout_s + 5.0


class GrpcConfig(StrictModel):
    """The gRPC address of the Open Inference Protocol, shared by the ingress replicas of a node."""

    host: str = "127.0.0.1"
    port: int = Field(8001, ge=1, le=65535)
