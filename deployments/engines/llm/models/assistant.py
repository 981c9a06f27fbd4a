"""Gemma 4's assistants: draft models without a cache, which read the keys and values of the model that they draft for.

All proposals behind a token are made in its place: the class attends to the tokens before it, in the model's last layer
of each kind, and gets the last token's embedding and the state that led to it, both the model's. Each forward returns a
state for the next one, so no proposal has keys of its own.

Suffixes: G sequences, P proposals of each, C hidden size, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from deployments.engines.building.build import build_language_model
from deployments.engines.llm.models.context import max_positions
from deployments.engines.llm.models.known import drafted_classes
from deployments.engines.llm.models.step_rows import StepRows
from deployments.engines.llm.models.stock import StepMask, StockLanguageModel, StockSpec, run_by_steps, turn
from deployments.engines.llm.models.stock_classes import DRAFTS_FOR
from deployments.engines.llm.sequences.paged_attention import Planner, Scores, StepAttention
from deployments.engines.records.protocol import EngineError


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """The attention of a step over stored keys and values: a layer, and its plan, by the mask of its kind."""

    layers: Mapping[StepMask, tuple[int, StepAttention]]

    def attend(
        self, mask: StepMask, q_GHD: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        layer, plan = self.layers[mask]
        return plan.read(layer, q_GHD, scores)


@dataclass(frozen=True, slots=True)
class AssistantModel:
    """An assistant with its weights, for a `model`. It has a layer and a window (0: all) for each kind of attention."""

    module: Any
    model: StockLanguageModel
    spec: StockSpec  # without layers: it adds nothing to the cache
    dtype: torch.dtype
    kinds: Mapping[str, tuple[int, int]]

    @torch.inference_mode()
    def propose(
        self,
        token_ids_G: torch.Tensor,
        states_GC: torch.Tensor,
        places_G: torch.Tensor,
        planner: Planner,
        count: int,
        choose: Callable[[torch.Tensor], Sequence[int]],
    ) -> torch.Tensor:
        """Return `count` tokens (G, P) behind the last tokens of sequences, which are in these places.

        Each is the one that `choose` takes by its logits (G, V). `states_GC` are the model's behind the tokens before
        these, to which the `planner` reads.
        """
        embed, module = self.model.module.get_input_embeddings(), self.module
        masks = {
            kind: StepMask(lambda queries, keys: keys <= queries, window) for kind, (_, window) in self.kinds.items()
        }
        reading = _Reading({mask: (self.kinds[kind][0], planner(mask.window, None)) for kind, mask in masks.items()})
        # The class slices what it is given by its kinds of attention: the keys themselves are in the cache.
        none = states_GC.new_empty(1, 1, 0, 0)
        rows = StepRows((1, len(token_ids_G)), len(token_ids_G)) if self.model.has_kernels else None
        found = []
        with turn(module, attention=reading, rows=rows):
            for _ in range(count):
                output = module(
                    inputs_embeds=torch.cat([embed(token_ids_G), states_GC], -1)[None],
                    position_ids=places_G[None],
                    attention_mask=masks,
                    shared_kv_states=dict.fromkeys(masks, (none, none)),
                )
                chosen = choose(output.logits[0, :, : self.spec.vocab_size])
                token_ids_G = torch.tensor(chosen, device=token_ids_G.device)
                states_GC = output.last_hidden_state[0]
                found.append(token_ids_G)
        return torch.stack(found, 1)


def create_assistant(
    config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], model: Any, model_config: PretrainedConfig
) -> AssistantModel:
    """Build the class that a config names around its tensors, for a `model`.

    Raises EngineError where these do not fit together.
    """
    name, where = config.architectures[0], Path(config.name_or_path)
    if not isinstance(model, StockLanguageModel) or model_config.architectures[0] not in drafted_classes(name):
        raise EngineError(
            f"{where}: a {name} drafts for a {DRAFTS_FOR[name]}, not for a {model_config.architectures[0]}"
        )
    text, whole = config.get_text_config(), model_config.get_text_config()
    if config.backbone_hidden_size != whole.hidden_size:
        raise EngineError(
            f"{where}: it reads states of {config.backbone_hidden_size} elements, those of the model have "
            f"{whole.hidden_size}"
        )
    placed = {key: tensor.to(model.device) for key, tensor in tensors.items()}
    module: Any = build_language_model(config, placed)
    run_by_steps(module)
    module.model.first_kv_shared_layer_idx = -1  # from there on it keeps the rows that get logits, which are all
    module.create_attention_masks = lambda _inputs, masks, _keys: masks  # the class makes them by the keys' sizes
    dtype = module.pre_projection.weight.dtype
    if dtype != model.dtype:
        raise EngineError(f"{where}: its tensors are {dtype}, those of the model {model.dtype}")
    kinds = {}
    for place, kind in enumerate(text.layer_types):
        if kind not in whole.layer_types:
            raise EngineError(f"{where}: it has layers of type {kind!r}, the model has none")
        layer = len(whole.layer_types) - 1 - whole.layer_types[::-1].index(kind)
        attention, heads = module.model.layers[place].self_attn, model.spec.kv_layers[layer]
        if (attention.head_dim, text.num_attention_heads % heads.num_heads) != (heads.key_size, 0):
            raise EngineError(
                f"{where}: layer {place} has {text.num_attention_heads} heads of {attention.head_dim} elements, the "
                f"model's keys {heads.num_heads} of {heads.key_size}"
            )
        # The class sees as many keys as the window has, and one more: its query stands behind all of them.
        kinds[kind] = layer, text.sliding_window + 1 if attention.is_sliding else 0
    spec = StockSpec(min(text.vocab_size, model.spec.vocab_size), max_positions(config), ())
    return AssistantModel(module, model, spec, dtype, kinds)
