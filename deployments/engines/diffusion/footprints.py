"""Footprints of a pipeline's denoiser and VAE: the memory of forwards, recorded on modules without weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.building.skeletons import blank_module
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.families.base import Branch, Family, Rows
from deployments.engines.diffusion.families.prompted import ImagePrompt, PromptedSpan
from deployments.engines.diffusion.image_codec import ImageCodec
from deployments.engines.diffusion.image_prompts import blank_image_prompt
from deployments.engines.diffusion.modulation import MAX_PARTS, NUM_ROWS
from deployments.engines.diffusion.pipeline import AdapterShapes, DenoisePipeline
from deployments.engines.diffusion.rows import BatchBounds, Condition, decode_kind, workspace_kind
from deployments.engines.diffusion.state import Control, DenoiseState, check_request
from deployments.engines.graph.footprint import Footprint, fit_footprint
from deployments.engines.graph.recording import Recorder, Recording, fake_copy, fake_weights, record
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.nn.feature_maps import MappedPair
from deployments.engines.nn.lora import FittedPairs, check_targets
from deployments.engines.records.protocol import AdapterUse, DiffusionRequest, EngineError
from weights.memory.devices import computes_on_host, host_generator
from weights.operations.adapters import LoraPair
from weights.platform.torch_seam import fake_mode
from weights.records.manifest import Manifest

_DECODED: Final = 16  # the most images at once: some VAEs take them one after the other, and so do recordings


@dataclass(frozen=True, slots=True)
class _Adapted:
    """The adapters of a twin's request: those of `DenoiseState`, LoRAs with their names."""

    loras: tuple[tuple[str, FittedPairs], ...] = ()
    controls: tuple[Control, ...] = ()
    image_prompts: tuple[ImagePrompt, ...] = ()


class PipelineTwin(DenoisePipeline):
    """A pipeline of fake tensors, whose forwards are recorded as they would run on `device`. One thread at a time.

    Its modules are blank ones (`blank_module`) of its own. The costliest case of a batch is recorded: one image of
    each request, with no results of time and text computed ahead, and a reference if the family reads some. Adapters
    are those of every row: LoRAs on the side path, and ControlNets in a step in which all of them act.
    """

    def __init__(self, family: Family, folder: Path, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        self._mode = fake_mode()
        for module in modules.values():
            fake_weights(module, self._mode, device)
        super().__init__(family, folder, modules, device)
        self._codec = ImageCodec(modules["vae"])  # never in tiles
        self._decodes: dict[tuple[int, int, int], Footprint] = {}  # by height, width and rows
        self._nets: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()

    def footprints(
        self, height: int, width: int, num_tokens: int, bounds: BatchBounds, adapters: AdapterShapes = ()
    ) -> dict[Hashable, Footprint]:
        """Return the footprints of denoising and decoding images of that size, by their kinds.

        A prompt has so many tokens before the family pads it; `adapters` are those of `adapter_shapes`.
        """
        length = self._text_length(num_tokens, adapters)
        kind = workspace_kind(self._part(height, width, length, self._adapted(adapters, height, width)))
        denoise = self.denoise_footprint(height, width, length, bounds.denoise_rows(height * width), adapters)
        decode = self.decode_footprint(height, width, bounds.decode_rows(height * width))
        return {kind: denoise, decode_kind(height, width): decode}

    def image_bytes(self, height: int, width: int, num_tokens: int, adapters: AdapterShapes) -> int:
        """Return the bytes of a forward for one image, as in `footprints`."""
        length = self._text_length(num_tokens, adapters)
        return self.record_denoise(height, width, length, 1, adapters).eager_peak()

    def _text_length(self, num_tokens: int, adapters: AdapterShapes) -> int:
        is_padded = self.family.texts.masks and not any(isinstance(shape, nn.Module) for _, shape in adapters)
        return self.family.texts.padded_length(num_tokens) if is_padded else num_tokens

    def denoise_footprint(
        self, height: int, width: int, text_length: int, most_rows: int, adapters: AdapterShapes = ()
    ) -> Footprint:
        """Return the footprint of forwards of up to `most_rows` for images of that size, prompts of so many tokens."""
        rows: tuple[int, ...] = (1, 2)
        if computes_on_host(self.device) and self._modulation.is_there:  # it computes ahead for few rows
            rows = (1, 2, MAX_PARTS, MAX_PARTS + 1)
        rows = (*(count for count in rows if count < most_rows), most_rows)
        return fit_footprint(lambda n: self.record_denoise(height, width, text_length, n, adapters).eager_peak(), rows)

    def decode_footprint(self, height: int, width: int, most_rows: int) -> Footprint:
        """Return the footprint of decodes of up to `most_rows` images of that size, each in one piece."""
        rows = sorted({1, min(most_rows, _DECODED)})
        if (found := self._decodes.get((height, width, rows[-1]))) is None:
            found = fit_footprint(lambda n: self.record_decode(height, width, n).eager_peak(), rows)
            self._decodes[height, width, rows[-1]] = found
        return found

    def record_denoise(
        self, height: int, width: int, text_length: int, rows: int, adapters: AdapterShapes = ()
    ) -> Recording:
        """Return the recording of one forward of so many rows."""
        adapted = self._adapted(adapters, height, width)
        one = self._part(height, width, text_length, adapted)
        parts = [one, *(_another(one) for _ in range(rows - 1))]
        return self._record(lambda: self._predict(parts), {self.family.denoiser_name: self.denoiser})

    def record_decode(self, height: int, width: int, rows: int) -> Recording:
        """Return the recording of a decode of so many images."""
        with self._mode:
            latents = torch.cat([self._fake_latents(height, width) for _ in range(rows)])
        return self._record(
            lambda: self._codec.pixels(self._decoder.latent_images(latents, height, width)), {"vae": self._codec.vae}
        )

    def _record(self, run: Callable[[], Any], modules: Mapping[str, nn.Module]) -> Recording:
        return record(run, Recorder(self.device, is_fake=True), modules, self._mode)

    def _forward(self, rows: Rows, height: int, width: int) -> torch.Tensor:
        """Run the pipeline's forward with the image prompts of one request: those of several take less at once."""
        one = tuple(PromptedSpan(span.uses) for span in rows.image_prompts[:1])
        return super()._forward(replace(rows, image_prompts=one), height, width)

    def _adapted(self, adapters: AdapterShapes, height: int, width: int) -> _Adapted:
        loras, controls, prompts = [], [], []
        for name, shape in adapters:
            if isinstance(shape, nn.Module):
                controls.append(self._control(name, shape, height, width))
            elif isinstance(shape, int):
                with self._mode:
                    prompts.append(blank_image_prompt(name, shape, self.denoiser, self.device))
            elif shape is not None:
                loras.append((name, self._fakes_of(shape)))
            else:
                raise EngineError(f"{name!r} is no adapter of the kind that it is asked for")
        return _Adapted(tuple(loras), tuple(controls), tuple(prompts))

    def _control(self, name: str, net: nn.Module, height: int, width: int) -> Control:
        """Return a ControlNet at work, and its image; the net itself stays as it is."""
        if net not in self._nets:
            self._nets[net] = fake_copy(net, self._mode, self.device)
            make_batch_invariant(self._nets[net])
        twin, family, size = self._nets[net], self.family, self._codec.size(height, width)
        with self._mode:
            pixels = torch.empty(1, 3, height, width, device=self.device)
            latents = pixels.new_empty(1, *family.latents.noise_shape(self.denoiser.config, size))
        found: list[torch.Tensor] = []

        def read() -> None:
            inputs = family.adapters.control_inputs(twin, pixels, lambda _, **options: latents)
            found.extend(one.to(self._dtype) for one in inputs)

        self._record(read, {})  # it has the shapes of convolutions that fake tensors have no rule for
        mode = 0 if family.adapters.num_modes(twin) else None
        return Control(name, twin, tuple(found), 1.0, 0.0, 1.0, family.adapters.controls_read_prompt, mode)

    def _fakes_of(self, pairs: Mapping[str, LoraPair]) -> FittedPairs:
        def fake(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=dtype, device=self.device)

        targets, dtype = check_targets(self.denoiser, pairs), self._dtype
        with self._mode:
            return FittedPairs(
                {
                    targets[path]: replace(
                        pair,
                        down=fake(pair.down, dtype),
                        up=fake(pair.up, dtype),
                        magnitude=None if pair.magnitude is None else fake(pair.magnitude, torch.float32),
                        **_fake_map(pair, fake),
                    )
                    for path, pair in pairs.items()
                }
            )

    def _part(self, height: int, width: int, text_length: int, adapted: _Adapted) -> Condition:
        """Return the only condition of a request for one image, before its first step of many."""
        family, size = self.family, self._codec.size(height, width)
        if family.references.most:  # the usual case: one image, and the result has its sides
            size = size._replace(references=(size,))
        text_width, pooled_width = family.network.text_widths(self.denoiser)
        request = DiffusionRequest(
            "twin",
            width=width,
            height=height,
            num_inference_steps=NUM_ROWS,
            guidance_scale=1.0,
            seed=0,
            adapters=tuple(AdapterUse(name) for name, _ in adapted.loras),
        )
        latents = self._fake_latents(height, width)
        num_extra = family.network.num_extra_channels(self.denoiser.config)
        with self._mode:
            prompt = torch.empty(1, text_length, text_width, device=self.device, dtype=self._dtype)
            pooled = None if pooled_width is None else prompt.new_empty(1, pooled_width)
            # A family that counts tokens costs most when all of them count; no ControlNet uses a mask.
            is_masked = family.texts.masks and not family.texts.counts_tokens and not adapted.controls
            mask = prompt.new_empty(1, text_length, dtype=torch.bool) if is_masked else None
            extra = latents.new_empty(1, num_extra, *latents.shape[2:]) if num_extra else None
            extra = torch.empty_like(latents) if size.references else extra
            solver = SimpleNamespace(timesteps=torch.empty(NUM_ROWS, device=self.device))
        branch, shape = Branch(prompt, pooled, mask), family.latents.batch_shape(size)
        state = DenoiseState(
            request,
            solver,
            latents,
            (branch,),
            1.0,
            host_generator(0),
            size,
            shape,
            adapters=tuple((pairs, 1.0) for _, pairs in adapted.loras),
            extra_channels=extra,
            controls=adapted.controls,
            image_prompts=adapted.image_prompts,
        )
        return Condition(state, branch)

    def _fake_latents(self, height: int, width: int) -> torch.Tensor:
        shape = self.family.latents.noise_shape(self.denoiser.config, self._codec.size(height, width))
        dtype = torch.float32 if self.family.latents.are_float32 else self._dtype
        with self._mode:
            packed: torch.Tensor = self.family.latents.pack(torch.empty(1, *shape, dtype=dtype, device=self.device))
            return packed

    def check_size(self, height: int, width: int) -> None:
        """Raise EngineError for an impossible size."""
        request = DiffusionRequest(
            "twin", width=width, height=height, num_inference_steps=1, guidance_scale=1.0, seed=0
        )
        check_request(request, self.family.latents.size_multiple(self._codec.scale_factor))


def _fake_map(pair: LoraPair, fake: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> dict[str, Any]:
    """Return a pair's map of features as blank tensors."""
    if not isinstance(pair, MappedPair) or pair.features is None:
        return {}
    return {"features": pair.features.changed(lambda one: fake(one, torch.float32))}


def _another(part: Condition) -> Condition:
    """Return the only condition of another request for such an image. Its tensors are the same: they have no values."""
    branch = replace(part.branch)
    return Condition(replace(part.state, branches=(branch,), ahead={}), branch)


def make_twin(manifest: Manifest, folder: Path, device: torch.device) -> PipelineTwin:
    """Return the twin of a model of the store, whose skeleton is in `folder`. Raises EngineError."""
    family = family_of(manifest.class_name or "")
    modules = {}
    for name in (family.denoiser_name, "vae"):
        if (part := manifest.components.get(name)) is None:
            raise EngineError(f"component {name!r} is missing (given: {', '.join(manifest.components) or 'none'})")
        modules[name] = blank_module(part, folder / part.folder)
    return PipelineTwin(family, folder, modules, device)
