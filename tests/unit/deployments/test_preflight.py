"""Mistakes of a cluster config that its models and this machine show, before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from kit.programs import Classifier, export_classifier
from safetensors.torch import load_file, save_file
from unit.weights.formats.test_own_draft import small_adder

from cluster.registry.importing import import_checkpoint
from configs.cluster import ClusterConfig
from configs.model import ModelConfig
from deployments.preflight import check_config, computed_by_rank_0
from weights.operations.intake import import_model
from weights.storage.store import WeightStore

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "infra" / "demo" / "models"
FLUX = {"id": "flux", "path": str(DEMO / "digits-flux")}
ADDER = {"id": "adder", "path": str(DEMO / "adder")}
Found = dict[str, str]


@pytest.fixture
def mistakes(tmp_path: Path) -> Callable[..., Found]:
    """Write a config, and return what is wrong with it by key. Every problem must have the line of its key."""

    def found(**config: Any) -> Found:
        text = yaml.safe_dump({"store": {"path": "store"}, **config}, sort_keys=False)
        (tmp_path / "c.yaml").write_text(text)
        _, _, problems = check_config(tmp_path / "c.yaml")
        lines = text.splitlines()
        for problem in problems:
            last = next(part for part in reversed(problem.key.split(".")) if not part.isdigit())
            assert problem.line is not None
            assert problem.key[-1].isdigit() or f"{last}:" in lines[problem.line - 1], problem
        return {problem.key: problem.text for problem in problems}

    return found


def test_the_demo_has_none() -> None:
    config, sources, problems = check_config(ROOT / "configs" / "clusters" / "demo.yaml")
    assert problems == []
    assert config is not None
    assert sources.keys() == config.entries.keys()
    assert sources["texts-head"].record.features.in_features == sources["texts-bert"].record.features.out_features


def test_a_file_like_a_model_without_a_right_path_is_no_mistake_of_its_own(mistakes: Callable[..., Found]) -> None:
    file = {"id": "file", "path": str(DEMO / "bold"), "like": "base"}
    assert mistakes(models=[{"id": "base", "path": "hf://nowhere"}, file]).keys() == {"models.0.path"}


def test_a_config_that_is_wrong_everywhere_is_told_all_at_once(mistakes: Callable[..., Found]) -> None:
    found = mistakes(
        ray={"num_cpus": 4},
        worker={"num_replicas": 4000, "nums": 3},
        models=[FLUX, {"id": "x", "path": "nowhere", "dtype": "fp16"}, {"id": "flux", "path": str(DEMO / "bold")}],
        adapters=[{"id": "bold", "path": str(DEMO / "bold"), "base": "flux"}],
        pipelines=[
            {
                "id": "p",
                "inputs": {"text": "text"},
                "stages": [{"name": "image", "model": "flux", "inputs": {"prompt": "$text", "seed": "$text"}}],
                "outputs": {"image": "$image"},
            }
        ],
    )
    assert found.keys() == {
        "worker.nums",
        "models.1.path",
        "models.1.dtype",
        "models.2.id",
        "adapters.0.base",
        "pipelines.0.stages.0.inputs.seed",
        "ray.num_cpus",
    }
    assert "expected int, but $text is text" in found["pipelines.0.stages.0.inputs.seed"]
    assert "some would wait for ever" in found["ray.num_cpus"]


def test_each_rank_of_a_worker_takes_the_cpus_of_a_replica(mistakes: Callable[..., Found]) -> None:
    worker = {"num_replicas": 2, "num_cpus": 1, "ranks": {"tensor": 2}}
    found = mistakes(ray={"num_cpus": 4}, worker=worker, models=[FLUX])
    assert "replicas take 5 CPUs (ingress 0.5, text_encoder 0.5, worker 4), Ray has 4" in found["ray.num_cpus"]
    assert mistakes(ray={"num_cpus": 5}, worker=worker, models=[FLUX]) == {}


def test_a_language_model_that_ranks_cannot_divide_is_refused_with_its_numbers(mistakes: Callable[..., Found]) -> None:
    found = mistakes(ray={"num_cpus": 9}, worker={"ranks": {"tensor": 3}}, models=[FLUX, ADDER])
    assert found.keys() == {"models.1.path"}
    assert "worker.ranks: 4 query heads cannot be divided among 3 ranks (tensor 3)" in found["models.1.path"]
    assert mistakes(ray={"num_cpus": 9}, worker={"ranks": {"tensor": 2}}, models=[FLUX, ADDER]) == {}


def test_a_draft_is_checked_with_its_model_and_refused_beside_ranks(
    mistakes: Callable[..., Found], tmp_path: Path
) -> None:
    small_adder(tmp_path / "small")
    models = [FLUX, ADDER | {"draft": str(tmp_path / "small")}]
    assert mistakes(models=models) == {}
    found = mistakes(ray={"num_cpus": 9}, worker={"ranks": {"tensor": 2}}, models=models)
    assert found["models.1.draft"] == "worker.ranks: tensor is 2, expected 1 for a model with a draft"
    (tmp_path / "small" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert "a vocabulary of 1 tokens, that of" in mistakes(models=models)["models.1.path"]


@pytest.mark.parametrize(
    ("ranks", "class_name", "parts", "said"),
    [
        ({"sequence": 2}, "LTX2Pipeline", {"transformer": "LTX2VideoTransformer3DModel"}, None),
        ({"cfg": 2}, "LTX2Pipeline", {"transformer": "LTX2VideoTransformer3DModel"}, None),
        ({"cfg": 2}, "AnimateDiffPipeline", {"unet": "UNetMotionModel", "motion_adapter": "MotionAdapter"}, None),
        (
            {"cfg": 2},
            "AnimateDiffPipeline",
            {"unet": "UNet2DConditionModel", "motion_adapter": "MotionAdapter"},
            "m (a AnimateDiffPipeline makes a denoiser of its own)",
        ),
        (
            {"sequence": 2},
            "StableDiffusionXLPipeline",
            {"unet": "UNet2DConditionModel"},
            "m (no plan divides the tokens of a UNet2DConditionModel)",
        ),
        (
            {"cfg": 2},
            "CosmosTextToWorldPipeline",
            {"transformer": "CosmosTransformer3DModel"},
            "m (no plan divides the calls of a CosmosTransformer3DModel)",
        ),
        ({"cfg": 2}, "DDPMPipeline", {}, "m (a DDPMPipeline has no denoiser that ranks know)"),
        ({"tensor": 2}, "DDPMPipeline", {}, None),
    ],
)
def test_models_that_one_rank_computes_alone_are_told_with_the_reason(
    ranks: dict[str, int], class_name: str, parts: dict[str, str], said: str | None
) -> None:
    config = ClusterConfig.model_validate({"store": {"path": "store"}, "models": [FLUX], "worker": {"ranks": ranks}})
    components = [SimpleNamespace(name=name, class_name=kind) for name, kind in parts.items()]
    checkpoint = SimpleNamespace(kind="diffusion", class_name=class_name, components=components)
    sources: Any = {"m": SimpleNamespace(checkpoint=checkpoint)}
    assert list(computed_by_rank_0(config, sources)) == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("black-forest-labs/FLUX.1-dev", "a model of the hub is hf://black-forest-labs/FLUX.1-dev"),
        (str(DEMO / "digits-flx"), f"did you mean '{DEMO / 'digits-flux'}'?"),
        (str(DEMO), "unknown layout; expected model_index.json"),
        (str(DEMO / "bold"), "a LoRA, no model: an adapter, with its models as base"),
        (str(DEMO / "outline"), "a ControlNet, no model"),
    ],
)
def test_a_source_that_is_not_there_or_no_model_says_what_to_do(
    mistakes: Callable[..., Found], path: str, words: str
) -> None:
    assert words in mistakes(models=[{"id": "m", "path": path}])["models.0.path"]


def test_what_no_engine_runs_is_a_mistake(mistakes: Callable[..., Found], tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO / "adder", tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    found = mistakes(models=[{"id": "m", "path": str(folder)}, {"id": "p", "path": "graph.onnx"}])
    assert "there is no tokenizer" in found["models.0.path"]
    (tmp_path / "graph.onnx").write_bytes(b"")
    assert "only the store's owner" in mistakes(models=[{"id": "p", "path": "graph.onnx"}])["models.0.path"]


@pytest.mark.slow
def test_a_program_is_known_once_its_owner_has_brought_it_in(mistakes: Callable[..., Found], tmp_path: Path) -> None:
    path = tmp_path / "classes.pt2"
    torch.export.save(export_classifier(Classifier()), path)
    stage = {"name": "classes", "model": "classes", "inputs": {"features": "$x"}}
    pipeline = {"id": "p", "inputs": {"x": "FP32[-1,3]"}, "stages": [stage], "outputs": {"y": "$classes"}}
    config = {"models": [{"id": "classes", "path": "classes.pt2"}], "pipelines": [pipeline]}
    assert "only the store's owner brings it in: atelier weights" in mistakes(**config)["models.0.path"]
    import_model(WeightStore(tmp_path / "store"), "classes", path, allow_torch=True)
    found = mistakes(**config)
    assert found.keys() == {"pipelines.0.stages.0.inputs.features"}
    assert "expected FP32[-1,16], but $x is FP32[-1,3]" in found["pipelines.0.stages.0.inputs.features"]
    pipeline["inputs"] = {"x": "FP32[-1,16]"}
    assert mistakes(**config) == {}


@pytest.mark.parametrize(
    ("adapter", "base", "key", "words"),
    [
        ("bold", "adder", "base.0", "a LoRA of diffusion pipelines, which cannot change 'adder', of kind 'llm'"),
        ("bold", "sdxl", "base.0", "changes a transformer, which 'sdxl' does not have (it has "),
        ("outline", "adder", "base.0", "a ControlNet, which 'adder', llm, cannot follow"),
        ("outline", "sdxl", "base.0", "and 'sdxl' (StableDiffusionXLPipeline) takes a ControlNetModel"),
        ("adder", "flux", "path", "a model of kind 'llm', no adapter"),
    ],
)
def test_an_adapter_of_another_base_is_a_mistake(
    mistakes: Callable[..., Found], adapter: str, base: str, key: str, words: str
) -> None:
    models = [FLUX, ADDER, {"id": "sdxl", "path": str(DEMO / "digits-sdxl")}]
    found = mistakes(models=models, adapters=[{"id": "a", "path": str(DEMO / adapter), "base": [base]}])
    assert words in found[f"adapters.0.{key}"]
    assert mistakes(models=models, adapters=[{"id": "a", "path": str(DEMO / "bold"), "base": ["flux"]}]) == {}


def test_a_controlnet_of_another_dtype_is_a_mistake_where_it_asks_for_one(mistakes: Callable[..., Found]) -> None:
    net = {"id": "a", "path": str(DEMO / "outline"), "base": ["flux", "half"]}
    models = [{**FLUX, "dtype": "float32"}, {**FLUX, "id": "half", "dtype": "float16"}]
    found = mistakes(models=models, adapters=[{**net, "dtype": "float16"}])
    assert found.keys() == {"adapters.0.base.0"}
    assert "a ControlNet in float16, and 'flux' is in float32" in found["adapters.0.base.0"]
    assert mistakes(models=models, adapters=[{**net, "base": ["half"]}]) == {}


@pytest.mark.slow
def test_adapters_are_compared_with_models_that_the_store_has(mistakes: Callable[..., Found], tmp_path: Path) -> None:
    """A LoRA in the layout of kohya's trainer, whose layers are known beside the model alone."""
    sdxl = {"id": "sdxl", "path": str(DEMO / "digits-sdxl"), "dtype": "float32"}
    layer = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
    tensors = {f"{layer}.lora_down.weight": torch.zeros(2, 32), f"{layer}.lora_up.weight": torch.zeros(80, 2)}
    save_file(tensors, tmp_path / "style.safetensors")
    adapters = [{"id": "style", "path": "style.safetensors", "base": ["sdxl"]}]
    for _ in range(2):  # by its source, and by what the store has of it
        said = mistakes(models=[sdxl], adapters=adapters)["adapters.0.base.0"]
        assert "(32, 80) do not fit a Linear of (64, 80); expected a LoRA for 'sdxl', a StableDiffusionXL" in said
        import_checkpoint(WeightStore(tmp_path / "store"), ModelConfig.model_validate(sdxl))
    (tmp_path / "style.safetensors").unlink()
    tensors[f"{layer}.lora_down.weight"] = torch.zeros(2, 64)
    save_file(tensors, tmp_path / "style.safetensors")
    assert mistakes(models=[sdxl], adapters=adapters) == {}


def test_a_lora_of_layers_that_its_base_does_not_have_is_a_mistake(
    mistakes: Callable[..., Found], tmp_path: Path
) -> None:
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2}))
    name = "base_model.model.model.layers.77.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, 8), f"{name}.lora_B.weight": torch.zeros(8, 2)}
    save_file(tensors, lora / "adapter_model.safetensors")
    found = mistakes(models=[ADDER], adapters=[{"id": "a", "path": str(lora), "base": ["adder"]}])
    assert "changes 'model.layers.77.self_attn.q_proj', which 'adder' does not have" in found["adapters.0.base.0"]


def test_a_model_that_its_budget_never_holds_is_a_mistake_in_the_configs_words(
    mistakes: Callable[..., Found],
) -> None:
    nbytes = sum(tensor.nbytes for tensor in load_file(DEMO / "adder" / "model.safetensors").values())
    on_cpu = mistakes(models=[ADDER], store={"path": "store", "node_budget_bytes": nbytes - 1})
    assert on_cpu["models.0"].startswith("store.node_budget_bytes is ")
    assert "model of 'adder' need " in on_cpu["models.0"]
    device = {"device": "sim", "device_budget_bytes": 1000}
    on_device = mistakes(models=[{**ADDER, "dtype": "float32"}], worker=device)
    assert on_device["models.0"] == (
        "'adder': lm_head.weight, model.norm.weight need 52.5 KiB on the device even where all layers are "
        "elsewhere; its budget is 1000 bytes (worker.device_budget_bytes)"
    )
    assert "vae of 'flux' need" in mistakes(models=[FLUX], worker=device)["models.0"]  # the denoiser comes in blocks
    assert mistakes(models=[ADDER], store={"path": "store", "node_budget_bytes": 2**30}) == {}


@pytest.mark.parametrize(
    ("model", "gpu_layers", "worker", "words"),
    [
        (ADDER, 5, {"device": "sim"}, "gpu_layers is 5, but 'adder' has 4 layers, layers.0 to layers.3"),
        (ADDER, "blk.*", {"device": "sim"}, "gpu_layers 'blk.*' is the name of no layer: 'adder' has 4 layers"),
        (ADDER, 2, {"device": "sim", "device_budget_bytes": 600_000}, "layers 2, 3 and lm_head.weight, model.norm.wei"),
        (
            ADDER,
            2,
            {"devices": ["sim:0", "sim:1"]},
            "gpu_layers 2 leaves layers of 'adder' to the host, and cpu is not",
        ),
        (ADDER, 2, {}, "worker.device is cpu: all layers are computed on the host"),
        (FLUX, 2, {"device": "sim"}, "only the layers of our own decoders can be split between device and host"),
        (ADDER, "(", {}, "'(' is no regular expression: missing ), unterminated subpattern at position 0"),
        (ADDER, -1, {}, "not a choice of layers: -1 (expected auto, a number of layers such as 20, or a regular"),
        (ADDER, True, {}, "not a choice of layers: True"),
        (ADDER, "3", {}, "not a choice of layers: '3'"),
    ],
)
def test_layers_that_are_not_there_or_have_no_room_are_mistakes(
    mistakes: Callable[..., Found], model: dict[str, Any], gpu_layers: Any, worker: dict[str, Any], words: str
) -> None:
    model = {**model, "gpu_layers": gpu_layers, "dtype": "float32"}
    found = mistakes(models=[model], worker=worker, simulated={"num_devices": 2})
    assert words in found["models.0.gpu_layers"]


def test_a_language_model_larger_than_its_device_is_no_mistake(mistakes: Callable[..., Found]) -> None:
    device = {"device": "sim", "device_budget_bytes": 1_300_000}
    for gpu_layers in ("auto", 2, 0, r"layers\.[01]"):
        model = {**ADDER, "gpu_layers": gpu_layers, "dtype": "float32"}
        assert mistakes(models=[model], worker=device) == {}


def test_a_language_model_is_counted_on_all_devices_of_a_replica(mistakes: Callable[..., Found]) -> None:
    nbytes = sum(4 * tensor.numel() for tensor in load_file(DEMO / "adder" / "model.safetensors").values())
    model, two = {**ADDER, "dtype": "float32"}, {"num_devices": 2}

    def found(share: float, *devices: str) -> Found:
        worker = {"devices": list(devices), "device_budget_bytes": int(share * nbytes)}
        return mistakes(models=[model], worker=worker, simulated=two)

    assert found(0.9, "sim:0", "sim:1") == found(0.4, "sim:0", "sim:1", "cpu") == {}
    assert "on each of 2 devices (worker.device_budget_bytes)" in found(0.4, "sim:0", "sim:1")["models.0"]


def test_more_memory_than_the_machine_has_is_a_mistake(mistakes: Callable[..., Found]) -> None:
    total = psutil.virtual_memory().total
    found = mistakes(models=[ADDER], ray={"object_store_bytes": 2 * total}, worker={"resident_bytes": 2 * total})
    assert found.keys() == {"ray.object_store_bytes", "worker.resident_bytes"}
    assert "GiB of memory" in found["worker.resident_bytes"]
    assert mistakes(models=[ADDER], ray={"object_store_bytes": 2 * total, "address": "auto"}) == {}


def test_a_device_that_is_not_there_is_a_mistake(mistakes: Callable[..., Found]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert mistakes(models=[ADDER], worker={"device": "cuda"}).keys() == {"worker.device"}


def test_what_the_store_has_needs_no_source_and_is_not_read_again(
    mistakes: Callable[..., Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(DEMO / "texts-bert", tmp_path / "bert")
    entry = ModelConfig(id="bert", path=folder, dtype="float32")
    import_checkpoint(WeightStore(tmp_path / "store"), entry)
    wrong_edge = {
        "id": "p",
        "inputs": {"text": "text"},
        "stages": [{"name": "v", "model": "bert", "inputs": {"txt": "$text"}}],
        "outputs": {"v": "$v"},
    }
    with monkeypatch.context() as patch:
        patch.setattr("deployments.preflight.read_checkpoint", None)
        found = mistakes(
            models=[entry.model_dump(mode="json", include={"id", "path", "dtype"})], pipelines=[wrong_edge]
        )
    assert "bert has no parameter 'txt'; did you mean 'text'?" in found["pipelines.0.stages.0.inputs.txt"]
    shutil.rmtree(folder)
    assert mistakes(models=[{"id": "bert", "path": str(folder)}]) == {}
    assert "no such folder" in mistakes(models=[{"id": "other", "path": str(folder)}])["models.0.path"]


def test_what_lies_in_object_storage_is_not_looked_at(mistakes: Callable[..., Found]) -> None:
    pipeline = {
        "id": "p",
        "inputs": {"text": "text"},
        "stages": [{"name": "v", "model": "far", "inputs": {"anything": "$text"}}],
        "outputs": {"v": "$v"},
    }
    assert mistakes(models=[{"id": "far", "path": "s3://bucket/far"}], pipelines=[pipeline]) == {}


def test_a_lora_of_another_pipelines_layers_is_a_mistake(mistakes: Callable[..., Found], tmp_path: Path) -> None:
    for name, words in (
        (
            "transformer_blocks.77.attn.to_q",
            "changes transformer.transformer_blocks.77.attn.to_q, which 'flux' does not",
        ),
        (
            "transformer_blocks.0.attn.to_q",
            "transformer.transformer_blocks.0.attn.to_q of shape [8, 3], which in 'flux' is",
        ),
    ):
        tensors = {"lora_A.weight": torch.zeros(2, 3), "lora_B.weight": torch.zeros(8, 2)}
        file = tmp_path / "lora.safetensors"
        save_file({f"transformer.{name}.{half}": tensor for half, tensor in tensors.items()}, file)
        found = mistakes(models=[FLUX], adapters=[{"id": "a", "path": str(file), "base": ["flux"]}])
        assert words in found["adapters.0.base.0"]
