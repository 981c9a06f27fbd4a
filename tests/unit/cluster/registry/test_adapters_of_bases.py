"""Adapters that are registered for models that they are not for: refused before anything of them is stored."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kit.tiny.parts import save_controlnet
from kit.waiting import until
from safetensors.torch import save_file
from unit.cluster.registry.model_sources import Sources

from cluster.records.errors import ModelUnservable
from cluster.registry.importing import ImportProcess, ImportSettings
from cluster.registry.registrations import Registrations
from cluster.registry.served_models import ServedModels
from configs.model import AdapterConfig, ModelConfig
from weights.formats.lora import is_kohya
from weights.storage.store import WeightStore

pytestmark = pytest.mark.slow  # an import process, and diffusers in it
DEMO = Path(__file__).parents[4] / "infra" / "demo" / "models"
SDXL = ModelConfig(id="digits-sdxl", path=DEMO / "digits-sdxl")
LAYER = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
WIDTH, TEXT = 80, 64  # of that layer of digits-sdxl
Write = Callable[[int], Path]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return WeightStore(tmp_path_factory.mktemp("adapters") / "store")


@pytest.fixture(scope="module")
def process(store: WeightStore) -> Iterator[ImportProcess]:
    """The registry's own, but for its limits, with digits-sdxl in its store. One for all: each test has other names."""
    settings = ImportSettings(
        store=store.path, options={}, memory_bytes=2**33, check="deployments.engines.servable:why_unservable"
    )
    process = ImportProcess(settings)
    process.import_model(SDXL)
    yield process
    process.close()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a LoRA as kohya's trainer does, of one layer that reads texts of some width."""

    def write(text_width: int) -> Path:
        halves = {"down": torch.zeros(2, text_width), "up": torch.zeros(WIDTH, 2)}
        tensors = {f"{LAYER}.lora_{half}.weight": tensor for half, tensor in halves.items()}
        assert all(map(is_kohya, tensors))
        save_file(tensors, tmp_path / "style.safetensors")
        return tmp_path / "style.safetensors"

    return write


def test_a_lora_of_another_base_leaves_nothing_behind(process: ImportProcess, store: WeightStore, write: Write) -> None:
    names = store.model_names()
    entry = AdapterConfig(id="style", path=write(TEXT // 2), base=("digits-sdxl",))
    said = rf"style\.safetensors: adapter target .*\({TEXT // 2}, {WIDTH}\) do not fit a Linear of \({TEXT}, {WIDTH}\)"
    for _ in range(2):  # what was refused is not taken for known
        with pytest.raises(ModelUnservable, match=said):
            process.import_model(entry)
        assert store.model_names() == names
    write(TEXT)
    assert process.import_model(entry).kind == "adapter"


def test_what_is_stored_for_one_base_is_compared_with_another(process: ImportProcess, write: Write) -> None:
    process.import_model(ModelConfig(id="digits-flux", path=DEMO / "digits-flux"))
    path = write(TEXT)
    found = process.import_model(AdapterConfig(id="stored", path=path, base=("digits-sdxl",)))
    with pytest.raises(ModelUnservable, match="expected a LoRA for 'digits-flux', a FluxPipeline"):
        process.import_model(AdapterConfig(id="stored", path=path, base=("digits-sdxl", "digits-flux")))
    assert process.import_model(AdapterConfig(id="stored", path=path, base=("digits-sdxl",))) == found


async def test_an_adapter_waits_for_its_base_and_is_not_served_from_the_store_for_another(
    process: ImportProcess, store: WeightStore, write: Write, tmp_path: Path
) -> None:
    """Else it could be looked at before there is anything to compare it with."""
    shutil.copytree(DEMO / "digits-sdxl", tmp_path / "sdxl")
    entries = {
        "waiting": AdapterConfig(id="waiting", path=write(TEXT // 2), base=("base",)),
        "base": ModelConfig(id="base", path=tmp_path / "sdxl"),
    }
    models = ServedModels(entries, store, Registrations(tmp_path / "one"), Sources(process.import_model), epoch="e")
    await models.begin_imports()
    found = await models.find_model("waiting")
    assert (found.state, found.kind) == ("unavailable", None)
    assert "expected a LoRA for 'base', a StableDiffusionXLPipeline" in found.error
    assert (await models.find_model("base")).state == "ready"
    assert (await models.register(AdapterConfig(id="waiting", path=write(TEXT), base=("base",)))).state == "ready"


@pytest.fixture(scope="module")
def outline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ControlNet of digits-sdxl, in float32; that model's file is in bfloat16."""
    return save_controlnet(DEMO / "digits-sdxl" / "unet", tmp_path_factory.mktemp("outline"))


def types_of(store: WeightStore, model: str) -> set[str]:
    return {tensor.dtype for part in store.manifest(model).components.values() for tensor in part.tensors.values()}


def test_a_controlnet_has_the_dtype_of_its_models(process: ImportProcess, store: WeightStore, outline: Path) -> None:
    other = SDXL.model_copy(update={"id": "other", "dtype": "float16"})
    process.import_model(other)
    entry = AdapterConfig(id="outline", path=outline, base=("digits-sdxl",))
    process.import_model(entry)
    assert types_of(store, "outline") == {"BF16"}
    assert process.import_model(entry).fingerprint == store.manifest("outline").fingerprint  # found as it is
    process.import_model(entry.model_copy(update={"base": ("other",)}))
    assert types_of(store, "outline") == {"F16"}
    said = r"a ControlNet in float32, and 'digits-sdxl' is in bfloat16: register it without a dtype"
    for refused in ({"dtype": "float32"}, {"base": ("digits-sdxl", "other")}):
        with pytest.raises(ModelUnservable, match=said):
            process.import_model(entry.model_copy(update={"id": "second", **refused}))
    assert "second" not in store.model_names()


async def test_a_controlnet_follows_its_model_to_another_dtype(
    process: ImportProcess, store: WeightStore, outline: Path, tmp_path: Path
) -> None:
    changing = SDXL.model_copy(update={"id": "changing"})
    entries = {"changing": changing, "following": AdapterConfig(id="following", path=outline, base=("changing",))}
    models = ServedModels(entries, store, Registrations(tmp_path / "one"), Sources(process.import_model), epoch="e")
    await models.begin_imports()
    before = await models.find_model("following")
    assert types_of(store, "following") == {"BF16"}
    await models.register(changing.model_copy(update={"dtype": "float32"}))

    async def is_another() -> bool:
        record = await models.find_model("following")
        return record.state == "ready" and record.fingerprint != before.fingerprint

    await until(is_another)
    assert (await models.find_model("following")).error == ""
    assert types_of(store, "following") == {"F32"}


def test_a_controlnet_of_flux_is_none_for_sdxl(process: ImportProcess, store: WeightStore) -> None:
    names = store.model_names()
    entry = AdapterConfig(id="of-flux", path=DEMO / "outline", base=("digits-sdxl",))
    with pytest.raises(
        ModelUnservable, match=r"is a FluxControlNetModel, and 'digits-sdxl' .* takes a ControlNetModel"
    ):
        process.import_model(entry)
    assert store.model_names() == names
