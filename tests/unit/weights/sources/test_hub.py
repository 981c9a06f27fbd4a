"""Models of a hub: what is downloaded, how it is checked, and what is said when it cannot be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from unit.weights.sources.hub_server import Fault, Files, Hub, serving

from weights.loading.loader import load_from_store
from weights.operations.intake import import_model
from weights.records.errors import FormatError, StoreError
from weights.sources import object_storage
from weights.sources.hub import MAX_WAIT_S, HubName, HubRepository, _served_files
from weights.sources.mirrors import mirror_folder, remove_mirror
from weights.sources.object_storage import MirrorReport, mirror
from weights.storage.store import WeightStore

NAME = "some-org/Tiny.model"
TENSORS = {"a": torch.arange(600, dtype=torch.float32), "b": torch.ones(3)}
FILES: Files = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": save(TENSORS),
    "model.fp16.safetensors": save(TENSORS),
    "pytorch_model.bin": b"pickled",
    "onnx/model.onnx": b"x" * 2000,
    "onnx/config.json": b"{}",
    "README.md": b"read me",
    ".gitattributes": b"",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({NAME: {"main": dict(FILES), "refs/pr/3": {**FILES, "config.json": b"{}"}}})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield served


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that were asked for, which take no time."""
    waited: list[float] = []
    monkeypatch.setattr(object_storage, "HubRepository", lambda url: HubRepository(url, waited.append))
    return waited


def brought(url: str, target: Path, part_bytes: int = 512) -> MirrorReport:
    return mirror(url, target, part_bytes=part_bytes)


def refused(url: str, target: Path) -> str:
    with pytest.raises(StoreError) as caught:
        brought(url, target)
    message = str(caught.value)
    assert "\n" not in message
    return message


def names_below(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_what_a_model_is_made_of_is_brought_in_parts(hub: Hub, tmp_path: Path) -> None:
    report = brought(f"hf://{NAME}", tmp_path / "copy")
    assert names_below(report.path) == {"config.json", "tokenizer.json", "model.safetensors", ".mirror", ".mirror.lock"}
    assert (report.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert len([path for path, _ in hub.ranges if path == "model.safetensors"]) == -(-len(save(TENSORS)) // 512)
    hub.ranges.clear()
    assert brought(f"hf://{NAME}", tmp_path / "copy").fetched_bytes == 0
    assert hub.ranges == []


def test_a_model_of_a_hub_enters_the_store(hub: Hub, tmp_path: Path) -> None:
    manifest = import_model(WeightStore(tmp_path / "store"), "tiny", f"hf://{NAME}/model.safetensors")
    (loaded,) = load_from_store(tmp_path / "store", manifest.model).values()
    assert set(loaded) == set(TENSORS)
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_a_new_commit_brings_only_what_has_changed(hub: Hub, tmp_path: Path) -> None:
    before = brought(f"hf://{NAME}", tmp_path / "copy")
    hub.repositories[NAME]["main"] |= {"tokenizer.json": b'{"new": 1}'}
    hub.ranges.clear()
    after = brought(f"hf://{NAME}", tmp_path / "copy")
    assert [path for path, _ in hub.ranges] == ["tokenizer.json"]
    assert (after.path / "tokenizer.json").read_bytes() == b'{"new": 1}'
    changed = {name for name in after.etags if after.etags[name] != before.etags[name]}
    assert changed == {"tokenizer.json"}


def test_a_revision_and_a_file_are_named_by_the_url(hub: Hub, tmp_path: Path) -> None:
    report = brought(f"hf://{NAME}@refs/pr/3/config.json", tmp_path / "copy")
    assert report.path.read_bytes() == b"{}"
    assert report.num_files == 1


def test_the_token_goes_to_the_hub_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    assert "no such model" in refused(f"hf://{NAME}", tmp_path / "copy")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert brought(f"hf://{NAME}", tmp_path / "copy").num_files == 3
    assert hub.leaked == []
    assert any(path.startswith(f"/{NAME}") for path in hub.paths)


def test_what_the_hub_refuses_is_one_clear_sentence(hub: Hub, tmp_path: Path) -> None:
    assert refused("hf://no/such", tmp_path) == (
        f"hf://no/such: no such model at {hub.url}, or a private one that HF_TOKEN gives no access to"
    )
    assert "has no revision 'v9'" in refused(f"hf://{NAME}@v9", tmp_path)
    assert f"no such file or folder in {NAME}" in refused(f"hf://{NAME}/unet", tmp_path)
    hub.gated.add(NAME)
    text = refused(f"hf://{NAME}", tmp_path)
    assert f"accept the conditions at {hub.url}/{NAME}" in text
    assert "HF_TOKEN" in text
    assert names_below(tmp_path) <= {".mirror.lock", ".mirror"}


def test_a_hub_that_asks_to_come_back_is_waited_for(hub: Hub, tmp_path: Path, waits: list[float]) -> None:
    answers: Iterator[Fault] = iter([429, 503, None, 429])
    hub.headers = {"Retry-After": "7"}
    hub.on_request = lambda path: next(answers, None)
    assert brought(f"hf://{NAME}", tmp_path / "copy").num_files == 3
    assert waits == [7.0] * 3


def test_a_hub_that_asks_for_more_time_than_anybody_has_is_told(hub: Hub, tmp_path: Path, waits: list[float]) -> None:
    hub.headers = {"Retry-After": str(int(MAX_WAIT_S) + 1)}
    hub.on_request = lambda path: 429
    assert "asks to come back in 61 s" in refused(f"hf://{NAME}", tmp_path)
    hub.headers = {}
    assert "the hub answered 429" in refused(f"hf://{NAME}", tmp_path)
    assert len(waits) == 5
    hub.on_request = lambda path: 500
    assert "the hub answered 500" in refused(f"hf://{NAME}", tmp_path)


def test_a_connection_that_is_cut_goes_on_where_it_was(hub: Hub, tmp_path: Path, waits: list[float]) -> None:
    faults: Iterator[Fault] = iter(["cut"] * 2)
    hub.on_request = lambda path: next(faults, None) if "/resolve/" in path and "model.safetensors" in path else None
    report = brought(f"hf://{NAME}", tmp_path / "copy", part_bytes=10_000)
    assert load_file(report.path / "model.safetensors").keys() == TENSORS.keys()
    starts = [range_ for path, range_ in hub.ranges if path == "model.safetensors"]
    assert starts[0].startswith("bytes=0-")
    assert not starts[-1].startswith("bytes=0-")
    hub.on_request = lambda path: "cut" if "/resolve/" in path else None
    assert "the connection ended 6 times within" in refused(f"hf://{NAME}", tmp_path / "other")


def test_damage_is_found_by_either_hash(hub: Hub, tmp_path: Path) -> None:
    for name, kind in (("tokenizer.json", "git hash"), ("tokenizer.model", "SHA-256")):
        hub.repositories[NAME]["main"]["tokenizer.model"] = b"m" * 1500
        hub.on_request = lambda path, name=name: "flip" if path.endswith(name) else None
        text = refused(f"hf://{NAME}", tmp_path / name)
        assert f"{name}: the {kind} of what arrived is" in text
        assert not (tmp_path / name / name).exists()


def test_a_server_without_ranges_is_told(hub: Hub, tmp_path: Path) -> None:
    hub.on_request = lambda path: "whole"
    assert "gave all of model.safetensors where a part was asked for" in refused(f"hf://{NAME}", tmp_path)


def test_a_truncated_header_is_refused_before_the_tensors(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME]["main"]["model.safetensors"] = b"\xff" * 5000
    with pytest.raises(FormatError, match=f"hf://{NAME}/model.safetensors"):
        brought(f"hf://{NAME}", tmp_path)
    assert {path for path, _ in hub.ranges} == {"model.safetensors"}
    assert len(hub.ranges) == 1


def test_a_hub_out_of_reach_is_one_line(hub: Hub, tmp_path: Path, waits: list[float], monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1: " in refused(f"hf://{NAME}", tmp_path)
    assert len(waits) == 5


@pytest.mark.parametrize(
    "url",
    ["hf://", "hf://name", "hf://a/../b", "hf://a/b/../c", "hf://a/b@", "hf://a/b?x", "hf://u:p@a/b", "hf://a/.."],
)
def test_what_names_no_model_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected hf://organization/name"):
        mirror(url, tmp_path)


def test_each_url_has_a_copy_of_its_own() -> None:
    urls = ["hf://a/b", "hf://a/b@v1", "hf://a/b/c", "hf://a/c", "s3://some/b", "hf://a/b@v1/c"]
    folders = {mirror_folder(Path("s"), url) for url in urls}
    assert len(folders) == len(urls)
    assert all(len(folder.parts) == 3 for folder in folders)
    assert HubName.of("hf://a/b@main") == HubName.of("hf://a/b/")


@pytest.mark.parametrize("scheme", ["s3://bucket/", "hf://a/"])
def test_long_paths_have_copies_of_their_own_that_a_file_system_takes(scheme: str, tmp_path: Path) -> None:
    long = "/".join(["a folder with ümlauts"] * 20)
    urls = [
        f"{scheme}{name}" for name in ("x/" + long, "x/" + long + "/y", "y/" + long, f"b/{'x' * 200}", f"b/{'x' * 201}")
    ]
    folders = {mirror_folder(tmp_path, url) for url in urls}
    assert len(folders) == len(urls)
    for folder in folders:
        folder.mkdir(parents=True)
        assert len(folder.parts) == len(tmp_path.parts) + 2
    assert mirror_folder(tmp_path, "s3://bucket/a/b").name == "a%2Fb"  # as it was


@pytest.mark.parametrize("name", [".mirror", ".mirror.lock", ".mirror.new"])
def test_a_file_of_the_name_of_the_copys_own_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.repositories[NAME]["main"][name] = b"{}"
    assert f"{name!r} has the name of a file that its copy keeps beside it" in refused(f"hf://{NAME}/{name}", tmp_path)
    assert brought(f"hf://{NAME}", tmp_path).num_files  # beside others it is none of the checkpoint


def test_a_copy_is_removed_as_others_are(hub: Hub, tmp_path: Path) -> None:
    folder = mirror_folder(tmp_path, f"hf://{NAME}")
    brought(f"hf://{NAME}", folder)
    assert remove_mirror(folder)
    assert not folder.parent.exists()


PIPELINE = ["model_index.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json", "README.md", "a.png"]
PIPELINE += [f"{part}/config.json" for part in ("unet", "vae")]
UNET = "unet/diffusion_pytorch_model"


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ([f"{UNET}.safetensors", f"{UNET}.fp16.safetensors", f"{UNET}.non_ema.safetensors"], [f"{UNET}.safetensors"]),
        ([f"{UNET}.fp16.safetensors", f"{UNET}.bin"], [f"{UNET}.fp16.safetensors"]),
        (["sd.safetensors", "sd.ckpt", f"{UNET}.safetensors"], [f"{UNET}.safetensors"]),
        (
            [
                f"{UNET}-00001-of-00002.safetensors",
                f"{UNET}-00002-of-00002.safetensors",
                f"{UNET}.safetensors.index.json",
                f"{UNET}.fp16-00001-of-00001.safetensors",
                f"{UNET}.safetensors.index.fp16.json",
            ],
            [
                f"{UNET}-00001-of-00002.safetensors",
                f"{UNET}-00002-of-00002.safetensors",
                f"{UNET}.safetensors.index.json",
            ],
        ),
        (["vae/diffusion_flax_model.msgpack", "vae/model.onnx", f"{UNET}.safetensors"], [f"{UNET}.safetensors"]),
    ],
)
def test_of_a_pipeline_its_components(more: list[str], taken: list[str]) -> None:
    names = [*PIPELINE, *more]
    random.shuffle(names)
    configs = [name for name in PIPELINE if name.endswith(".json")]
    assert _served_files(names) == sorted([*configs, *taken])


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["model.safetensors", "consolidated.safetensors", "config.json"], ["config.json", "model.safetensors"]),
        (["model.safetensors", "original/model.safetensors", "config.json"], ["config.json", "model.safetensors"]),
        (
            ["model.safetensors", "2_Dense/model.safetensors", "2_Dense/config.json", "1_Pooling/config.json"],
            ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "model.safetensors"],
        ),
        (["a.Q4_K-00001-of-00002.gguf", "a.Q4_K-00002-of-00002.gguf"], None),
        (["model.safetensors", "a.gguf", "b.gguf"], ["model.safetensors"]),
        (["my-lora.safetensors", "README.md"], ["my-lora.safetensors"]),
        (["model.onnx", "model.onnx_data", "config.json"], None),
    ],
)
def test_of_other_models_what_lies_at_the_root(names: list[str], taken: list[str] | None) -> None:
    assert _served_files(names) == sorted(taken or names)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a.Q4.gguf", "a.Q8.gguf"], r"2 GGUF models; add the name of one to the URL \(a.Q4.gguf, a.Q8.gguf\)"),
        (["a.safetensors", "b.safetensors"], r"2 safetensors files; add the name of one to the URL \(a.saf"),
        (["pytorch_model.bin", "config.json"], r"no weights: only pickles \(pytorch_model.bin\), which"),
        (["README.md"], "no weights: none that is known; expected .safetensors"),
    ],
)
def test_what_leaves_a_choice_is_told_with_the_names(names: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _served_files(names)
