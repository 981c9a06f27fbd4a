"""YAML -> ClusterConfig: what is accepted, and how each mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.cluster import WorkerConfig
from configs.errors import ConfigFileError, Problem
from configs.loading import load_cluster_config
from configs.model import ModelConfig, _parse_bytes

PRESETS = sorted((Path(__file__).parents[3] / "configs/clusters").glob("*.yaml"))
MODELS = "models:\n  - id: m\n    path: ./m\n"


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "cluster.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def problems(folder: Path, text: str | bytes) -> tuple[Problem, ...]:
    file = write(folder, text)
    with pytest.raises(ConfigFileError) as caught:
        load_cluster_config(file)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems)
    assert all(line.startswith(str(file)) for line in lines)
    return caught.value.problems


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads_with_absolute_paths(preset: Path) -> None:
    config = load_cluster_config(preset)
    assert config.models
    assert all(entry.path.is_absolute() for entry in (*config.models, *config.adapters))
    assert config.store.path.is_absolute()


def test_there_is_a_preset() -> None:
    assert "demo" in [preset.stem for preset in PRESETS]


def test_relative_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = "store: {path: ~/store}\nmodels: [{id: m, path: ../m}, {id: n, path: /abs/n}]\n"
    config = load_cluster_config(
        write(folder, text + "adapters: [{id: a, path: a, base: [m]}]\n").relative_to(tmp_path)
    )
    assert [model.path for model in config.models] == [tmp_path / "deep/m", Path("/abs/n")]
    assert config.adapters[0].path == folder / "a"
    assert config.store.path == tmp_path / "home/store"


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [
        (MODELS + "wroker: {}\n", 4, "wroker", ["unknown key", "'worker'"]),
        (MODELS + "worker:\n  num_cpus: 1\n  devise: cpu\n", 6, "worker.devise", ["unknown key", "'device'"]),
        (
            MODELS + "text_encoder:\n  merging: {}\n",
            5,
            "text_encoder.merging",
            ["unknown key; did you mean 'batching'?"],
        ),
        (MODELS + "    defaults: {widht: 8}\n", 4, "models.0.defaults.widht", ["'width'", "height"]),
        (MODELS + "zzzzzz: 1\n", 4, "zzzzzz", ["unknown key", "known: access, adapters"]),
        ("models:\n  - id: m\n", 2, "models.0.path", ["required"]),
        (MODELS + "    like: mm\n", 4, "models.0.like", ["'mm' is no model with configs of its own"]),
        (MODELS + "    like: 7\n", 4, "models.0.like", ["expected the id of a model, or a pipeline's folder"]),
        (MODELS + "    vae: hf://org/vae\n", 4, "models.0.vae", ["expected a path; download it first"]),
        (MODELS + "    component: vae\n    vae: v\n", 2, "models.0", ["vae is for a whole model"]),
        (MODELS + "    defaults: {sigmas: [1], timesteps: [1]}\n", 4, "models.0.defaults", ["give one of them"]),
        (
            MODELS + "admission: {default_priority: 3, priority_levels: 2}\n",
            4,
            "admission",
            ["beyond priority_levels 2"],
        ),
        (MODELS + "    gpu_layers: '('\n", 4, "models.0.gpu_layers", ["'(' is no regular expression"]),
        ("name: x\n", 1, "models", ["required"]),
        ("models: []\n", 1, "models", ["at least 1"]),
        (MODELS + "http: {port: eighty}\n", 4, "http.port", ["integer", "'eighty'"]),
        (MODELS + "http: {port: 70000}\n", 4, "http.port", ["65535", "70000"]),
        (MODELS + "http: 8000\n", 4, "http", ["8000"]),
        (MODELS + "worker: {resident_bytes: x}\n", 4, "worker.resident_bytes", ["'x'", "GiB"]),
        (MODELS + "worker: {resident_bytes: 0}\n", 4, "worker.resident_bytes", ["greater than 0"]),
        (MODELS + "worker: {device: tpu}\n", 4, "worker.device", ["'cpu'", "'tpu'"]),
        ("models:\n  - id: a/b\n    path: m\n", 2, "models.0.id", ["'a/b'"]),
        ("models: {id: m, path: m}\n", 1, "models", ["expected a list, got a mapping"]),
        (MODELS + "  - id: m\n    path: n\n", 4, "models.1.id", ["'m' is the id of models.0 already"]),
        (MODELS + "adapters:\n  - {id: m, path: a, base: [m]}\n", 5, "adapters.0.id", ["the id of models.0 already"]),
        (
            MODELS + "adapters: [{id: a, path: a, base: [q]}]\n",
            4,
            "adapters.0.base.0",
            ["unknown model 'q'", "known: m"],
        ),
        (MODELS + "adapters:\n  - id: a\n    path: a\n    base: m\n", 7, "adapters.0.base", ["got 'm'; write [m]"]),
        (MODELS + "    dtype: fp16\n", 4, "models.0.dtype", ["got 'fp16'; did you mean 'float16'?"]),
        (MODELS + "    dtype: BF16\n", 4, "models.0.dtype", ["did you mean 'bfloat16'?"]),
        (MODELS + "    dtype: flaot32\n", 4, "models.0.dtype", ["did you mean 'float32'?"]),
        (MODELS + "    dtype: 4\n", 4, "models.0.dtype", ["got 4"]),
        (MODELS + "    defaults: {steps: 4}\n", 4, "models.0.defaults.steps", ["did you mean 'num_inference_steps'?"]),
        (MODELS + "loras: []\n", 4, "loras", ["did you mean 'adapters'?"]),
        (MODELS + "http: {port: 1}\nname: x\nhttp: {port: 2}\n", 6, "http", ["given twice"]),
        (MODELS + "http:\n  port: 1\n  port: 2\n", 6, "http.port", ["given twice"]),
        (MODELS + "    id: n\n", 4, "models.0.id", ["given twice"]),
        ("name: [\n", 2, "", ["not valid YAML"]),
        ("name: x\n\tmodels: 1\n", 2, "", ["not valid YAML"]),
        ("name: 2024-99-99\n" + MODELS, None, "", ["not valid YAML"]),
        ("name: " + "[" * 1500, None, "", ["not valid YAML"]),
        ("name: \0\n", None, "", ["not valid YAML"]),
        ("", 1, "", ["expected a mapping"]),
        ("- a\n", 1, "", ["expected a mapping, got list"]),
        (MODELS + "name: &x [*x]\n", 4, "name", ["string"]),
        (b"name: \xff\xfe\n", None, "", ["cannot be read"]),
        (MODELS + "store: {path: ~nosuchuser42/store}\n", None, "", ["home directory"]),
        ("models:\n  - id: m\n    path: gs://bucket/m\n", 3, "models.0.path", ["gs://", "known: s3://"]),
        ("models:\n  - id: m\n    path: https://hf.co/a/b\n", 3, "models.0.path", ["of the hub is hf://a/b"]),
        ("models:\n  - id: m\n    path: s3:///m\n", 3, "models.0.path", ["expected s3://bucket/prefix"]),
        (
            "models:\n  - id: m\n    path: hf://name\n",
            3,
            "models.0.path",
            ["expected hf://organization/name", "HF_TOKEN"],
        ),
        (MODELS + "model_roots: ['hf://org']\n", 4, "model_roots.0", ["expected a folder, or hf://organization/*"]),
        (MODELS + "model_roots: [3]\n", 4, "model_roots.0", ["expected a folder, or hf://organization/*"]),
        ("models:\n  - id: m\n    path: 3\n", 3, "models.0.path", ["a path, an s3:// or an hf:// URL", "3"]),
        (MODELS + "store: {object_storage: {regoin: x}}\n", 4, "store.object_storage.regoin", ["'region'"]),
        (MODELS + "store: {object_storage: {endpoint: host}}\n", 4, "store.object_storage.endpoint", ["'host'"]),
    ],
)
def test_a_mistake_is_told_with_its_place(
    tmp_path: Path, text: str | bytes, line: int | None, key: str, words: list[str]
) -> None:
    (problem,) = problems(tmp_path, text)
    assert (problem.line, problem.key) == (line, key)
    assert all(word in problem.text for word in words), problem.text


@pytest.mark.parametrize("key", ["aws_secret_access_key", "access_key_id", "AWS_SESSION_TOKEN", "Password"])
def test_credentials_in_the_file_are_refused_and_not_repeated(tmp_path: Path, key: str) -> None:
    text = f"store:\n  object_storage:\n    region: us-east-1\n    {key}: hunter2\n"
    (problem,) = problems(tmp_path, MODELS + text)
    assert (problem.line, problem.key) == (5, "store.object_storage")
    assert key in problem.text
    assert "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in problem.text
    assert "hunter2" not in problem.text


@pytest.mark.parametrize(
    "text",
    [
        "models: [{id: m, path: 's3://me:hunter2@bucket/m'}]\n",
        "models: [{id: m, path: 's3://me:hunter2/x@bucket/m'}]\n",
        "models: [{id: m, path: 'https://me:hunter2@host/m'}]\n",
        MODELS + "store: {object_storage: {endpoint: 'https://me:hunter2@host'}}\n",
    ],
)
def test_a_password_in_a_url_is_not_repeated(tmp_path: Path, text: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert "hunter2" not in problem.text
    assert "***" in problem.text


def test_a_url_is_kept_as_it_is(tmp_path: Path) -> None:
    text = (
        "models: [{id: m, path: 's3://my.bucket/team/m'}, {id: n, path: near}]\n"
        "adapters: [{id: a, path: 's3://bucket', base: [m]}]\n"
        "store: {object_storage: {endpoint: 'http://127.0.0.1:9000', region: eu-west-1, anonymous: true}}\n"
    )
    config = load_cluster_config(write(tmp_path, text))
    assert [entry.path for entry in config.entries.values()] == [
        "s3://my.bucket/team/m",
        tmp_path / "near",
        "s3://bucket",
    ]
    assert config.store.object_storage.options() == {
        "endpoint": "http://127.0.0.1:9000",
        "region": "eu-west-1",
        "anonymous": "true",
        "verify_md5": "true",
    }
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_several_mistakes_are_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, "models:\n  - id: m\n    pth: ./m\nhttp: {port: x}\nnmae: y\n")
    assert {(problem.line, problem.key) for problem in found} == {
        (2, "models.0.path"),
        (3, "models.0.pth"),
        (4, "http.port"),
        (5, "nmae"),
    }


def test_mistakes_of_the_whole_are_told_with_those_of_its_parts(tmp_path: Path) -> None:
    text = "nmae: x\nmodels:\n  - {id: m, path: m, dtype: fp16}\n  - {id: m, path: n}\nworker: {device: sim:3}\n"
    found = problems(tmp_path, text + "adapters: [{id: a, path: a, base: [q]}]\n")
    assert [(problem.line, problem.key) for problem in sorted(found, key=lambda problem: problem.line or 0)] == [
        (1, "nmae"),
        (3, "models.0.dtype"),
        (4, "models.1.id"),
        (5, "worker.device"),
        (6, "adapters.0.base.0"),
    ]


def test_entries_that_cannot_be_read_do_not_hide_the_mistakes_of_others(tmp_path: Path) -> None:
    text = (
        "models:\n  - {id: m}\n  - {id: n, path: n, dtype: fp16}\n  - 5\n"
        "adapters:\n  - {id: a, path: a, base: m}\n  - {id: b, path: b, base: [q]}\n"
        "pipelines:\n  - {id: p, stages: []}\n"
    )
    found = problems(tmp_path, text)
    told = sorted((problem.line or 0, problem.key) for problem in found)
    assert [(line, key.split(".")[:2]) for line, key in told if "pipelines" not in key] == [
        (2, ["models", "0"]),
        (3, ["models", "1"]),
        (4, ["models", "2"]),
        (6, ["adapters", "0"]),
        (7, ["adapters", "1"]),
    ]
    assert {line for line, key in told if "pipelines" in key} == {9}


@pytest.mark.parametrize(
    "left", ["<your model>", "${MODELS}/qwen", "{{ .Values.model }}", "/models/CHANGE_ME", "hf://replace-me/Qwen3"]
)
def test_a_placeholder_that_nobody_has_filled_in_is_told_with_its_line_and_what_to_do(
    tmp_path: Path, left: str
) -> None:
    text = f"""models:
  - id: m
    path: '{left}'
store:
  path: '{left}'
access: {{keys_file: '{left}'}}
ingress: {{image_links: {{folder: '{left}'}}}}
"""
    said = f"{left!r} is a placeholder: replace it by its value"
    assert [(one.line, one.key, one.text) for one in problems(tmp_path, text)] == [
        (3, "models.0.path", said),
        (5, "store.path", said),
        (6, "access.keys_file", said),
        (7, "ingress.image_links.folder", said),
    ]


def test_what_looks_like_a_placeholder_in_a_text_is_one_of_its_own(tmp_path: Path) -> None:
    text = "models: [{id: m, path: /m, description: 'ends at <end> or ${x}, change me', defaults: {stop: ['<end>']}}]\n"
    assert load_cluster_config(write(tmp_path, text)).models[0].description.startswith("ends at <end>")


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"nothing\.yaml: no such file"):
        load_cluster_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigFileError, match="cannot be read"):
        load_cluster_config(tmp_path)


def test_repeated_aliases_do_not_blow_up(tmp_path: Path) -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    found = problems(tmp_path, MODELS + "a0: &a0 x\n" + levels)
    assert {problem.key for problem in found} == {f"a{i}" for i in range(12)}


MULTIPLYING = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 5))


@pytest.mark.parametrize(
    "place",
    [
        "logging: {format: *a4}",
        "worker: {device: *a4}",
        "worker: {resident_bytes: *a4}",
        "worker: {vram_reserve_bytes: *a4}",
        "models: [{id: m, path: *a4}]",
        "models: [{id: m, path: /m, gpu_layers: *a4}]",
        "models: [{id: m, path: /m, like: *a4}]",
        "models: [{id: *a4, path: /m}]",
        "adapters: [{id: l, path: /l, base: [*a4]}]",
        "http: {port: *a4}",
        "store: {path: *a4}",
        "models: *a4",
    ],
)
def test_what_aliases_multiply_is_shown_in_a_few_words(tmp_path: Path, place: str) -> None:
    text = MULTIPLYING + ("" if place.startswith("models") else MODELS) + place + "\n"
    found = [one for one in problems(tmp_path, text) if one.key.partition(".")[0] not in MULTIPLYING]
    assert found
    assert sum(len(one.text) for one in found) < 2000


def test_merges_that_multiply_are_refused_before_they_are_written_out(tmp_path: Path) -> None:
    levels = "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 30))
    (found,) = problems(tmp_path, "a0: &a0 {b: 1}\n" + levels + MODELS)
    assert found.text == "a mapping of more than 200000 keys, merged ones (<<) included"
    some = "x: &x {dtype: float16}\nmodels:\n  - {<<: *x, id: m, path: /m}\n  - {<<: [*x, *x], id: n, path: /n}\n"
    assert {one.key for one in problems(tmp_path, some)} == {"x"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2 GiB", 2**31),
        ("2gib", 2**31),
        ("1.5 KiB", 1536),
        ("3 MB", 3_000_000),
        ("7 B", 7),
        ("12", 12),
        (1024, 1024),
        ("9007199254740993 B", 9007199254740993),
    ],
)
def test_sizes(value: Any, expected: int) -> None:
    assert _parse_bytes(value) == expected


@pytest.mark.parametrize(
    "value", ["x", "", "GiB", "-1 GiB", "1.2.3 MiB", ". B", "1 PiB", "²", "² GiB", "9" * 400 + " GiB."]
)
def test_what_is_no_size_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="not a size in bytes"):
        _parse_bytes(value)


def test_models_may_be_registered_from_where_the_configured_ones_lie(tmp_path: Path) -> None:
    hub = "hub/models--a--b/snapshots/0123"
    models = f"models: [{{id: m, path: ./x/m}}, {{id: n, path: {hub}}}, {{id: o, path: /o}}, {{id: p, path: s3://bucket/p}}]\n"
    config = load_cluster_config(write(tmp_path, models + "adapters: [{id: a, path: ./x/a, base: [m]}]\n"))
    assert config.allowed_roots == (tmp_path / "x", tmp_path / "hub/models--a--b", Path("/o"))
    given = load_cluster_config(write(tmp_path, "model_roots: [./shared, /data]\n" + models))
    assert given.allowed_roots == (tmp_path / "shared", Path("/data"))
    assert load_cluster_config(write(tmp_path, "model_roots: []\n" + models)).allowed_roots == ()


def test_models_of_a_hub_may_be_registered_by_patterns(tmp_path: Path) -> None:
    text = "models: [{id: m, path: hf://some-org/Tiny.model@refs/pr/1/unet}]\n"
    config = load_cluster_config(write(tmp_path, text))
    assert config.models[0].path == "hf://some-org/Tiny.model@refs/pr/1/unet"
    assert config.may_download("hf://any/thing")
    given = load_cluster_config(write(tmp_path, "model_roots: [./shared, 'hf://some-org/*']\n" + text))
    assert given.allowed_roots == (tmp_path / "shared",)
    asked = {
        "hf://some-org/x": True,
        "hf://some-org/x@v1/y": True,
        "hf://some-orga/x": False,
        "hf://other/some-org": False,
    }
    assert {url: given.may_download(url) for url in asked} == asked
    assert not load_cluster_config(write(tmp_path, "model_roots: []\n" + text)).may_download("hf://some-org/x")


def test_what_the_config_names_is_trusted_under_its_own_name(tmp_path: Path) -> None:
    config = load_cluster_config(write(tmp_path, MODELS))
    (model,) = config.models
    assert config.trusts(model)
    assert config.trusts(model.model_copy(update={"dtype": "float32"}))
    assert not config.trusts(model.model_copy(update={"path": Path("/etc")}))
    assert not config.trusts(model.model_copy(update={"id": "other"}))


@pytest.mark.parametrize("path", ["a\0b", "a\nb", "\ud800", ""])
def test_what_no_path_can_be_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="expected a path"):
        ModelConfig.model_validate({"id": "m", "path": path})


def test_a_kv_cache_may_take_what_is_spare() -> None:
    given = [WorkerConfig(kv_cache_bytes=size).kv_cache_bytes for size in ("auto", "2 KiB", 7, None)]
    assert given == ["auto", 2048, 7, None]
    for size in ("lots", 0, -1, True, 1.5):
        with pytest.raises(ValueError, match="not a size in bytes"):
            WorkerConfig(kv_cache_bytes=size)
