"""The cluster's configuration: how many replicas of what, on which resources, serving which models."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from configs.access import AccessConfig, is_loopback
from configs.admission import AdmissionConfig, ControllerConfig
from configs.batching import BatchingConfig, LanguageModelConfig
from configs.http import GrpcConfig, HttpConfig
from configs.jobs import JobsConfig
from configs.model import (
    AdapterConfig,
    Bytes,
    GenerationDefaults,
    ModelConfig,
    ModelId,
    Root,
    StrictModel,
    located_errors,
)
from configs.pipeline import PipelineConfig, nearest_name
from configs.ranks import RanksConfig
from configs.simulated import SimulatedConfig

_SECRET = re.compile("key|secret|token|password|credential", re.IGNORECASE)


def _known_device(value: str) -> str:
    if not re.fullmatch(r"cpu|cpu-private|(cuda|sim)(:[0-9]{1,4})?", value):
        raise ValueError(f"not a device: {value!r} (expected 'cpu', 'cpu-private', 'cuda', 'sim', or with ':<number>')")
    return value


Device = Annotated[str, AfterValidator(_known_device)]


# As Ray writes label selectors: a value, `in(a,b)`, and either behind an exclamation mark.
_LabelValue = Annotated[str, Field(pattern=r"^!?(in\([A-Za-z0-9._,-]+\)|[A-Za-z0-9._-]*)$", max_length=256)]
_HEAD: Final = "node:__internal_head__"  # a resource that Ray gives its head node


class PlacementConfig(StrictModel):
    """The nodes that Ray may choose, as Ray's own options of an actor."""

    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, description="resources that Ray reserves besides CPUs and GPUs, such as {spot: 0.001}"
    )
    accelerator_type: str | None = Field(None, min_length=1, description="type of the node's accelerator, such as H100")
    labels: dict[str, _LabelValue] = Field(
        {}, description="labels that a node must have, such as {market-type: spot}, {region: 'in(a,b)'} or {zone: '!a'}"
    )

    @property
    def ray_options(self) -> dict[str, Any]:
        """Options of an actor in Ray's names; those that are not given are left out."""
        options = {
            "resources": self.resources,
            "accelerator_type": self.accelerator_type,
            "label_selector": self.labels,
        }
        return {name: value for name, value in options.items() if value}


class RayConfig(StrictModel):
    """The Ray cluster. Without `address` a private one is started, which ends with `atelier down`."""

    address: str | None = Field(None, description="address of a Ray that is up; default: start a private one")
    num_cpus: float | None = Field(None, gt=0, description="CPUs that Ray may reserve; default: those of the machine")
    object_store_bytes: Bytes = Field(
        2 * 2**30, validate_default=True, description="size of Ray's object store, which holds the weights of the node"
    )
    preallocate: bool = Field(
        True, description="allocate the object store at start, in the background, instead of during the first loads"
    )
    dashboard: bool = Field(False, description="start Ray's dashboard")
    templates: bool = Field(
        True,
        description="start Ray's processes as copies of a few that have done their imports (Linux, private Ray); "
        "otherwise each process imports everything itself",
    )
    control_plane: PlacementConfig = Field(
        PlacementConfig(resources={_HEAD: 0.001}),
        description="nodes for registry, controller and admission queue; default: Ray's head, which never scales away",
    )


LogFormat = Literal["text", "json"]


class LoggingConfig(StrictModel):
    """Logs of replicas and of the control plane."""

    format: LogFormat = Field("text", description="form of a line: text, or json with the request's id and the place")


class TracingConfig(StrictModel):
    """Traces, sent to a collector by OpenTelemetry's protocol (OTLP) over HTTP."""

    endpoint: str = Field(
        pattern=r"^https?://[^@?#\s]+$", description="URL of the collector, such as http://127.0.0.1:4318/v1/traces"
    )
    sampling_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of the requests that are traced; a caller's traceparent decides for its own",
    )


class ObjectStorageConfig(StrictModel):
    """The server behind s3:// URLs. Credentials come from the environment of the cluster, never from here."""

    endpoint: str | None = Field(
        None, pattern=r"^https?://[^/@?#\s]+/?$", description="URL of the server; default: AWS"
    )
    region: str | None = Field(None, pattern=r"^[A-Za-z0-9-]+$", description="region of the buckets")
    anonymous: bool = Field(False, description="send unsigned requests, for public buckets")
    verify_md5: bool = Field(
        True, description="check objects of one piece against their ETag as MD5; set false under SSE-KMS or SSE-C"
    )

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
    """The weight store on disk, and how much of it a node keeps in memory."""

    path: Path = Field(Path("~/.cache/atelier/store"), description="folder of the store")
    verify: bool = Field(True, description="check every extent against its checksum while it is read")
    node_budget_bytes: Bytes | None = Field(
        None, description="maximum weights that a node keeps in memory; default: 70 % of its object store"
    )
    object_storage: ObjectStorageConfig = ObjectStorageConfig()


# What a body is refused for before its parts are looked at; a config may say less.
MAX_MESSAGES: Final = 4096
MAX_LORAS: Final = 256


class LimitsConfig(StrictModel):
    """Limits of one request."""

    max_body_bytes: Bytes = Field(2**21, validate_default=True, description="maximum size of a body")
    max_upload_bytes: Bytes = Field(2**26, validate_default=True, description="maximum size of a body with images")
    max_prompt_chars: int | None = Field(
        None,
        ge=1,
        description="maximum characters of a prompt; null: 32768 of an image's, and what its model reads of a text's",
    )
    max_images: int = Field(10, ge=1, description="maximum images of one request")
    max_pixels: int = Field(2048 * 2048, ge=64, description="maximum width x height of an image")
    max_upload_pixels: int = Field(
        36_000_000,
        ge=64,
        description="maximum pixels of an uploaded image, which is scaled down to max_pixels, and of an enlarged one",
    )
    max_video_pixels: int = Field(
        2**27, ge=64, description="maximum pixels of all frames and images that go to parameters of a pipeline by name"
    )
    max_inference_steps: int = Field(200, ge=1, description="maximum denoising steps")
    max_frames: int = Field(257, ge=1, description="maximum frames of a video")
    max_audio_s: float = Field(
        300.0, gt=0, description="maximum seconds of audio that is made, and that a request brings"
    )
    max_loras: int = Field(16, ge=1, le=MAX_LORAS, description="maximum LoRAs of one request")
    max_controls: int = Field(4, ge=1, description="maximum ControlNets of an image request, and IP-Adapters")
    max_prompts: int = Field(64, ge=1, description="maximum prompts of a request for completions")
    max_messages: int = Field(1024, ge=1, le=MAX_MESSAGES, description="maximum messages of a chat")
    max_embedding_inputs: int = Field(2048, ge=1, description="maximum texts of a request for embeddings")
    max_embedding_chars: int = Field(2**21, ge=1, description="maximum characters, or token ids, of all these texts")
    max_head_rows: int = Field(2048, ge=1, description="maximum rows of features for a head, or of a program")
    max_pipeline_items: int = Field(
        2048, ge=1, description="maximum items of a pipeline request; limits of images and prompts hold as well"
    )


class ReplicaConfig(StrictModel):
    """Settings of every deployment: its replicas and the resources of each."""

    num_replicas: int = Field(1, ge=1, description="number of replicas")
    num_cpus: float = Field(0.5, ge=0, description="CPUs that Ray reserves for each replica")
    num_gpus: float = Field(0.0, ge=0, description="GPUs that Ray reserves for each replica")
    placement: PlacementConfig = PlacementConfig()
    max_ongoing_requests: int = Field(256, ge=1, description="maximum concurrent requests of any kind per replica")

    @property
    def ray_options(self) -> dict[str, Any]:
        """Options of each replica's actor in Ray's names."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.placement.ray_options}

    @property
    def num_processes(self) -> int:
        """Processes of a replica, each with the replica's resources."""
        return 1


class ImageLinksConfig(StrictModel):
    """Links to images, for answers with `response_format: url`."""

    folder: Path | None = Field(
        None, description="folder of the files; ingress replicas on several nodes must share it"
    )
    ttl_s: float = Field(3600.0, gt=0, description="seconds until a link expires")
    max_bytes: Bytes = Field(
        2**30, validate_default=True, description="maximum size of all files; the oldest links expire first"
    )
    base_url: str | None = Field(
        None,
        pattern=r"^https?://[^?#\s]+[^/?#\s]$",
        description="beginning of the links; default: the Host of the request",
    )


class WorkflowFilesConfig(StrictModel):
    """Files of ComfyUI's workflows: uploaded images, and images that were made."""

    folder: Path | None = Field(
        None,
        description="folder of the files; default: `workflows` in the store's. Ingress replicas on several nodes must "
        "share it",
    )
    keep_s: float = Field(
        604_800.0, gt=0, le=366 * 86_400.0, allow_inf_nan=False, description="seconds that a file is kept after it came"
    )
    max_bytes: Bytes = Field(
        2**32, ge=2**20, validate_default=True, description="maximum size of all files; the oldest are removed"
    )
    max_files: int = Field(10_000, ge=1, le=1_000_000, description="maximum files; the oldest are removed")


class StoredResponsesConfig(StrictModel):
    """Stored responses of /v1/responses; a request opts out with `store: false`."""

    enabled: bool = Field(True, description="store responses")
    folder: Path | None = Field(
        None,
        description="folder of their file, in plain text; ingress replicas on several nodes must share it",
    )
    ttl_s: float = Field(86_400.0, gt=0, description="seconds that a response is kept after its last use")
    max_bytes: Bytes = Field(2**28, validate_default=True, description="maximum size of all; the oldest are removed")


class ImageStreamsConfig(StrictModel):
    """Image streams with `resumable: true`, whose events are kept in the ingress for clients that reconnect."""

    keep_s: float = Field(
        60.0, gt=0, description="seconds that a stream without a reader runs on, and that a finished one is kept"
    )
    max_streams: int = Field(256, ge=1, description="maximum kept streams; further ones are refused")
    max_bytes: Bytes = Field(
        2**28, validate_default=True, description="maximum size of all events; the oldest are removed"
    )


class SharedMemoryConfig(StrictModel):
    """Triton's system shared memory for clients on the same machine: regions of files in /dev/shm that they own."""

    max_region_bytes: Bytes = Field(2**26, validate_default=True, description="maximum size of a region")
    max_regions: int = Field(64, ge=1, le=4096, description="maximum regions per user and key")
    max_read_bytes: Bytes = Field(
        2**28, validate_default=True, description="maximum data of all requests in progress; more are refused"
    )


ImageHost = Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?$")]


class IngressConfig(ReplicaConfig):
    """The HTTP edge."""

    max_ongoing_requests: int = Field(
        16_384,
        ge=1,
        description="maximum concurrent requests of any kind per replica, probes included; more wait in Serve. "
        "Inference is bounded by `admission`",
    )
    limits: LimitsConfig = LimitsConfig()
    image_hosts: tuple[ImageHost, ...] = Field(
        (),
        description="hosts, or host:port, from which images are fetched that chats name by http(s) addresses; "
        "inner addresses are never asked",
    )
    image_links: ImageLinksConfig = ImageLinksConfig()
    image_streams: ImageStreamsConfig = ImageStreamsConfig()
    stored_responses: StoredResponsesConfig = StoredResponsesConfig()
    workflow_files: WorkflowFilesConfig = WorkflowFilesConfig()
    shared_memory: SharedMemoryConfig | None = Field(
        None, description="shared memory of clients; null: off. Needs num_replicas: 1"
    )

    @model_validator(mode="after")
    def _keeps_regions_in_one_place(self) -> Self:
        if self.shared_memory is not None and self.num_replicas > 1:
            raise ValueError(
                "shared_memory: a region is registered with one ingress replica, so num_replicas must be 1"
            )
        return self


class ModelReplicaConfig(ReplicaConfig):
    """Settings of every deployment that runs models."""

    device: Device = Field(
        "cpu",
        description="cpu, cuda or sim, or with a number (cuda:1). cpu maps the shared weights of the node; "
        "cpu-private copies them, for measuring; sim is a simulated accelerator (`simulated`), for tests and demos",
    )
    resident_bytes: Bytes = Field(
        2 * 2**30,
        validate_default=True,
        description="maximum private memory of one replica: KV caches, copies of weights, Python objects; on cpu, "
        "shared weights count against store.node_budget_bytes only",
    )
    device_budget_bytes: Bytes | None = Field(
        None, description="maximum weights and KV caches on the replica's device; default: resident_bytes"
    )

    @property
    def torch_device(self) -> str:
        """Device as torch names it: private memory of the host is its CPU."""
        return "cpu" if self.device == "cpu-private" else self.device

    @property
    def weights_budget_key(self) -> str:
        """Key of this section that bounds the weights on the device in use."""
        has_own = self.device != "cpu" and self.device_budget_bytes is not None
        return "device_budget_bytes" if has_own else "resident_bytes"

    @property
    def weights_budget_bytes(self) -> int:
        """Bytes of weights that the device in use may hold."""
        nbytes: int = getattr(self, self.weights_budget_key)
        return nbytes

    @property
    def other_devices(self) -> tuple[str, ...]:
        """Devices beside `device`, which have layers of language models only."""
        return ()

    @property
    def host_bytes(self) -> int | None:
        """Bytes of the host for the KV caches of the layers that it computes; None where it computes none."""
        return self.resident_bytes


class TextEncoderConfig(ModelReplicaConfig):
    """The text-encoder service: dynamic batching and the cache of encodings."""

    batching: BatchingConfig = BatchingConfig()
    cache_bytes: Bytes = Field(
        256 * 2**20,
        validate_default=True,
        description="size of each replica's cache of encodings: equal texts go to the same replica",
    )
    max_running_inputs: int | None = Field(
        None, ge=1, description="maximum inputs of requests that one replica holds; default: two batches"
    )

    @property
    def max_running(self) -> int:
        """The inputs that one replica holds; more wait in the admission queue."""
        return self.max_running_inputs or 2 * self.batching.max_batch_size


class WorkerConfig(LanguageModelConfig, ModelReplicaConfig):
    """The workers, which denoise and run language models."""

    devices: tuple[Device, ...] = Field(
        (),
        max_length=17,
        description="devices of each replica: the first is `device`; language models that have no room there have "
        "layers on the next ones, each with the same budget, and with `cpu` as the last one on the host (default: "
        "[device, cpu]). num_gpus is the number of cuda devices",
    )
    ranks: RanksConfig = Field(
        RanksConfig(), description="processes that compute one model together; by default one does"
    )
    standby: bool = Field(
        True,
        description="keep a process each for workers and text encoders that has imported torch and the engines; new "
        "replicas start as copies of it (needs ray.templates)",
    )
    encodes_alone: bool = Field(
        True,
        description="encode texts in the worker while no text encoder answers; slower, with a warning in the answer",
    )
    resident_bytes: Bytes = Field(
        4 * 2**30, validate_default=True, description="maximum private memory of one replica; see text_encoder"
    )
    max_running_images: int = Field(
        16, ge=1, description="maximum images in progress per worker; more wait in the admission queue"
    )
    max_batch_rows: int = Field(
        64, ge=1, description="maximum rows of one denoise step: one per image, two with guidance"
    )
    max_batch_pixels: int = Field(
        16 * 2**20, ge=64, description="maximum rows x width x height of one denoise step; more requests take turns"
    )
    max_decode_pixels: int = Field(4 * 2**20, ge=64, description="maximum pixels that the VAE decodes at once")
    max_vae_bytes: Bytes = Field(
        8 * 2**30,
        description="maximum bytes of tensors of one image in the VAE; larger images are decoded in overlapping tiles, "
        "as by diffusers' enable_tiling. The default is 1672x1672 pixels of SDXL in float32, 2360x2360 in bfloat16",
    )
    replay: bool | Literal["auto", "checked"] = Field(
        "auto",
        description="run forwards of a small denoiser again with the same bits, as recorded calls, on a card as CUDA "
        "graphs; auto: not on a card; checked: compare each with the module's own, and end the request where they "
        "differ",
    )
    checkpoint_interval_s: float = Field(
        5.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds of denoising between two checkpoints of an image, from which another worker continues "
        "when this one dies; 0: none, it starts over",
    )
    num_threads: int | None = Field(None, ge=1, description="torch threads; default: the replica's CPUs, rounded up")

    @model_validator(mode="before")
    @classmethod
    def _of_its_devices(cls, values: Any) -> Any:
        """Fill in what follows from `devices`."""
        devices = values.get("devices") if isinstance(values, dict) else None
        if not isinstance(devices, list | tuple) or not devices or not all(isinstance(one, str) for one in devices):
            return values
        num_cuda = sum(one.startswith("cuda") for one in devices)
        return {"device": devices[0], **({"num_gpus": num_cuda} if num_cuda else {}), **values}

    @model_validator(mode="after")
    def _devices_fit(self) -> Self:
        if self.devices and (problem := _device_problem(self.devices, self.device, self.num_gpus)):
            raise located_errors(type(self).__name__, [(("devices",), problem)])
        if self.num_processes > 1 and (found := _rank_problem(self)):
            key, problem = found
            raise located_errors(type(self).__name__, [((key,), problem)])
        return self

    @property
    def num_processes(self) -> int:
        """Processes of a replica, each with the replica's resources."""
        return self.ranks.size

    @property
    def ray_options(self) -> dict[str, Any]:
        """Options of each replica's actor in Ray's names; the places of ranks have the labels that a node must have."""
        options = super().ray_options
        return {name: value for name, value in options.items() if name != "label_selector" or self.ranks.size == 1}

    @property
    def other_devices(self) -> tuple[str, ...]:
        """Devices beside `device`, which have layers of language models only."""
        return tuple(one for one in self.devices[1:] if one != "cpu")

    @property
    def host_bytes(self) -> int | None:
        """Bytes of the host for the KV caches of the layers that it computes; None where it computes none."""
        return self.resident_bytes if not self.devices or "cpu" in self.devices else None


def _device_problem(devices: Sequence[str], device: str, num_gpus: float) -> str | None:
    """Return the problem of a replica's devices, None without one."""
    *first, last = devices
    accelerators = first if last == "cpu" else devices
    kinds = {one.partition(":")[0] for one in accelerators}
    whole = [one if ":" in one else f"{one}:0" for one in accelerators]
    if twice := next((one for number, one in enumerate(whole) if one in whole[:number]), None):
        return f"{twice} is there twice"
    if len(kinds) != 1 or not kinds <= {"cuda", "sim"}:
        return f"{', '.join(devices)}: expected devices of one kind, cuda or sim, and perhaps cpu as the last one"
    if device != devices[0]:
        return f"the first one is {devices[0]}, but device is {device}: they are the same, and device may be left out"
    if kinds == {"cuda"} and (
        num_gpus != len(whole) or set(whole) != {f"cuda:{number}" for number in range(len(whole))}
    ):
        return (
            f"Ray shows each replica its own GPUs as cuda:0 and on: {', '.join(accelerators)} with num_gpus "
            f"{num_gpus:g} is not cuda:0 to cuda:{len(whole) - 1} with num_gpus {len(whole)}"
        )
    return None


def _rank_problem(worker: WorkerConfig) -> tuple[str, str] | None:
    """Return the key and the problem of a replica that cannot have ranks, None without one."""
    if worker.devices:
        return "devices", f"{len(worker.devices)} devices are for one process, and each of the ranks has one: `device`"
    if not worker.num_cpus and not worker.num_gpus:
        return "num_cpus", "0 with num_gpus 0: Ray keeps a place for each rank, so it takes a CPU or a GPU, or a part"
    kind, _, index = worker.device.partition(":")
    if kind == "cuda" and (worker.num_gpus != 1 or int(index or 0)):
        return (
            "num_gpus",
            f"{worker.num_gpus:g} with device {worker.device}: each of {worker.num_processes} ranks has a GPU of its "
            "own, which Ray shows it as cuda:0; expected num_gpus 1 and device cuda",
        )
    return None


def _root_of(path: Path) -> Path:
    """Return the folder that a configured checkpoint lies in; for a hub cache, the repository with the blobs."""
    parent = path.parent
    if parent.name == "snapshots":
        return parent.parent
    return path if parent == parent.parent else parent  # never the whole file system


def _overlap(host: str, other: str) -> bool:
    """Return whether two addresses share a port. An empty address is not known."""
    is_everywhere = not {"", "0.0.0.0", "::"}.isdisjoint((host, other))  # noqa: S104  # only compared
    return host == other or is_everywhere or (is_loopback(host) and is_loopback(other))


class ClusterConfig(StrictModel):
    """One Atelier cluster, as one YAML file."""

    name: ModelId = "atelier"
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig | None = Field(None, description="gRPC; null: off")
    access: AccessConfig = AccessConfig()
    ray: RayConfig = RayConfig()
    logging: LoggingConfig = LoggingConfig()
    tracing: TracingConfig | None = Field(None, description="traces; null: none")
    store: StoreConfig = StoreConfig()
    ingress: IngressConfig = IngressConfig()
    admission: AdmissionConfig = AdmissionConfig()
    controller: ControllerConfig = ControllerConfig()
    jobs: JobsConfig = JobsConfig()
    text_encoder: TextEncoderConfig = TextEncoderConfig()
    worker: WorkerConfig = WorkerConfig()
    model_roots: tuple[Root, ...] | None = Field(
        None,
        description="sources from which models may be registered while the cluster runs: folders, with the targets of "
        "their symlinks, and patterns of hub names such as hf://organization/*; default: the folders of the config's "
        "own local models, and any hub name",
    )
    simulated: SimulatedConfig = Field(
        SimulatedConfig(), description="the simulated accelerators of each replica with `device: sim`"
    )
    models: tuple[ModelConfig, ...] = Field(min_length=1)
    adapters: tuple[AdapterConfig, ...] = ()
    pipelines: tuple[PipelineConfig, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = [*self._reused_ids(), *self._unknown_bases(), *self._absent_devices(), *self.shared_ports()]
        if problems:
            raise located_errors(type(self).__name__, problems)
        return self

    def _reused_ids(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        first: dict[str, str] = {}
        ids = {
            "models": [model.id for model in self.models],
            "adapters": [adapter.id for adapter in self.adapters],
            "pipelines": [pipeline.id for pipeline in self.pipelines],
        }
        for kind, of_kind in ids.items():
            for index, id_ in enumerate(of_kind):
                place = first.setdefault(id_, f"{kind}.{index}")
                if place != f"{kind}.{index}":
                    yield (kind, index, "id"), f"{id_!r} is the id of {place} already"

    def _unknown_bases(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        known = {model.id for model in self.models}
        whole = sorted(model.id for model in self.models if model.like is None)
        for index, model in enumerate(self.models):
            if isinstance(model.like, str) and model.like not in whole:
                yield (
                    ("models", index, "like"),
                    f"{model.like!r} is no model with configs of its own{nearest_name(model.like, whole)}",
                )
        for index, adapter in enumerate(self.adapters):
            for place, base in enumerate(adapter.base):
                if base not in known:
                    yield (
                        ("adapters", index, "base", place),
                        f"unknown model {base!r}{nearest_name(base, sorted(known))}",
                    )

    def _absent_devices(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        for place, device in self.named_devices.items():
            kind, _, index = device.partition(":")
            if kind == "sim" and int(index or 0) >= self.simulated.num_devices:
                yield place, f"no device {device!r}: simulated.num_devices is {self.simulated.num_devices}"

    def shared_ports(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the keys of ports that two parts of this config listen on, with both parts."""
        proxy = self.http.haproxy if self.http.proxy == "haproxy" else None
        asked = [("http.port", self.http.host, self.http.port)]
        if self.grpc:
            asked.append(("grpc.port", self.grpc.host, self.grpc.port))
        if proxy:
            named = ("stats_port", "metrics_port", "fallback_port", "first_replica_port")
            asked += [(f"http.haproxy.{key}", "", port) for key in named if (port := getattr(proxy, key)) is not None]
        taken: list[tuple[str, str, range]] = []
        for key, host, port in asked:
            num_ports = proxy.num_replica_ports if proxy and key.endswith("first_replica_port") else 1
            ports = range(port, port + num_ports)
            for other, its_host, its_ports in taken:
                if max(ports[0], its_ports[0]) <= min(ports[-1], its_ports[-1]) and _overlap(host, its_host):
                    yield tuple(key.split(".")), f"{its_ports[0]} is {other} already"
            taken.append((key, host, ports))

    @property
    def named_devices(self) -> dict[tuple[str | int, ...], str]:
        """Devices of all services, by the keys that name them."""
        found: dict[tuple[str | int, ...], str] = {("text_encoder", "device"): self.text_encoder.device}
        found |= {("worker", "devices", number): name for number, name in enumerate(self.worker.devices)}
        return found if self.worker.devices else {**found, ("worker", "device"): self.worker.device}

    @property
    def entries(self) -> dict[str, ModelConfig | AdapterConfig]:
        """Models, then adapters, by id."""
        models: dict[str, ModelConfig | AdapterConfig] = {model.id: model for model in self.models}
        return models | {adapter.id: adapter for adapter in self.adapters}

    def with_entries(self, entries: Mapping[str, ModelConfig | AdapterConfig]) -> ClusterConfig:
        """Return this config with other models and adapters. Their fit is not checked."""
        models = tuple(entry for entry in entries.values() if isinstance(entry, ModelConfig))
        adapters = tuple(entry for entry in entries.values() if isinstance(entry, AdapterConfig))
        return self.model_copy(update={"models": models, "adapters": adapters})

    @property
    def has_controller(self) -> bool:
        """True where a controller runs: to place models, or to split slots between several ingresses."""
        return self.controller.enabled or self.ingress.num_replicas > 1

    def open_hosts(self, http_host: str | None = None) -> dict[str, str]:
        """Return the keys of addresses that other machines reach without an API key, and why no key is needed.

        `http_host` is HTTP's real address, if Serve was started with another one than this config's.
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
            "--admin --file FILE` and set `access: {keys_file: FILE}`, or pass --insecure "
            "(`access: {insecure: true}`) to accept every caller"
            for key, host in hosts.items()
            if not is_loopback(host)
        }

    @property
    def allowed_roots(self) -> tuple[Path, ...]:
        """`model_roots`, or the folders of configured models: their neighbours may be registered, no other path."""
        if self.model_roots is not None:
            return tuple(root for root in self.model_roots if isinstance(root, Path))
        local = [entry.path for entry in self.entries.values() if isinstance(entry.path, Path)]
        return tuple(dict.fromkeys(_root_of(path) for path in local))

    def may_download(self, url: str) -> bool:
        """Return whether a model of a hub may be registered: with `model_roots`, where one of its patterns fits."""
        if self.model_roots is None or not url.startswith("hf://"):
            return True
        repository = "/".join(url.partition("@")[0].split("/")[:4])
        return any(isinstance(root, str) and fnmatch.fnmatchcase(repository, root) for root in self.model_roots)

    def trusts(self, entry: ModelConfig | AdapterConfig) -> bool:
        """Return True when this config itself names the source: its author may read what it names."""
        configured = self.entries.get(entry.id)
        if not isinstance(configured, ModelConfig) or not isinstance(entry, ModelConfig):
            return configured is not None and configured.path == entry.path
        return (configured.path, configured.like, configured.own_parts) == (entry.path, entry.like, entry.own_parts)

    def defaults_of(self, model: str) -> GenerationDefaults:
        """Return the defaults of requests for `model`; none for an adapter or an unknown id."""
        entry = self.entries.get(model)
        return entry.defaults if isinstance(entry, ModelConfig) else GenerationDefaults()
