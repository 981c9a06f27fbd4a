"""One cluster on local Ray for all integration tests: the demo models, a real MiniLM, and two that are broken."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from integration import span_files
from integration.echo_functions import echo_pipelines
from integration.harness import DEMO_MODELS, MINILM, ROOT, SEER, Cluster
from integration.judging import held_out_texts
from kit.programs import Classifier, export_bert, export_classifier, onnx_bert, tiny_bert
from kit.seeding import seeded_rng
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from unit.deployments.engines.text.test_classifiers import make

from cluster.process import tracing
from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.console.running import cluster_up
from infra.ports import free_port
from infra.supported.encoders import Row, make_model
from infra.supported.vision_models import save_tiny, tiny_model
from weights.operations.intake import import_model
from weights.storage.store import WeightStore

# The demo's adder has no tools. This is its template with them: <tool_call> as Qwen and Hermes have it.
TOOLS_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{- '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{- '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|assistant|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- else %}{{- ('<|system|>' if message.role == 'system' else '<|user|>') + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
RANK_AND_SORT = {
    "id": "rank-and-sort",
    "inputs": {"query": "text", "text": "text"},
    "stages": [
        {"name": "rank", "model": "ranker", "inputs": {"query": "$query", "text": "$text"}},
        {"name": "kind", "model": "sorter", "inputs": {"text": "$text"}},
    ],
    "outputs": {"score": "$rank", "kinds": "$kind"},
}
PROGRAM_KINDS = {
    "id": "program-kinds",
    "inputs": {"text": "text"},
    "stages": [
        {"name": "tokens", "tokenizer": "texts-bert", "inputs": {"text": "$text"}},
        {"name": "bert", "model": "program-bert", "inputs": {"input_ids": "$tokens"}},
        {"name": "classes", "model": "program-classifier", "inputs": {"features": "$bert.pooler_output"}},
    ],
    "outputs": {"logits": "$classes"},
}
ONNX_KINDS = PROGRAM_KINDS | {
    "id": "onnx-kinds",
    "stages": [
        {**stage, "model": "program-onnx"} if stage["name"] == "bert" else stage for stage in PROGRAM_KINDS["stages"]
    ],
}
gc.disable()  # until all is imported
SENTENCE = "the old river runs slowly past every quiet house on its long way down to a wide and silver sea"


def pytest_collection_finish() -> None:
    """Leave out of later collections what is there for good: the libraries."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    config = _config(folder)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)  # where replicas find echo_functions
        (folder / "spans").mkdir()
        environment.setenv(span_files.FOLDER, str(folder / "spans"))
        environment.setattr(tracing, "_PROCESSORS", f"{span_files.__name__}.{span_files.span_processors.__name__}")
        environment.setattr(tracing, "_exporter", lambda: None)  # no collector is needed
        with cluster_up(config, str(ROOT / "configs/clusters/demo.yaml")) as url:
            yield Cluster(url, config, folder)


@pytest.fixture(scope="session")
def asked() -> dict[str, Any]:
    """Return the questions of all judges, so that answers can be compared. Only what is measured has fixed seeds."""
    rng = seeded_rng()
    sums = [(first, second) for first in range(10) for second in range(10 - first)]
    digits = [sums[index] for index in np.random.default_rng(0).choice(len(sums), 20, replace=False)]
    return {
        "sum": "What is 12 + 7?",
        "sums": [f"What is {first} + {second}?" for first, second in rng.integers(0, 100, (8, 2))],
        "texts": [" ".join(rng.choice(SENTENCE.split(), rng.integers(1, 40))) for _ in range(8)],
        "image": {"prompt": "a handwritten three", "seed": int(rng.integers(2**40)), "num_inference_steps": 8},
        "digit_sums": [f"{first} + {second}" for first, second in digits],
        "digits": [first + second for first, second in digits],
        "digit_seeds": list(range(len(digits))),
        "kinds": held_out_texts(15)[0],
        "tokenizer": str(DEMO_MODELS / "adder"),
    }


def _config(folder: Path) -> ClusterConfig:
    """The demo config, two workers on one node, its own store and port, and more models."""
    demo = load_cluster_config(ROOT / "configs/clusters/demo.yaml").model_dump(mode="json")
    truncated = _truncated_model(folder / "truncated")
    ports = {"http": {"port": free_port()}, "grpc": {"port": free_port()}}
    demo |= {"name": "integration", **ports, "store": {"path": str(folder / "store")}}
    demo["model_roots"] = [str(folder.parent), str(DEMO_MODELS)]  # tests register from folders of their own
    demo["ingress"] |= {"max_ongoing_requests": 300, "shared_memory": {}}
    demo["logging"] = {"format": "json"}
    demo["tracing"] = {"endpoint": "http://127.0.0.1:4318/v1/traces", "sampling_ratio": 0}  # what a caller traces
    demo["admission"] = {"tenants": {"gold": {"weight": 2}}}
    demo["worker"] |= {"num_replicas": 2, "num_cpus": 0.5}
    demo["models"] += [
        {"id": "minilm", "path": str(MINILM)},
        {"id": "truncated", "path": str(truncated)},
        {"id": "incomplete", "path": str(_model_that_lacks_a_tensor(folder / "incomplete")), "preload": True},
        {"id": "adder-copy", "path": str(_adder_with_other_weights(folder / "adder-copy"))},
        {"id": "adder-tools", "path": str(_adder_with_tools(folder / "adder-tools")), "dtype": "float32"},
        {"id": "texts-short", "path": str(_encoder_for_short_vectors(folder / "texts-short")), "dtype": "float32"},
    ]
    make(folder / "ranker", "XLMRobertaForSequenceClassification", 1)
    make(folder / "sorter", "DebertaV2ForSequenceClassification", 3)
    _sentence_transformer(folder / "sentences")
    save_tiny(SEER, tiny_model(SEER), folder / "seer")
    demo["models"] += [{"id": name, "path": str(folder / name)} for name in ("ranker", "sorter", "sentences", "seer")]
    demo["models"] += _programs(folder)
    demo["pipelines"] += [*echo_pipelines(), RANK_AND_SORT, PROGRAM_KINDS, ONNX_KINDS]
    return ClusterConfig.model_validate(demo)


def _programs(folder: Path) -> list[dict[str, str]]:
    """BERTs and a classifier, in the store as its owner brings them there, and as stock too.

    Two BERTs are of one program, a third is an ONNX model.
    """
    torch.manual_seed(int(seeded_rng().integers(2**31)))
    exported = {"program-classifier": export_classifier(classifier := Classifier())}
    torch.save(classifier.state_dict(), folder / "classifier.pt")
    for name in ("program-bert", "program-tuned"):
        bert = tiny_bert(6000)  # as many tokens as texts-bert has
        bert.save_pretrained(folder / name)
        exported[name] = export_bert(bert)
    store = WeightStore(folder / "store")
    for name, program in exported.items():
        torch.export.save(program, folder / f"{name}.pt2")
        import_model(store, name, folder / f"{name}.pt2", allow_torch=True)
    (bert := tiny_bert(6000)).save_pretrained(folder / "program-onnx")
    onnx.save(onnx_bert(bert), folder / "program-onnx.onnx")
    import_model(store, "program-onnx", folder / "program-onnx.onnx")
    paths = {name: f"{name}.pt2" for name in exported} | {"program-onnx": "program-onnx.onnx"}
    return [{"id": name, "path": str(folder / path)} for name, path in paths.items()]


def _sentence_transformer(folder: Path) -> Path:
    """An encoder with a layer behind its pooling, and prompts."""
    make_model(folder / "bert", Row("BertModel"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        stages = [Transformer(str(folder / "bert")), Pooling(32, "weightedmean"), Dense(32, 12), Normalize()]
        prompts = {"query": "alpha beta ", "document": "gamma "}
        SentenceTransformer(modules=stages, device="cpu", prompts=prompts).save_pretrained(str(folder))
    shutil.rmtree(folder / "bert")
    return folder


def _truncated_model(folder: Path) -> Path:
    folder.mkdir()
    save_file({"layer.weight": torch.randn(64, 64)}, folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1000])
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


def _model_that_lacks_a_tensor(folder: Path) -> Path:
    """A sound file, but not the whole model."""
    shutil.copytree(DEMO_MODELS / "adder", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _adder_with_other_weights(folder: Path) -> Path:
    """A model whose bytes are in no other model's pack, so that a test may damage them."""
    shutil.copytree(DEMO_MODELS / "adder", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def _adder_with_tools(folder: Path) -> Path:
    """The adder, whose weights it shares, with a chat template that knows tools."""
    shutil.copytree(DEMO_MODELS / "adder", folder)
    (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return folder


def _encoder_for_short_vectors(folder: Path) -> Path:
    """The encoder of the text classifier, whose weights it shares, said to be trained for 32 dimensions as well."""
    shutil.copytree(DEMO_MODELS / "texts-bert", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [32, 128]}))
    return folder
