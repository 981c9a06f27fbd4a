"""A draft model beside a language model in the store: two components, each shared with equal models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM
from unit.weights.comparing import same

from weights.formats.checkpoint import read_checkpoint
from weights.formats.own_draft import _check_vocabulary, _tokens, with_draft
from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.intake import write_back
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

ADDER = Path(__file__).parents[4] / "infra/demo/models/adder"


def small_adder(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a random model of one layer with the demo model's tokenizer; return its tensors."""
    shutil.copytree(ADDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(ADDER)
    config.update({"num_hidden_layers": 1, **changes})
    model = LlamaForCausalLM(config).bfloat16()  # as the demo model
    model.save_pretrained(folder)
    return dict(model.state_dict())


def test_it_stands_beside_the_model_and_both_are_shared(store: WeightStore, tmp_path: Path) -> None:
    tensors = small_adder(tmp_path / "small")
    plain, small = externalize(store, "plain", ADDER), externalize(store, "small", tmp_path / "small")
    both = externalize(store, "both", ADDER, parts={"draft": tmp_path / "small"})
    assert both.components["model"].module_key == plain.components["model"].module_key
    assert both.components["draft"].weights_hash == small.components["model"].weights_hash
    assert both.extents_of(["draft"]) == small.extents_of(["model"])
    assert same(load_from_store(store.path, "both")["draft"], tensors)
    config = json.loads((store.skeleton(both) / "draft" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert externalize(store, "both", ADDER, parts={"draft": tmp_path / "small"}) == both
    write_back(store, "both", tmp_path / "back")
    back = read_checkpoint(tmp_path / "back"), read_checkpoint(tmp_path / "back" / "draft")
    assert [len(one.components[0].tensors) for one in back] == [len(one.tensors) for one in both.components.values()]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (
            {"<new>": 104},
            "a vocabulary of 105 tokens, that of .*adder has 104: .*; token 104 is None there and '<new>' here",
        ),
        (None, r"a vocabulary of 500 tokens, that of .*adder has 104: expected the same tokens$"),
    ],
)
def test_other_tokens_are_refused(tokens: dict[str, int] | None, words: str, tmp_path: Path) -> None:
    small_adder(tmp_path / "small", vocab_size=500)
    file = tmp_path / "small" / "tokenizer.json"
    if tokens is None:
        file.unlink()
    else:
        content = json.loads(file.read_text())
        content["model"]["vocab"] |= tokens
        file.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=f"draft: .*small: {words}"):
        read_checkpoint(ADDER, parts={"draft": tmp_path / "small"})


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    small_adder(tmp_path / "small")
    digits = ADDER.parent / "digits-sdxl"
    with pytest.raises(
        FormatError, match=r"draft: .*digits-sdxl: it is of kind 'diffusion', expected a language model"
    ):
        read_checkpoint(ADDER, parts={"draft": digits})
    with pytest.raises(FormatError, match=r"draft: .*digits-sdxl has no use for one: it is of kind 'diffusion'"):
        read_checkpoint(digits, parts={"draft": tmp_path / "small"})


def checkpoint_of(folder: Path, tokenizer: Any = None, **config: Any) -> Any:
    folder.mkdir()
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    component = SimpleNamespace(format="safetensors")
    return SimpleNamespace(path=folder, root=folder, kind="llm", components=(component,), config=config, headers={})


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        ({"model": {"vocab": {"a": 0, "b": 1, "c": "2"}}}, {0: "a", 1: "b"}),
        ({"model": {"vocab": [["a", -1.0], [], "b", ["c", 0.5]]}}, {0: "a", 3: "c"}),
        (
            {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 5, "content": "<s>"}, {"id": "6"}, 7]},
            {0: "a", 5: "<s>"},
        ),
        ({"added_tokens": [{"id": 2}]}, {2: None}),
        ({"model": ["a"], "added_tokens": {"id": 1}}, None),
        ({}, None),
        (None, None),
    ],
)
def test_tokens_are_read_by_number(content: Any, tokens: Any, tmp_path: Path) -> None:
    assert _tokens(checkpoint_of(tmp_path / "model", content)) == tokens


def test_sizes_of_configs_count_where_no_file_has_tokens(tmp_path: Path) -> None:
    model = checkpoint_of(tmp_path / "model", text_config={"vocab_size": 9})
    _check_vocabulary(model, checkpoint_of(tmp_path / "same", vocab_size=9))
    read = checkpoint_of(tmp_path / "read", {"model": {"vocab": {"a": 0}}}, vocab_size=9)
    for draft, size in ((checkpoint_of(tmp_path / "other", vocab_size=8), 8), (read, 1)):
        with pytest.raises(FormatError, match=f"a vocabulary of {size} tokens, .* has 9: expected the same tokens$"):
            _check_vocabulary(model, draft)
    untold = checkpoint_of(tmp_path / "untold", text_config=[])
    with pytest.raises(FormatError, match="a vocabulary of None tokens"):
        _check_vocabulary(model, untold)


def test_a_draft_is_of_the_models_kind_and_format(tmp_path: Path) -> None:
    model, draft = checkpoint_of(tmp_path / "model"), checkpoint_of(tmp_path / "small")
    draft.kind = "embedding"
    with pytest.raises(FormatError, match="small: it is of kind 'embedding', expected a language model"):
        with_draft(model, draft)
    with pytest.raises(FormatError, match="small has no use for one: it is of kind 'embedding'"):
        with_draft(draft, model)
    draft.kind, draft.components = "llm", (SimpleNamespace(format="gguf"),)
    with pytest.raises(FormatError, match=r"small: in the format gguf, expected safetensors as .*model"):
        with_draft(model, draft)
