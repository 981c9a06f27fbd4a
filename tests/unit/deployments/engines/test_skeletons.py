"""Kept modules: bound to other weights they compute what freshly built ones do, bit for bit."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import nn

from deployments.engines.building.build import build_module
from deployments.engines.building.skeletons import SkeletonPool
from weights.records.manifest import Component, TensorRef

DTYPES = {torch.float32: "F32", torch.int64: "I64"}


@dataclass
class Kind:
    """A class of a library, tiny, with a forward that every weight matters to."""

    library: str
    make: Callable[[], nn.Module]
    run: Callable[[Any], torch.Tensor]


def _flux() -> nn.Module:
    sizes = {"joint_attention_dim": 8, "pooled_projection_dim": 8, "in_channels": 4, "axes_dims_rope": (2, 2, 4)}
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_single_layers": 1}
    return diffusers.FluxTransformer2DModel(**sizes, **heads)


def _run_flux(module: Any) -> torch.Tensor:
    ids = torch.zeros(4, 3)
    image, text, pooled = (torch.linspace(-1, 1, n).view(s) for n, s in ((16, (1, 4, 4)), (32, (1, 4, 8)), (8, (1, 8))))
    return module(image, text, pooled, torch.ones(1), ids, ids, return_dict=False)[0]


def _unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        layers_per_block=1,
    )


KINDS = {
    "flux": Kind("diffusers", _flux, _run_flux),
    "unet": Kind(
        "diffusers",
        _unet,
        lambda m: m(torch.linspace(-1, 1, 256).view(1, 4, 8, 8), 3, torch.ones(1, 2, 8), return_dict=False)[0],
    ),
    "vae": Kind(
        "diffusers",
        lambda: diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1),
        lambda m: m(torch.linspace(-1, 1, 192).view(1, 3, 8, 8), return_dict=False)[0],
    ),
    "clip": Kind(
        "transformers",
        lambda: transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
            )
        ),
        lambda m: m(torch.tensor([[1, 5, 7, 2]]))[0],
    ),
    "t5": Kind(
        "transformers",
        lambda: transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
        ),
        lambda m: m(torch.tensor([[1, 5, 7, 2]]))[0],
    ),
    "bert": Kind(
        "transformers",
        lambda: transformers.BertModel(
            transformers.BertConfig(
                vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
            )
        ),
        lambda m: m(torch.tensor([[1, 5, 7, 2]]))[0],
    ),
}


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(tensor) * 0.3 for name, tensor in module.state_dict().items()}


def component_of(name: str, kind: Kind, folder: Path, module: nn.Module) -> Component:
    class_name = type(module).__name__
    config_hash = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    refs = {
        tensor_name: TensorRef(
            extent="e",
            offset=0,
            nbytes=tensor.nbytes,
            dtype=DTYPES[tensor.dtype],
            shape=tuple(tensor.shape),
            sha256=hashlib.sha256(tensor_name.encode()).hexdigest(),
        )
        for tensor_name, tensor in module.state_dict().items()
    }
    return Component(
        name=name, library=kind.library, class_name=class_name, folder=".", tensors=refs, config_hash=config_hash
    )


class Case:
    def __init__(self, name: str, folder: Path) -> None:
        self.kind, self.folder = KINDS[name], folder
        module = self.kind.make()
        module.config.save_pretrained(folder) if self.kind.library == "transformers" else module.save_config(folder)
        self.component = component_of(name, self.kind, folder, module)
        self.first, self.second = weights(module), weights(module)
        self.pool = SkeletonPool()

    def build(self, tensors: dict[str, torch.Tensor]) -> nn.Module:
        component = self.component
        key = component.structure_key
        return self.pool.build_module(key, component.library, component.class_name, self.folder, tensors)

    def check(self, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        fresh = build_module(self.component.library, self.component.class_name, self.folder, tensors)
        with torch.no_grad():
            output = self.kind.run(module)
            assert output.isfinite().all()
            assert torch.equal(output, self.kind.run(fresh))
        assert {p.data_ptr() for p in module.parameters()} <= {t.data_ptr() for t in tensors.values()}


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


@pytest.fixture
def clip(tmp_path: Path) -> Case:
    return Case("clip", tmp_path)


def test_a_retired_module_is_bound_to_the_weights_of_another(case: Case) -> None:
    module = case.build(case.first)
    case.check(module, case.first)
    case.pool.retire_module(module)
    assert not any(parameter.numel() for parameter in module.parameters())
    again = case.build(case.second)
    assert again is module
    case.check(again, case.second)
    stats = case.pool.skeleton_stats()
    assert (stats.num_built, stats.num_rebound, stats.num_free) == (1, 1, 0)


@pytest.mark.drawn(3)
def test_two_of_one_structure_that_are_there_together_are_two_modules(case: Case) -> None:
    first, second = case.build(case.first), case.build(case.second)
    third = case.build(case.first)
    assert len({id(first), id(second), id(third)}) == 3
    for module, tensors in ((first, case.first), (second, case.second), (third, case.first)):
        case.check(module, tensors)
    assert (case.pool.skeleton_stats().num_built, case.pool.skeleton_stats().num_copied) == (2, 1)


def test_what_was_prepared_is_not_built_any_more(case: Case) -> None:
    case.pool.prepare_skeleton(case.component, case.folder)
    (case.folder / "config.json").write_text("{}")  # not looked at again
    module = case.build(case.first)
    second = case.build(case.first)
    stats = case.pool.skeleton_stats()
    assert (stats.num_built, stats.num_rebound, stats.num_copied) == (0, 1, 1)
    case.folder.joinpath("config.json").unlink()
    for made in (module, second):
        assert not any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))


def test_the_structure_is_told_by_class_config_and_shapes(clip: Case) -> None:
    component = clip.component
    (name, ref), *_ = component.tensors.items()
    wider = {**component.tensors, name: ref.model_copy(update={"shape": (*ref.shape, 1)})}
    others = [
        component.model_copy(update={"class_name": "CLIPTextModelWithProjection"}),
        component.model_copy(update={"config_hash": "0" * 64}),
        component.model_copy(update={"tensors": wider}),
        component.model_copy(update={"tensors": {n: r for n, r in component.tensors.items() if n != name}}),
    ]
    assert len({some.structure_key for some in (component, *others)}) == 5
    renamed = component.model_copy(update={"name": "other", "folder": "other"})
    assert renamed.structure_key == component.structure_key
    new_weights = {n: r.model_copy(update={"sha256": "1" * 64}) for n, r in component.tensors.items()}
    assert component.model_copy(update={"tensors": new_weights}).structure_key == component.structure_key


def test_without_a_config_nothing_is_kept(clip: Case) -> None:
    assert clip.component.model_copy(update={"config_hash": ""}).structure_key == ""
    module = clip.pool.build_module("", "transformers", "CLIPTextModel", clip.folder, clip.first)
    clip.pool.retire_module(module)
    assert not any(parameter.numel() for parameter in module.parameters())
    assert clip.pool.skeleton_stats().num_free == 0


def test_the_number_of_kept_modules_is_bounded(clip: Case) -> None:
    clip.pool = SkeletonPool(max_free=2, max_templates=1)
    modules = [clip.build(clip.first) for _ in range(4)]
    for module in modules:
        clip.pool.retire_module(module)
        clip.pool.retire_module(module)  # once more is nothing
    assert (clip.pool.skeleton_stats().num_free, clip.pool.skeleton_stats().num_templates) == (2, 1)
    assert {id(clip.build(clip.first)) for _ in range(2)} == {id(module) for module in modules[2:]}


def test_a_module_that_nobody_lent_is_left_alone(clip: Case) -> None:
    module = build_module("transformers", "CLIPTextModel", clip.folder, clip.first)
    clip.pool.retire_module(module)
    clip.check(module, clip.first)


def test_a_copy_takes_old_names_as_the_built_one_does(clip: Case) -> None:
    """CLIP text encoders saved by transformers 4 have a prefix."""
    old = {f"text_model.{name}": tensor for name, tensor in clip.first.items()}
    key = "old"
    for _ in range(3):
        module = clip.pool.build_module(key, "transformers", "CLIPTextModel", clip.folder, old)
        with torch.no_grad():
            fresh = build_module("transformers", "CLIPTextModel", clip.folder, clip.first)
            assert torch.equal(clip.kind.run(module), clip.kind.run(fresh))
    assert json.loads((clip.folder / "config.json").read_text())["model_type"].startswith("clip")


@pytest.mark.long
def test_two_classes_may_be_imported_by_two_threads_at_once() -> None:
    """In a fresh process: the libraries import lazily, and in circles."""
    script = """
import sys, threading
from deployments.engines.building.build import import_class
errors = []
def load(library, name, start):
    start.wait()
    try:
        import_class(library, name)
    except BaseException as error:
        errors.append(error)
classes = [("diffusers", "FluxTransformer2DModel"), ("diffusers", "AutoencoderKL"), ("transformers", "T5EncoderModel")]
start = threading.Barrier(len(classes))
threads = [threading.Thread(target=load, args=(*one, start)) for one in classes]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit("".join(map(repr, errors)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
