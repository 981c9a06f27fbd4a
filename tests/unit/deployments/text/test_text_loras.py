"""LoRAs of text encoders: the encodings are those of stock diffusers with PEFT, and are cached under the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.engines.records.protocol import EngineError
from deployments.text.cache import EncodingCache
from deployments.text.encode import CachedEncoders, EncodeJob, encode_batch, encode_batch_or_raise
from weights.operations.adapters import LoraAdapter, load_adapter

pytestmark = pytest.mark.slow  # imports diffusers

MODULES = ("layers.0.self_attn.q_proj", "layers.1.self_attn.out_proj", "layers.0.mlp.fc1", "layers.1.mlp.fc2")
PROMPT, NEGATIVE = "a handwritten seven", "eight"


def service() -> tuple[CachedEncoders, list[list[EncodeJob]]]:
    made: list[list[EncodeJob]] = []

    async def run(jobs: Any, priority: int, timeout_s: float | None) -> Any:
        made.append(list(jobs))
        return encode_batch_or_raise(jobs)

    return CachedEncoders(EncodingCache(10**7), run), made


def random_pairs(module: Any, seed: int, prefix: str = "encoder.", rank: int = 2) -> dict[str, torch.Tensor]:
    """Matrices by `<path>.lora_A.weight` and `.lora_B.weight`; `prefix` is that of the encoder's own names."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    start = "text_model." if hasattr(module, "text_model") else ""
    for name in MODULES:
        weight = module.get_submodule(f"{start}encoder.{name}").weight
        path = f"{start}{prefix}{name}"
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator)
        tensors[f"{path}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * 0.4
    return tensors


def save_diffusers(demo: Any, folder: Path, seed: int = 0) -> Path:
    """As stock saves it, ranks that differ by encoder."""
    parts = demo.stock._lora_loadable_modules[1:]
    layers = {
        f"{part}_lora_layers": random_pairs(getattr(demo.stock, part), seed + number, rank=2 + number)
        for number, part in enumerate(parts)
    }
    demo.stock.save_lora_weights(folder, **layers)
    return folder / "pytorch_lora_weights.safetensors"


def save_kohya(demo: Any, folder: Path, seed: int = 0) -> Path:
    tensors = {}
    parts = demo.stock._lora_loadable_modules[1:]
    for number, part in enumerate(parts):
        start = f"lora_te{number + 1}_text_model_encoder_"
        for name, tensor in random_pairs(getattr(demo.stock, part), seed + number).items():
            path = name.removeprefix("text_model.").removeprefix("encoder.").rpartition(".lora_")[0].replace(".", "_")
            tensors[f"{start}{path}.lora_{'down' if 'lora_A' in name else 'up'}.weight"] = tensor
            tensors[f"{start}{path}.alpha"] = torch.tensor(3.0)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "style.safetensors")
    return folder / "style.safetensors"


def save_old_names(demo: Any, folder: Path, seed: int = 0) -> Path:
    """As files are whose CLIP had a `text_model`, which transformers 5 has taken away."""
    part = demo.stock._lora_loadable_modules[1]
    pairs = random_pairs(getattr(demo.stock, part), seed)
    folder.mkdir(exist_ok=True)
    save_file({f"{part}.text_model.{name}": tensor for name, tensor in pairs.items()}, folder / "old.safetensors")
    return folder / "old.safetensors"


def save_dora(demo: Any, folder: Path, seed: int = 0) -> Path:
    """Layers whose rows have lengths of their own, around those that they have.

    Named as the parameters are: transformers does not find those of a file that PEFT saved, and takes others.
    """
    tensors, generator = {}, torch.Generator().manual_seed(seed)
    for part in demo.stock._lora_loadable_modules[1:]:
        module = getattr(demo.stock, part)
        pairs = random_pairs(module, seed)
        for name in [name for name in pairs if "lora_A" in name]:
            path = name.rpartition(".lora_A")[0]
            norms = module.get_submodule(path).weight.detach().norm(dim=1)
            pairs[f"{path}.lora_magnitude_vector.weight"] = norms * (
                1 + 0.3 * torch.rand(len(norms), generator=generator)
            )
        tensors |= {f"{part}.{name}": tensor for name, tensor in pairs.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "dora.safetensors")
    return folder / "dora.safetensors"


def save_before_peft(demo: Any, folder: Path, seed: int = 0) -> Path:
    """As diffusers named them before PEFT."""
    part = demo.stock._lora_loadable_modules[1]
    renamed = {"q_proj": "to_q_lora", "out_proj": "to_out_lora"}
    tensors = {}
    for name, tensor in random_pairs(getattr(demo.stock, part), seed).items():
        path, _, half = name.removesuffix(".weight").rpartition(".lora_")
        above, _, leaf = path.rpartition(".")
        old = f"{above}.{renamed[leaf]}" if leaf in renamed else f"{path}.lora_linear_layer"
        tensors[f"{part}.{old}.{'down' if half == 'A' else 'up'}.weight"] = tensor
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "before.safetensors")
    return folder / "before.safetensors"


@pytest.fixture(params=["flux", "sdxl"])
def demo(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = request.getfixturevalue(request.param)
    yield found
    found.stock.unload_lora_weights()


def stock_conditioning(demo: Any, *, negative: bool) -> dict[str, torch.Tensor]:
    if demo.class_name == "FluxPipeline":
        prompt, pooled, _ = demo.stock.encode_prompt(PROMPT, None, max_sequence_length=24)
        return {"prompt_embeds": prompt, "pooled_prompt_embeds": pooled}
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    found = demo.stock.encode_prompt(PROMPT, None, "cpu", 1, negative, negative_prompt=NEGATIVE)
    return {name: tensor for name, tensor in zip(names, found, strict=True) if tensor is not None}


def difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor.detach()).abs().max()) for name, tensor in expected.items())


async def condition(demo: Any, encoders: CachedEncoders, uses: Mapping[str, tuple[LoraAdapter, float]]) -> Any:
    adapters = {name: adapter for name, (adapter, _) in uses.items()}
    keys = {name: f"key of {name}" for name in uses}
    guided = demo.class_name != "FluxPipeline"
    return await demo.condition(
        encoders,
        PROMPT,
        NEGATIVE if guided else None,
        max_sequence_length=24,
        adapters={name: scale for name, (_, scale) in uses.items()},
        loras=(adapters, keys),
    )


@pytest.mark.drawn(3)
@pytest.mark.parametrize("save", [save_diffusers, save_kohya, save_old_names, save_dora, save_before_peft])
async def test_equals_stock(demo: Any, save: Any, tmp_path: Path) -> None:
    file = save(demo, tmp_path / "style")
    adapter = load_adapter(file)
    before = {name: tensor.clone() for name, tensor in adapter.raw.items()}
    encoders, _ = service()
    plain, _ = await condition(demo, encoders, {})
    guided = demo.class_name != "FluxPipeline"
    demo.stock.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="style")
    for scale in (1.0, -0.5):
        demo.stock.set_adapters("style", scale)
        expected = stock_conditioning(demo, negative=guided)
        found, _ = await condition(demo, encoders, {"style": (adapter, scale)})
        assert difference(found, expected) < 1e-5
        assert difference(found, plain) > 0.1
    again, encoded = await condition(demo, encoders, {})
    assert difference(again, plain) == 0  # nothing was left behind, and what is cached is kept apart
    assert encoded.cache.misses == 0
    assert all(torch.equal(adapter.raw[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("prefix", ["lora_te2_", "lora_te3_", "text_encoders.t5xxl.transformer.", "text_encoder_2."])
async def test_a_part_for_t5_is_added_to_its_weights(flux: Any, tmp_path: Path, prefix: str) -> None:
    """Stock leaves it out, so that the judge is a T5 with other weights."""
    stock, tensors, before = flux.stock.text_encoder_2, {}, {}
    ends = ("lora_A", "lora_B") if prefix == "text_encoder_2." else ("lora_down", "lora_up")
    for path in [path for path, one in stock.named_modules() if path.endswith(("SelfAttention.q", ".wo", ".wi_0"))]:
        weight = stock.get_submodule(path).weight
        down, up = torch.randn(2, weight.shape[1]), torch.randn(len(weight), 2) * 0.4
        name = prefix + (path.replace(".", "_") if prefix.endswith("_") else path)
        tensors |= {
            f"{name}.{ends[0]}.weight": down,
            f"{name}.{ends[1]}.weight": up,
            f"{name}.alpha": torch.tensor(3.0),
        }
        before[path] = weight.detach().clone()
        weight.data += 0.7 * 3.0 / 2 * up @ down
    save_file(tensors, tmp_path / "style.safetensors")
    try:
        expected = stock_conditioning(flux, negative=False)
    finally:
        for path, weight in before.items():
            stock.get_submodule(path).weight.data = weight
    encoders, _ = service()
    found, _ = await condition(flux, encoders, {"style": (load_adapter(tmp_path / "style.safetensors"), 0.7)})
    plain, _ = await condition(flux, encoders, {})
    assert difference(found, expected) < 1e-4
    assert difference(found, plain) > 0.1


async def test_two_adapters_equal_stock(sdxl: Any, tmp_path: Path) -> None:
    files = {"a": save_diffusers(sdxl, tmp_path / "a", seed=1), "b": save_kohya(sdxl, tmp_path / "b", seed=5)}
    for name, file in files.items():
        sdxl.stock.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name)
    sdxl.stock.set_adapters(["a", "b"], [0.7, 0.4])
    expected = stock_conditioning(sdxl, negative=True)
    sdxl.stock.unload_lora_weights()
    adapters = {name: load_adapter(file) for name, file in files.items()}
    encoders, _ = service()
    found, _ = await condition(sdxl, encoders, {"b": (adapters["b"], 0.4), "a": (adapters["a"], 0.7)})
    assert difference(found, expected) < 1e-5


async def test_encodings_are_cached_by_adapter_and_strength(flux: Any, tmp_path: Path) -> None:
    adapter, other = (load_adapter(save_diffusers(flux, tmp_path / str(seed), seed)) for seed in (0, 7))
    encoders, made = service()
    for uses, misses in [
        ({}, 2),  # CLIP and T5
        ({"a": (adapter, 1.0)}, 1),  # T5 is not changed
        ({"a": (adapter, 1.0)}, 0),
        ({"a": (adapter, 0.5)}, 1),
        ({"b": (other, 1.0)}, 1),
        ({"a": (adapter, 0.0)}, 0),  # that is the plain encoding
        ({"b": (other, 1.0), "a": (adapter, 1.0)}, 1),
        ({"a": (adapter, 1.0), "b": (other, 1.0)}, 0),
    ]:
        _, encoded = await condition(flux, encoders, uses)
        assert encoded.cache.misses == misses, uses
    assert sum(len(jobs) for jobs in made) == 6


async def test_one_batch_mixes_adapters(flux: Any, tmp_path: Path) -> None:
    """As the service does, whose batches are of one encoder: each text with its own adapters, alone or not."""
    adapter = load_adapter(save_diffusers(flux, tmp_path, 3))
    encoders, made = service()
    for uses in ({}, {"a": (adapter, 1.0)}, {"a": (adapter, 2.0)}):
        await condition(flux, encoders, uses)
    encoder = flux.encoders["text_encoder"].encoder
    jobs = [job for batch in made for job in batch if job.keyed.encoder is encoder]
    assert len(jobs) == 3
    jobs = [*jobs, *reversed(jobs)]
    together = encode_batch(jobs)
    for job, outcome in zip(jobs, together, strict=True):
        (alone,) = encode_batch_or_raise([job])
        assert not isinstance(outcome, Exception)
        assert difference(outcome, alone) < 1e-5
    assert difference(encode_batch_or_raise(jobs[:1])[0], encode_batch_or_raise(jobs[1:2])[0]) > 0.1
    linear = [module for module in encoder.module.modules() if isinstance(module, torch.nn.Linear)]
    assert linear
    assert not any(module._forward_hooks for module in linear)  # transformers has hooks of its own on whole layers


async def test_what_is_refused(flux: Any, sdxl: Any, tmp_path: Path) -> None:
    pairs = random_pairs(flux.stock.text_encoder, 0)
    wide = {
        f"text_encoder.{name}": torch.cat([tensor, tensor], -1) if "lora_A" in name else tensor
        for name, tensor in pairs.items()
    }
    t5 = {f"text_encoder_2.{name}": tensor for name, tensor in pairs.items()}
    gone = {f"text_encoder.gone.{name}": tensor for name, tensor in pairs.items()}
    for tensors, message in [
        (t5, "are not in T5EncoderModel"),
        (gone, "are not in CLIPTextModel"),
        (wide, "do not fit a Linear"),
    ]:
        save_file(tensors, tmp_path / "bad.safetensors")
        encoders, _ = service()
        with pytest.raises(EngineError, match=message):
            await condition(flux, encoders, {"bad": (load_adapter(tmp_path / "bad.safetensors"), 1.0)})
