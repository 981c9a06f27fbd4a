"""Measures the demo pipelines over HTTP: python infra/demo/measure_pipelines.py [--url URL] [--json].

Asks them what they are for, with the clients that people use: `sum-to-digit` for images of sums, which a classifier
reads, and `text-classifier` for the kinds of texts that no training saw; each with OpenAI's client and with
tritonclient, which lives in the environment of `make judges`. Exit code 1 when a share is below its target.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import openai
from PIL import Image
from rich.console import Console
from rich.table import Table

from digits import Judge, load_split
from texts_data import KINDS, read_held_out_sample

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/clusters/demo.yaml"
JUDGES_PYTHON = ROOT / ".judges/protocol/bin/python"
DIGITS_TARGET = 0.95
TEXTS_TARGET = 0.85
CONCURRENCY = 4
Images = list[np.ndarray | None]
ALL_SUMS = [(first, second) for first in range(10) for second in range(10 - first)]


def draw_sums(number: int, seed: int) -> list[tuple[int, int]]:
    """Each of the sums up to nine about equally often, in any order."""
    rng = np.random.default_rng(seed)
    rounds = [rng.permutation(len(ALL_SUMS)) for _ in range(-(-number // len(ALL_SUMS)))]
    return [ALL_SUMS[index] for index in np.concatenate(rounds)[:number]]


def openai_images(client: openai.OpenAI, sums: list[str], seeds: list[int]) -> Images:
    def image(prompt: str, seed: int) -> np.ndarray | None:
        try:
            answer = client.images.generate(model="sum-to-digit", prompt=prompt, extra_body={"seed": seed})
        except openai.BadRequestError:  # the adder was wrong, and its answer is no digit
            return None
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(image, sums, seeds))


def openai_labels(client: openai.OpenAI, texts: list[str]) -> list[str]:
    def label(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(model="text-classifier", messages=messages).choices[0].message.content

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(label, texts))


def triton_answers(url: str, sums: list[str], seeds: list[int], texts: list[str]) -> tuple[Images, list[str]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "questions.json").write_text(json.dumps({"sums": sums, "seeds": seeds, "texts": texts}))
        script = Path(__file__).with_name("ask_triton.py")
        subprocess.run([str(JUDGES_PYTHON), "-P", str(script), url.removeprefix("http://"), place], check=True)
        answers = json.loads((folder / "answers.json").read_text())
    images = [None if image is None else np.array(image, np.uint8) for image in answers["images"]]
    return images, answers["labels"]


def share_read(judge: Judge, images: Images, digits: list[int]) -> float:
    """Return the share of all that are right; an image that is missing is not."""
    there = [(image, digit) for image, digit in zip(images, digits, strict=True) if image is not None]
    read = judge.read([image for image, _ in there])
    return float((read == np.array([digit for _, digit in there])).sum() / len(digits))


def measure(url: str, num_sums: int, seed: int) -> dict[str, dict[str, float]]:
    """The shares of right answers, by client."""
    pairs = draw_sums(num_sums, seed)
    sums, digits = [f"{first} + {second}" for first, second in pairs], [sum(pair) for pair in pairs]
    seeds = list(range(num_sums))
    examples = read_held_out_sample()
    texts, kinds = [text for text, _ in examples], [KINDS[kind] for _, kind in examples]
    direct = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=direct)
    answers = {
        "openai": (openai_images(client, sums, seeds), openai_labels(client, texts)),
        "tritonclient": triton_answers(url, sums, seeds, texts),
    }
    judge = Judge(load_split()[0])
    return {
        name: {
            "sum-to-digit": share_read(judge, images, digits),
            "text-classifier": float(np.mean([label == kind for label, kind in zip(labels, kinds, strict=True)])),
        }
        for name, (images, labels) in answers.items()
    }


@contextmanager
def demo_cluster() -> Iterator[str]:
    """The demo cluster on ports and a store of its own, for the length of the block."""
    from configs.cluster import ClusterConfig
    from configs.loading import load_cluster_config
    from deployments.console.running import cluster_up
    from infra.ports import free_port

    with tempfile.TemporaryDirectory() as store:
        fields = load_cluster_config(CONFIG).model_dump(mode="json")
        ports = {"http": {"port": free_port()}, "grpc": {"port": free_port()}}
        config = ClusterConfig.model_validate(fields | ports | {"name": "measured", "store": {"path": store}})
        with cluster_up(config, str(CONFIG)) as url:
            yield url


def show(console: Console, results: dict[str, dict[str, float]], num_sums: int) -> None:
    table = Table("client", "sum-to-digit", "text-classifier", title=f"{num_sums} sums and 200 texts, share right")
    for client, shares in results.items():
        table.add_row(client, *(f"{share:.1%}" for share in shares.values()))
    table.add_row("target", f"{DIGITS_TARGET:.0%}", f"{TEXTS_TARGET:.0%}")
    console.print(table)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the demo pipelines with the clients that people use.")
    parser.add_argument("--url", help="of a running demo cluster; default: start one")
    parser.add_argument("--sums", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if not JUDGES_PYTHON.exists():
        sys.exit(f"there is no {JUDGES_PYTHON}: run `make judges`")
    if options.url:
        results = measure(options.url, options.sums, options.seed)
    else:
        with demo_cluster() as url:
            results = measure(url, options.sums, options.seed)
    if options.json:
        print(json.dumps({"sums": options.sums, "clients": results}))
    else:
        show(Console(), results, options.sums)
    targets = {"sum-to-digit": DIGITS_TARGET, "text-classifier": TEXTS_TARGET}
    return 0 if all(shares[name] >= targets[name] for shares in results.values() for name in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
