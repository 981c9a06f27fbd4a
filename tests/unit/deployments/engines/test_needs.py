"""The bytes that a model needs, by its tensors."""

from __future__ import annotations

from deployments.engines.needs import PartSizes, needs_of


def test_a_decoder_needs_its_layers_and_the_rest_and_no_cache_yet() -> None:
    tensors = {"model.embed_tokens.weight": 64, "model.norm.weight": 4, "lm_head.weight": 60}
    tensors |= {f"model.layers.{layer}.mlp.up_proj.weight": 10 + layer for layer in range(3)}
    needs = needs_of("llm", "LlamaForCausalLM", {"model": PartSizes("transformers", tensors)})
    assert needs.services["worker"] == {"model": sum(tensors.values())}
    assert needs.divided is not None
    assert list(needs.divided.layers) == [10, 11, 12]
    assert needs.divided.rest_bytes == 64  # the head's; the table of words stays on the host
    assert list(needs.divided.caches) == [0, 0, 0, 0]
