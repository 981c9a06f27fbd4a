"""A user's walk: one command serves models of one's own; then folders and files of one's own are registered into a
running demo by `atelier register`, and each is asked by a stock client. The answers are those of diffusers and
transformers; what is not right is refused in one line.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import av
import diffusers
import gguf
import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from e2e.test_lifecycle import listen_to_ctrl_c
from integration.harness import DEMO_MODELS, ROOT
from kit.seeding import seeded_rng
from kit.tiny.clips import wan
from kit.tiny.pipelines import qwen_image, saved
from kit.waiting import wait_until
from PIL import Image
from safetensors.torch import load_file, save_file
from unit.deployments.engines.diffusion.ip_adapter_files import write_ip_adapter
from unit.deployments.engines.llm.test_published_models import AWQ, awq
from unit.deployments.engines.text.test_classifiers import make, pairs_of, stock_logits

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.console.running import cluster_up
from infra.bench.original_names import open_clip, unet_of_ldm, vae_of_ldm
from infra.ports import free_port
from infra.supported import language_models, vision_models
from infra.supported.language_models import TIE
from infra.supported.vision_models import BANNED, stock_answer, stock_inputs, tokenizer
from weights.storage.store import WeightStore

pytestmark = [pytest.mark.ray, pytest.mark.long]
DEMO: Final = ROOT / "configs/clusters/demo.yaml"
GEMMA: Final = "Gemma3ForConditionalGeneration"
NUM_TOKENS, NUM_STEPS = 64, 3
CHAT: Final = "{% for message in messages %}w1 {{ message['content'] }} w2 {% endfor %}w3"
OPTIONS: Final = {
    "xl": ("--like", "digits-sdxl", "--dtype", "float32"),
    "ink": ("--base", "digits-sdxl"),
}


@dataclass(frozen=True)
class User:
    """A running demo, a folder that may be registered from, and what stock makes of the models in it."""

    url: str
    folder: Path
    stock: dict[str, Any]
    store: WeightStore

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    def register(self, path: str | Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deployments.cli.main", "register", str(path), "--id", name, *options]
        return subprocess.run(
            [*command, "--url", self.url],
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    store = tmp_path_factory.mktemp("store")
    demo = load_cluster_config(DEMO).model_dump(mode="json")
    demo |= {"name": "walk", "http": {"port": free_port()}, "grpc": None, "store": {"path": str(store)}}
    demo["model_roots"] = [str(folder), str(DEMO_MODELS), "hf://organization/*"]
    stock = {
        "gemma": tiny_gemma(folder / "gemma"),
        "phi": tiny_text_model("Phi3ForCausalLM", folder / "phi"),
        "hybrid": tiny_text_model("Qwen3_5ForCausalLM", folder / "hybrid"),
        "wan": saved(wan, folder / "wan"),
        "qwen": saved(qwen_image, folder / "qwen"),
        "xl": tiny_xl(folder),
        "ranker": make(folder / "ranker", "XLMRobertaForSequenceClassification", 1),
        "awq-adder": awq_adder(folder / "awq-adder"),
        "ink": kohya_style(folder / "ink.safetensors"),
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        with cluster_up(ClusterConfig.model_validate(demo), str(DEMO)) as url:
            yield User(url, folder, stock, WeightStore(store))


@pytest.fixture(scope="module")
def registered(user: User) -> dict[str, str]:
    """The words of `atelier register` about each model, all at once."""

    def register(name: str) -> str:
        path = user.folder / f"{name}.safetensors"
        done = user.register(path if path.exists() else user.folder / name, name, *OPTIONS.get(name, ()))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(user.stock, pool.map(register, user.stock), strict=True))


def tiny_gemma(folder: Path) -> Any:
    model = vision_models.tiny_model(GEMMA)
    vision_models.save_tiny(GEMMA, model, folder)
    return model


def tiny_text_model(class_name: str, folder: Path) -> Any:
    model = language_models.tiny_model(class_name, vocab_size=len(tokenizer()))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    return model


def tiny_xl(folder: Path) -> Any:
    """A merge of the demo's SDXL as a UI writes it, in one file; stock has it as a folder of its own."""
    stock = diffusers.StableDiffusionXLPipeline.from_pretrained(DEMO_MODELS / "digits-sdxl", torch_dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    with torch.no_grad():
        for weights in stock.unet.parameters():
            weights.mul_(1 + 0.05 * torch.randn_like(weights))
    parts = {name: stock.components[name].state_dict() for name in ("unet", "vae", "text_encoder", "text_encoder_2")}
    text = {key.removeprefix("text_model."): tensor for key, tensor in parts["text_encoder"].items()}
    tensors = (
        unet_of_ldm(parts["unet"], layers_per_block=1)
        | vae_of_ldm(parts["vae"], num_blocks=3)
        | {f"conditioner.embedders.0.transformer.text_model.{key}": tensor for key, tensor in text.items()}
        | open_clip(parts["text_encoder_2"], "conditioner.embedders.1.model.")
    )
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / "xl.safetensors")
    return stock


def awq_adder(folder: Path) -> Any:
    """The demo's adder with its linear layers as AWQ publishes them; stock has the values that these stand for."""
    shutil.copytree(DEMO_MODELS / "adder", folder)
    stock = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODELS / "adder", dtype=torch.float32).eval()
    tensors = dict(load_file(folder / "model.safetensors"))
    for name, weights in stock.named_parameters():
        if "_proj" in name:
            parts, values = awq(tensors.pop(name).float().numpy())
            tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
            weights.data = torch.from_numpy(values).float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    return stock


def kohya_style(file: Path) -> Any:
    """A LoRA of digits-sdxl as kohya's trainer writes it; stock is the pipeline that has loaded it."""
    stock = diffusers.StableDiffusionXLPipeline.from_pretrained(DEMO_MODELS / "digits-sdxl", torch_dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    tensors = {}
    for path, layer in stock.unet.named_modules():
        if path.endswith(("to_q", "to_k", "to_v", "to_out.0")):
            name = f"lora_unet_{path.replace('.', '_')}"
            tensors[f"{name}.lora_down.weight"] = torch.randn(4, layer.in_features) / layer.in_features**0.5
            tensors[f"{name}.lora_up.weight"] = torch.randn(layer.out_features, 4) * 0.2
            tensors[f"{name}.alpha"] = torch.tensor(2.0)
    save_file(tensors, file)
    stock.load_lora_weights(file, adapter_name="ink")
    return stock


def test_one_command_serves_a_model_of_ones_own_with_its_lora(tmp_path: Path, record_property: Any) -> None:
    """From the command to right answers: at most three minutes beside a download."""
    folders = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    url, log = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "log"
    lora = f"digits-flux={DEMO_MODELS / 'bold'}"
    options = ["--lora", lora, "--port", str(port), "--store", str(tmp_path / "store"), "--no-open"]
    sources = [str(DEMO_MODELS / name) for name in ("adder", "digits-flux")]
    chat = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
    image = {"model": "digits-flux", "prompt": "a handwritten five", "seed": 1, "num_inference_steps": 4}
    command = [sys.executable, "-m", "deployments.cli.main", "run", *sources, *options]

    def answer_of(path: str, body: dict[str, Any]) -> Any:
        assert process.poll() is None, log.read_text()
        try:
            answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None

    began_s = time.monotonic()
    with log.open("wb") as told:
        environment = os.environ | folders | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        process = subprocess.Popen(command, env=environment, stdout=told, stderr=told, preexec_fn=listen_to_ctrl_c)
        try:
            first = wait_until(lambda: answer_of("chat/completions", chat), "the first answer", timeout_s=180)
            record_property("first_answer_s", round(time.monotonic() - began_s, 1))
            assert first["choices"][0]["message"]["content"] == "19."
            plain, bold = (
                wait_until(lambda: answer_of("images/generations", image | more), "an image", timeout_s=120)  # noqa: B023
                for more in ({}, {"lora": [{"name": "bold", "scale": 0.8}]})
            )
            record_property("first_images_s", round(time.monotonic() - began_s, 1))
            assert plain["data"][0]["b64_json"] != bold["data"][0]["b64_json"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    assert "Traceback" not in log.read_text()


def test_the_command_says_that_each_is_ready(registered: dict[str, str]) -> None:
    kinds = {"gemma": "llm", "phi": "llm", "wan": "diffusion", "qwen": "diffusion", "xl": "diffusion"}
    kinds |= {"hybrid": "llm", "ranker": "reranker", "awq-adder": "llm", "ink": "adapter"}
    expected = {name: f"{name} is ready ({kind})" for name, kind in kinds.items()}
    assert registered == expected


@pytest.mark.parametrize("name", ["gemma", "phi", "hybrid"])
def test_chats_are_those_of_transformers(user: User, registered: Any, name: str) -> None:
    words = " ".join(f"w{number}" for number in seeded_rng().integers(6, vision_models.WORDS, 9))
    if name == "gemma":
        chat = [{"role": "user", "content": [{"type": "text", "text": words}]}]
        inputs = stock_inputs(vision_models.tiny_processor(GEMMA), chat, [])
    else:
        inputs = tokenizer()(f"w1 {words} w2 w3", return_tensors="pt", return_token_type_ids=False)
    expected, logprobs = stock_answer(user.stock[name], inputs, NUM_TOKENS)
    answer = user.openai.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": words}],
        temperature=0,
        max_tokens=NUM_TOKENS,
        logit_bias={str(token): int(bias) for token, bias in BANNED},
        extra_body={"ignore_eos": True},
    )
    tokens = [int(word[1:]) for word in (answer.choices[0].message.content or "").split()]
    place = next((at for at, pair in enumerate(zip(tokens, expected, strict=True)) if len(set(pair)) > 1), None)
    assert place is None or abs(logprobs[place, tokens[place]] - logprobs[place, expected[place]]) < TIE


def test_a_model_that_awq_has_quantized_adds_as_its_values_do(user: User, registered: Any) -> None:
    reader = transformers.AutoTokenizer.from_pretrained(DEMO_MODELS / "adder")
    for first, second in seeded_rng().integers(10, 49, (6, 2)):
        chat = [{"role": "user", "content": f"What is {first} + {second}?"}]
        inputs = reader.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        expected = user.stock["awq-adder"].generate(**inputs, max_new_tokens=12, do_sample=False)
        answer = user.openai.chat.completions.create(
            model="awq-adder",
            messages=chat,
            temperature=0,
            max_tokens=12,  # type: ignore[arg-type]
        )
        said = reader.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer.choices[0].message.content == said


def test_an_image_with_a_lora_of_kohyas_trainer_is_that_of_diffusers(user: User, registered: Any) -> None:
    seed, scale = int(seeded_rng().integers(2**32)), 0.8
    sizes = {"width": 32, "height": 32, "num_inference_steps": NUM_STEPS, "guidance_scale": 4.0}
    images = {}
    for used in (scale, 0.0):
        user.stock["ink"].set_adapters("ink", used)
        generator = torch.Generator("cpu").manual_seed(seed)
        images[used] = user.stock["ink"]("a two", generator=generator, output_type="np", **sizes).images[0] * 255
    assert np.abs(images[scale] - images[0.0]).max() > 10
    options = {"seed": seed, "lora": [{"name": "ink", "scale": scale}], "num_inference_steps": NUM_STEPS}
    answer = user.openai.images.generate(
        model="digits-sdxl",
        prompt="a two",
        size="32x32",  # type: ignore[arg-type]
        extra_body={"guidance_scale": 4.0, **options},
    )
    assert answer.data is not None
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))))
    assert np.abs(found - images[scale].round()).max() <= 4


def test_images_are_those_of_diffusers(user: User, registered: Any) -> None:
    asked: dict[str, dict[str, Any]] = {
        "qwen": {"negative_prompt": "dull", "true_cfg_scale": 2.0},
        "xl": {"guidance_scale": 4.0},
    }
    for name, options in asked.items():
        seed = int(seeded_rng().integers(2**32))
        generator = torch.Generator("cpu").manual_seed(seed)
        sizes = {"width": 32, "height": 32, "num_inference_steps": NUM_STEPS}
        made = user.stock[name]("a cat", generator=generator, output_type="np", **sizes, **options).images[0]
        answer = user.openai.images.generate(
            model=name,
            prompt="a cat",
            size="32x32",  # type: ignore[arg-type]
            extra_body={"seed": seed, "num_inference_steps": NUM_STEPS, **options},
        )
        assert answer.data is not None
        found = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))))
        assert np.abs(found - (made * 255).round()).max() <= 1, name


def test_videos_are_those_of_diffusers(user: User, registered: Any) -> None:
    seed = int(seeded_rng().integers(2**32))
    sizes = {"width": 32, "height": 16, "num_frames": 9, "max_sequence_length": 16, "num_inference_steps": NUM_STEPS}
    generator = torch.Generator("cpu").manual_seed(seed)
    made = np.asarray(user.stock["wan"]("a cat", generator=generator, output_type="np", **sizes).frames[0])
    video = user.openai.videos.create_and_poll(
        model="wan", prompt="a cat", poll_interval_ms=50, extra_body={"seed": seed, **sizes}
    )
    assert video.status == "completed", video.error
    with av.open(io.BytesIO(user.openai.videos.download_content(video.id).content)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert frames.shape == made.shape == (9, 16, 32, 3)
    error = (frames - made * 255.0) @ (0.299, 0.587, 0.114)
    assert 10 * np.log10(255**2 / np.square(error).mean()) > 30  # decibels of brightness, after the codec


def test_ranks_are_those_of_transformers(user: User, registered: Any) -> None:
    """As Jina's client asks."""
    [(query, _), *rest] = pairs_of(int(seeded_rng().integers(2**32)), 8)
    texts = [text for _, text in rest]
    stock = stock_logits(user.folder / "ranker", user.stock["ranker"], [(query, text) for text in texts])
    scores = stock.sigmoid()[:, 0].numpy()
    body = {"model": "ranker", "query": query, "documents": texts, "top_n": 5, "return_documents": True}
    found = httpx.post(f"{user.url}/v1/rerank", json=body, timeout=240).json()["results"]
    np.testing.assert_allclose([one["relevance_score"] for one in found], np.sort(scores)[::-1][:5], atol=1e-5)
    np.testing.assert_allclose([scores[one["index"]] for one in found], np.sort(scores)[::-1][:5], atol=1e-5)
    assert [one["document"]["text"] for one in found] == [texts[one["index"]] for one in found]


# What is not right


def without(source: str, part: str) -> Callable[[User, Path], Path]:
    """Return a function that makes a copy of a demo's folder without these files."""

    def write(user: User, folder: Path) -> Path:
        found = shutil.copytree(DEMO_MODELS / source, folder / "copy", ignore=shutil.ignore_patterns(part))
        return Path(found)

    return write


def misspelt(user: User, folder: Path) -> Path:
    shutil.copytree(user.folder / "wan", folder / "copy")
    index = folder / "copy" / "model_index.json"
    index.write_text(index.read_text().replace("WanPipeline", "WanVidPipeline"))
    return folder / "copy"


def with_own_code(user: User, folder: Path) -> Path:
    shutil.copytree(user.folder / "phi", folder / "copy")
    config = json.loads((folder / "copy" / "config.json").read_text())
    config |= {"architectures": ["MineForCausalLM"], "auto_map": {"AutoModelForCausalLM": "mine.MineForCausalLM"}}
    (folder / "copy" / "config.json").write_text(json.dumps(config))
    return folder / "copy"


def single_file(user: User, folder: Path) -> Path:
    return Path(shutil.copy(user.folder / "xl.safetensors", folder))


def truncated(user: User, folder: Path) -> Path:
    (folder / "xl.safetensors").write_bytes((user.folder / "xl.safetensors").read_bytes()[:-1000])
    return folder / "xl.safetensors"


def lacking(user: User, folder: Path) -> Path:
    tensors = load_file(user.folder / "xl.safetensors")
    del tensors["model.diffusion_model.out.0.weight"]
    save_file(tensors, folder / "xl.safetensors")
    return folder / "xl.safetensors"


def whisper(user: User, folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "mine.gguf", "whisper")
    writer.add_tensor("encoder.conv1.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "mine.gguf"


def of_kohya(user: User, folder: Path) -> Path:
    """Write a LoRA in the layout of kohya's trainer, for texts of another width than digits-sdxl's."""
    layer = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
    tensors = {f"{layer}.lora_down.weight": torch.zeros(2, 768), f"{layer}.lora_up.weight": torch.zeros(80, 2)}
    save_file(tensors, folder / "style.safetensors")
    return folder / "style.safetensors"


def image_prompter(user: User, folder: Path) -> Path:
    unet = diffusers.UNet2DConditionModel.from_pretrained(DEMO_MODELS / "digits-sdxl", subfolder="unet")
    style = write_ip_adapter(folder / "style", unet)
    tensors = load_file(style / "ip-adapter.safetensors")
    save_file({name: one for name, one in tensors.items() if ".1." not in name}, style / "ip-adapter.safetensors")
    return style


LIKE: Final = ("--like", "digits-sdxl")
OF_SDXL: Final = ("--base", "digits-sdxl")
BAD: Final[dict[str, tuple[Callable[[User, Path], Path | str], tuple[str, ...], str]]] = {
    "a component": (without("digits-sdxl", "vae"), (), r"vae"),
    "a pipeline's tokenizer": (without("digits-sdxl", "tokenizer_2"), (), r"text_encoder_2 has no tokenizer"),
    "a tokenizer": (without("adder", "tokenizer*"), (), r"tokenizer"),
    "a class": (misspelt, (), r"has no pipeline class 'WanVidPipeline' \(near names: WanPipeline"),
    "code of its own": (with_own_code, (), r"MineForCausalLM"),
    "no like": (single_file, (), r"name the pipeline that it is `like`"),
    "unlike": (
        single_file,
        ("--like", "digits-flux"),
        r"as the FluxTransformer2DModel of 'digits-flux', so it is hardly like",
    ),
    "no such base": (single_file, ("--like", "nothing"), r"nothing"),
    "a tensor": (lacking, LIKE, r"its unet lacks 1 of"),
    "cut short": (truncated, LIKE, r"bytes"),
    "a LoRA of another base": (lambda user, folder: DEMO_MODELS / "bold", OF_SDXL, r"digits-sdxl"),
    "a kohya LoRA of another base": (of_kohya, OF_SDXL, r"\(768, 80\) do not fit a Linear of \(64, 80\)"),
    "a ControlNet of another base": (lambda user, folder: DEMO_MODELS / "outline", OF_SDXL, r"takes a ControlNetModel"),
    "an IP-Adapter of another base": (image_prompter, OF_SDXL, r"has \d+ layers, and 'digits-sdxl' \d+"),
    "a LoRA as a model": (lambda user, folder: DEMO_MODELS / "bold", (), r"LoRA"),
    "another architecture": (whisper, (), r"GGUF architecture 'whisper'"),
    "a revision": (lambda user, folder: "hf://organization/name@nowhere", (), r"HF_HUB_OFFLINE"),
    "not allowed": (lambda user, folder: "hf://stranger/name", (), r"model_roots"),
    "not there": (lambda user, folder: folder / "nowhere", (), r"nowhere"),
    "elsewhere": (lambda user, folder: Path("/etc/hostname"), (), r"model_roots"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_right_is_refused_in_a_sentence_and_is_nowhere(user: User, what: str) -> None:
    write, options, said = BAD[what]
    name = f"bad-{what.replace(' ', '-')}".replace("'", "")
    folder = user.folder / name
    folder.mkdir()
    path = write(user, folder)
    done = user.register(path, name, *options)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.strip().splitlines()
    print(line)  # for those who look at the wording
    assert line.startswith("error: ")
    assert any(one in line for one in (str(path), *options[1:]))
    assert re.search(said, line), line
    listed = httpx.get(f"{user.url}/v1/models", timeout=60).json()["data"]
    assert name not in [model["id"] for model in listed]
    assert user.store.find_manifest(name) is None
