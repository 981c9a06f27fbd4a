"""The cluster's configuration: how many replicas of what, on which resources, serving which models."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from configs.access import AccessConfig, is_loopback
from configs.admission import AdmissionConfig, ControllerConfig
from configs.batching import BatchingConfig, LanguageModelConfig
from configs.http import GrpcConfig, HttpConfig
from configs.model import AdapterConfig, Bytes, GenerationDefaults, ModelConfig, ModelId, StrictModel
from configs.pipeline import PipelineConfig
from configs.simulated import SimulatedConfig

_SECRET = re.compile("key|secret|token|password|credential", re.IGNORECASE)


def _known_device(value: str) -> str:
    if not re.fullmatch(r"cpu|cpu-private|(cuda|sim)(:[0-9]{1,4})?", value):
        raise ValueError(f"not a device: {value!r} (expected 'cpu', 'cpu-private', 'cuda', 'sim', or with ':<number>')")
    return value


Device = Annotated[str, AfterValidator(_known_device)]


class RayConfig(StrictModel):
    """The Ray cluster. Without `address` a private one is started, which ends with `atelier down`."""

    address: str | None = None
    num_cpus: float | None = Field(None, gt=0)
    object_store_bytes: Bytes = Field(2 * 2**30, validate_default=True)
    preallocate: bool = Field(
        True, description="take all memory of the object store at start, in the background, not at the first loads"
    )
    dashboard: bool = False
    templates: bool = Field(
        True,
        description="start Ray's processes as copies of a few that have done their imports: Linux, and a private Ray; "
        "where that does not work, and with `address`, each imports everything itself",
    )


class ObjectStorageConfig(StrictModel):
    """The server behind s3:// URLs. Credentials are never here: the environment of the cluster has them."""

    endpoint: str | None = Field(None, pattern=r"^https?://[^/@?#\s]+/?$", description="without it, AWS of the region")
    region: str | None = Field(None, pattern=r"^[A-Za-z0-9-]+$")
    anonymous: bool = Field(False, description="unsigned requests, for public buckets")
    verify_md5: bool = Field(True, description="ETags of one-piece objects are MD5s; false under SSE-KMS or SSE-C")

    @model_validator(mode="before")
    @classmethod
    def _has_no_secrets(cls, data: Any) -> Any:
        secrets = [str(key) for key in data if _SECRET.search(str(key))] if isinstance(data, dict) else []
        if secrets:
            raise ValueError(
                f"{', '.join(secrets)}: credentials do not belong into a config file; set AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY and, for temporary ones, AWS_SESSION_TOKEN in the environment"
            )
        return data

    def options(self) -> dict[str, str]:
        """Options as `weights.sources` takes them."""
        text = {"endpoint": self.endpoint, "region": self.region}
        flags = {"anonymous": self.anonymous, "verify_md5": self.verify_md5}
        return {key: value for key, value in text.items() if value} | {k: str(v).lower() for k, v in flags.items()}


class StoreConfig(StrictModel):
    """The external weight store on disk, and how much of it a node keeps in Ray's object store."""

    path: Path = Path("~/.cache/atelier/store")
    verify: bool = Field(True, description="check every extent while it is read")
    node_budget_bytes: Bytes | None = Field(
        None, description="bytes of extents that one node keeps in memory; default 70 % of its object store"
    )
    object_storage: ObjectStorageConfig = ObjectStorageConfig()


class LimitsConfig(StrictModel):
    """Limits on one request to the ingress."""

    max_body_bytes: Bytes = Field(2**21, validate_default=True)
    max_upload_bytes: Bytes = Field(
        2**26, validate_default=True, description="of a body of /v1/images, with its images"
    )
    max_prompt_chars: int = Field(32_768, ge=1)
    max_images: int = Field(10, ge=1)
    max_pixels: int = Field(2048 * 2048, ge=64, description="width x height of one image")
    max_inference_steps: int = Field(200, ge=1)
    max_loras: int = Field(16, ge=1, description="adapters of one request for images or text")
    max_controls: int = Field(4, ge=1, description="ControlNets of one image request")
    max_prompts: int = Field(64, ge=1, description="prompts that a language model continues in one request")
    max_messages: int = Field(1024, ge=1, description="turns of a chat")
    max_embedding_inputs: int = Field(2048, ge=1)
    max_embedding_chars: int = Field(2**21, ge=1, description="characters, or token ids, of all inputs together")
    max_head_rows: int = Field(2048, ge=1, description="rows of features for a head")
    max_pipeline_items: int = Field(
        2048, ge=1, description="items of one pipeline request; with images or prompts in it, no more than of those"
    )


class ReplicaConfig(StrictModel):
    """Settings of every deployment: replicas, the resources that each reserves, requests that each may hold."""

    num_replicas: int = Field(1, ge=1)
    num_cpus: float = Field(0.5, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    max_ongoing_requests: int = Field(
        256, ge=1, description="that Serve lets into a replica at once, whatever they are"
    )


class ImageLinksConfig(StrictModel):
    """Links to images, for answers with `response_format: url`."""

    folder: Path | None = Field(
        None, description="where the files are; ingress replicas on several nodes need one that they share"
    )
    ttl_s: float = Field(3600.0, gt=0, description="how long a link lasts")
    max_bytes: Bytes = Field(2**30, validate_default=True, description="of all files; the oldest links end first")
    base_url: str | None = Field(
        None, pattern=r"^https?://[^?#\s]+[^/?#\s]$", description="what links begin with; default: the request's Host"
    )


class ImageStreamsConfig(StrictModel):
    """Image streams with `resumable: true`, whose events are kept in the ingress for clients that reconnect."""

    keep_s: float = Field(60.0, gt=0, description="how long one that nobody reads goes on, or is kept after its end")
    max_streams: int = Field(256, ge=1, description="that are kept; then new ones are refused")
    max_bytes: Bytes = Field(2**28, validate_default=True, description="of all kept events; then the oldest go")


class IngressConfig(ReplicaConfig):
    """The HTTP edge."""

    max_ongoing_requests: int = Field(
        16_384,
        ge=1,
        description="of any kind, at once: more wait in Serve, and probes with them; `admission` bounds inference",
    )
    limits: LimitsConfig = LimitsConfig()
    image_links: ImageLinksConfig = ImageLinksConfig()
    image_streams: ImageStreamsConfig = ImageStreamsConfig()


class ModelReplicaConfig(ReplicaConfig):
    """Settings of every deployment that runs models.

    `cpu` maps the node's shared weights; `cpu-private` copies what it needs, as a card would: for measuring. `sim` is a
    simulated accelerator (`simulated`): for tests and demos.
    """

    device: Device = "cpu"
    resident_bytes: Bytes = Field(
        2 * 2**30,
        validate_default=True,
        description="private memory of what one replica keeps built: copies of weights, KV caches, Python objects; "
        "on cpu, weights stay in the node's shared memory and count against store.node_budget_bytes only",
    )
    device_budget_bytes: Bytes | None = Field(
        None, description="weights and KV caches that one replica keeps on a device of its own; default resident_bytes"
    )

    @property
    def torch_device(self) -> str:
        """Device as torch names it: private memory of the host is its CPU."""
        return "cpu" if self.device == "cpu-private" else self.device

    @property
    def weights_budget_bytes(self) -> int:
        """Bytes of weights that the device in use may hold."""
        return self.resident_bytes if self.device == "cpu" else self.device_budget_bytes or self.resident_bytes


class TextEncoderConfig(ModelReplicaConfig):
    """The text-encoder service: its dynamic batching, and the two tiers of its cache."""

    batching: BatchingConfig = BatchingConfig()
    cache_bytes: Bytes = Field(64 * 2**20, validate_default=True, description="of encodings, in each replica")
    shared_cache_bytes: Bytes | None = Field(
        256 * 2**20, validate_default=True, description="of encodings that all replicas share; null: none are"
    )
    max_running_inputs: int | None = Field(
        None, ge=1, description="inputs of requests that one replica holds; default: a batch, and the next one"
    )

    @property
    def max_running(self) -> int:
        """The inputs that one replica holds; more wait in the admission queue."""
        return self.max_running_inputs or 2 * self.batching.max_batch_size


class WorkerConfig(LanguageModelConfig, ModelReplicaConfig):
    """The denoise/LLM service."""

    standby: bool = Field(
        True,
        description="keep a process each that has imported torch and the engines for workers and for text encoders: "
        "any number of new replicas begin as copies of it and load what they are wanted for (needs ray.templates)",
    )
    encodes_alone: bool = Field(
        True, description="encode text itself while no text encoder answers: slower, and said in the answer"
    )
    resident_bytes: Bytes = Field(4 * 2**30, validate_default=True)
    max_running_images: int = Field(
        16, ge=1, description="images that one worker has under way; more wait in the admission queue"
    )
    max_batch_rows: int = Field(
        64, ge=1, description="rows of one denoise step, over all its requests: one per image, two under guidance"
    )
    max_batch_pixels: int = Field(
        16 * 2**20, ge=64, description="rows x width x height of one denoise step; requests beyond it take turns"
    )
    max_decode_pixels: int = Field(4 * 2**20, ge=64, description="of the images that the VAE decodes at once")
    max_vae_bytes: Bytes = Field(
        8 * 2**30,
        description="activations of one image in the VAE; a larger one goes through in overlapping tiles of the VAE's "
        "own side, as by stock's enable_tiling: 1448x1448 pixels of SDXL's in float32, 2048x2048 in bfloat16",
    )
    checkpoint_interval_s: float = Field(
        5.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds of an image's denoising after which the ingress gets its state, at the end of a step: "
        "when its worker dies, another one goes on from there; 0: begins anew",
    )
    num_threads: int | None = Field(None, ge=1, description="torch threads; default: the replica's CPUs, rounded up")


def _root_of(path: Path) -> Path:
    """Return the folder that a configured checkpoint lies in; for a hub cache, the repository with the blobs."""
    parent = path.parent
    if parent.name == "snapshots":
        return parent.parent
    return path if parent == parent.parent else parent  # never the whole file system


class ClusterConfig(StrictModel):
    """One Atelier cluster, as one YAML file."""

    name: ModelId = "atelier"
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig | None = Field(None, description="no gRPC without it")
    access: AccessConfig = AccessConfig()
    ray: RayConfig = RayConfig()
    store: StoreConfig = StoreConfig()
    ingress: IngressConfig = IngressConfig()
    admission: AdmissionConfig = AdmissionConfig()
    controller: ControllerConfig = ControllerConfig()
    text_encoder: TextEncoderConfig = TextEncoderConfig()
    worker: WorkerConfig = WorkerConfig()
    model_roots: tuple[Path, ...] | None = Field(
        None,
        description="folders that models and adapters may be registered from while the cluster runs, with all that "
        "their symlinks lead to; default: those that the local ones of this config lie in",
    )
    simulated: SimulatedConfig = Field(
        SimulatedConfig(), description="the accelerators that `device: sim` means, in each replica that has it"
    )
    models: tuple[ModelConfig, ...] = Field(min_length=1)
    adapters: tuple[AdapterConfig, ...] = ()
    pipelines: tuple[PipelineConfig, ...] = ()

    @model_validator(mode="after")
    def _ids_fit_together(self) -> Self:
        entries = (self.models, self.adapters, self.pipelines)
        uses = Counter(entry.id for kind in entries for entry in kind)
        twice = sorted(id_ for id_, count in uses.items() if count > 1)
        if twice:
            raise ValueError(f"ids used more than once: {', '.join(twice)}")
        known = {model.id for model in self.models}
        for adapter in self.adapters:
            unknown = [base for base in adapter.base if base not in known]
            if unknown:
                names, models = ", ".join(unknown), ", ".join(sorted(known))
                raise ValueError(f"adapter {adapter.id!r} names unknown base {names}; models: {models}")
        return self

    @model_validator(mode="after")
    def _simulated_devices_are_there(self) -> Self:
        for service, device in (("text_encoder", self.text_encoder.device), ("worker", self.worker.device)):
            kind, _, index = device.partition(":")
            if kind == "sim" and int(index or 0) >= self.simulated.num_devices:
                raise ValueError(
                    f"{service}.device: no device {device!r}: simulated.num_devices is {self.simulated.num_devices}"
                )
        return self

    @property
    def entries(self) -> dict[str, ModelConfig | AdapterConfig]:
        """Models, then adapters, by id."""
        models: dict[str, ModelConfig | AdapterConfig] = {model.id: model for model in self.models}
        return models | {adapter.id: adapter for adapter in self.adapters}

    def open_hosts(self, http_host: str | None = None) -> dict[str, str]:
        """Return the keys of this config whose address other machines reach although nobody needs a key, and why not.

        `http_host` is the address that HTTP really has, when Serve was told another one than this config.
        """
        if self.access.insecure or self.access.keys_file is not None:
            return {}
        hosts = {"http.host": http_host or self.http.host}
        if self.http.proxy == "haproxy":
            hosts["http.haproxy.replica_host"] = self.http.haproxy.replica_host
        if self.grpc:
            hosts["grpc.host"] = self.grpc.host
        return {
            key: f"other machines reach {host}, and nobody needs a key: make one with `atelier keys add NAME "
            "--admin --file FILE` and set `access: {keys_file: FILE}`, or say --insecure "
            "(`access: {insecure: true}`) to let everybody in"
            for key, host in hosts.items()
            if not is_loopback(host)
        }

    @property
    def allowed_roots(self) -> tuple[Path, ...]:
        """`model_roots`, or the folders of configured models: their neighbours may be registered, no other path."""
        if self.model_roots is not None:
            return self.model_roots
        local = [entry.path for entry in self.entries.values() if isinstance(entry.path, Path)]
        return tuple(dict.fromkeys(_root_of(path) for path in local))

    def trusts(self, entry: ModelConfig | AdapterConfig) -> bool:
        """Return True when this config itself names the source: its author may read what it names."""
        configured = self.entries.get(entry.id)
        return configured is not None and configured.path == entry.path

    def defaults_of(self, model: str) -> GenerationDefaults:
        """Return what requests for `model` get unless they say otherwise; nothing for an adapter or an unknown id."""
        entry = self.entries.get(model)
        return entry.defaults if isinstance(entry, ModelConfig) else GenerationDefaults()
