"""The demo: start the cluster, ask each model once, print the answers.

`make demo` stays up afterwards; `make demo ONCE=1` ends with 0 when every answer was right. `make demo DEVICE=sim` puts
workers and text encoders on simulated accelerators, `DEVICE=cuda` on a card.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.console.client import Client
from deployments.console.progress import StartDisplay
from deployments.console.running import cluster_up
from digits import WORDS, Judge, first_of_each, ink_of_images, load_split, outline, to_image
from ink_statistics import ink_areas

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/clusters/demo.yaml"
OUT = ROOT / "out"
PHASES = ("queue", "encode", "switch", "denoise", "decode", "prefill", "generate", "total")
SEED = 7
UNLOAD_S = 10.0
EDIT_STRENGTH = 0.8
MIN_READABLE = 8  # of ten digits, a classifier must read so many; single seeds may be scrawls
NUMBERS_WIDTH = 24  # of the table's columns with numbers, and of what is between all columns
console = Console()


@dataclass(frozen=True)
class Row:
    """One line of the table. `right` decides the exit code."""

    what: str
    answer: str
    right: bool
    timings_ms: dict[str, float]
    cache: str = ""


class Demo:
    """The requests, each through HTTP."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.rows: list[Row] = []
        seen, unseen = load_split()
        self._judge = Judge(seen)
        self._outlines = [to_image(ink) for ink in outline(first_of_each(unseen, 1).ink)]

    def run(self) -> bool:
        plain = self._digits("ten digits", "digits-flux", "digits.png")
        self._digits("ten digits, inverted", "digits-flux-inverted", "digits-inverted.png")
        bold = self._digits(
            "ten digits, LoRA bold", "digits-flux", "digits-bold.png", [{"lora": [{"name": "bold"}]}] * 10
        )
        self._compare_ink(plain, bold)
        self._follow_outlines()
        self._edit(plain)
        self._chat("What is 12 + 7?", "19.")
        self._embed()
        for model in ("digits-flux", "digits-sdxl", "digits-flux"):
            self._one_digit(f"switch to {model}", model)
        self._sdxl_sheet()
        self._one_digit("by diffusers' own code", "digits-sdxl-pag")
        self._draw_a_sum("3 + 4", 7)
        self._classify("so tired of this rain, who else wants to be at the beach right now :)", "tweet")
        self._burst(["digits-flux", "digits-flux-inverted", "digits-sdxl"])
        return all(row.right for row in self.rows)

    def _digits(
        self,
        what: str,
        model: str,
        file: str,
        options: Sequence[dict[str, Any]] = ({},) * 10,
        wanted: Sequence[int] = range(10),
    ) -> list[Image.Image]:
        """Ten requests at once: they meet in the worker's step loop. `wanted` are the digits that should come out."""

        def ask(number: int) -> Any:
            body = {"model": model, "prompt": f"a handwritten {WORDS[wanted[number]]}", "seed": SEED + number}
            return self.client.generate(**body | options[number])

        start = time.perf_counter()
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(ask, range(10)))
        elapsed_ms = (time.perf_counter() - start) * 1e3
        images = [Image.open(io.BytesIO(answer.files[0])) for answer in answers]
        contact_sheet(images).save(OUT / file)
        read = self._judge.read(images)
        hits = sum(answer.details["encoder_cache"]["hits"] for answer in answers)
        misses = sum(answer.details["encoder_cache"]["misses"] for answer in answers)
        times = {phase: float(np.median([a.details["timings_ms"].get(phase, 0) for a in answers])) for phase in PHASES}
        times = {phase: ms for phase, ms in times.items() if ms} | {"total": elapsed_ms}
        right = int((read == np.array(wanted)).sum())
        answer = f"{right} of 10 read right: {' '.join(map(str, read))}"
        self.rows.append(Row(f"{what} -> {file}", answer, right >= MIN_READABLE, times, f"{hits} of {hits + misses}"))
        return images

    def _follow_outlines(self) -> None:
        """Give a ControlNet the outlines of digits that no model has seen; the prompt names no digit."""
        options = [
            {"prompt": "a handwritten digit", "control": [{"name": "outline", "image": _png(image)}]}
            for image in self._outlines
        ]
        self._digits("ten outlines, ControlNet", "digits-flux", "digits-outline.png", options)

    def _edit(self, images: Sequence[Image.Image]) -> None:
        """Begin at images of digits, and ask for others."""
        options = [{"init_image": _png(image), "strength": EDIT_STRENGTH} for image in images]
        wanted = [(number + 5) % 10 for number in range(10)]
        self._digits("ten digits become others", "digits-flux", "digits-edited.png", options, wanted)

    def _compare_ink(self, plain: Sequence[Image.Image], bold: Sequence[Image.Image]) -> None:
        before, after = (ink_areas(ink_of_images(images)).mean() for images in (plain, bold))
        ratio = after / before
        self.rows.append(Row("ink of bold / plain", f"{ratio:.2f}", bool(ratio > 1.1), {}))

    def _chat(self, question: str, expected: str) -> None:
        body = self.client.chat(model="adder", messages=[{"role": "user", "content": question}])
        text = body["choices"][0]["message"]["content"]
        self.rows.append(Row(f"chat: {question}", text, text == expected, body["timings_ms"]))

    def _embed(self) -> None:
        texts = [*(f"a handwritten {word}" for word in WORDS), "the digit 7"]
        body = self.client.embed(model="digits-clip", input=texts)
        vectors = np.array([item["embedding"] for item in body["data"]])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        nearest = int((vectors[:10] @ vectors[10]).argmax())
        cache = body["encoder_cache"]
        used = f"{cache['hits']} of {cache['hits'] + cache['misses']}"
        answer = f'"the digit 7" is nearest to "{texts[nearest]}"'
        self.rows.append(Row("embeddings", answer, nearest == 7, body["timings_ms"], used))

    def _one_digit(self, what: str, model: str) -> None:
        answer = self.client.generate(model=model, prompt="a handwritten seven", seed=SEED)
        read = int(self._judge.read([Image.open(io.BytesIO(answer.files[0]))])[0])
        switch, cache = answer.details["switch"], answer.details["encoder_cache"]
        kept = f", kept {', '.join(switch['reused'])}" if switch["reused"] else ""
        text = f"a {read}; attached {switch['attached_bytes'] / 2**20:.1f} MiB in {switch['attach_ms']:.1f} ms{kept}"
        used = f"{cache['hits']} of {cache['hits'] + cache['misses']}"
        self.rows.append(Row(what, text, read == 7, answer.details["timings_ms"], used))

    def _draw_a_sum(self, total: str, expected: int) -> None:
        """A language model and a Flux pipeline, chained to one model."""
        answer = self.client.generate(model="sum-to-digit", prompt=total, seed=SEED)
        read = int(self._judge.read([Image.open(io.BytesIO(answer.files[0]))])[0])
        self.rows.append(Row(f"pipeline: {total}", f"a {read}", read == expected, answer.details["timings_ms"]))

    def _classify(self, text: str, expected: str) -> None:
        """Tokenizer, BERT and head, in one call of the text-encoder service."""
        body = self.client.chat(model="text-classifier", messages=[{"role": "user", "content": text}])
        label = body["choices"][0]["message"]["content"]
        self.rows.append(Row(f"pipeline: {text[:24]}…", label, label == expected, body["timings_ms"]))

    def _burst(self, models: Sequence[str]) -> None:
        """Thirty requests at once for evicted models, and the controller's orders with their reasons.

        A switch shorter than a request needs no order: the request makes it, on any worker.
        """
        for model in models:
            self._unload(model)
        before_s = time.time()

        def ask(model: str, number: int) -> Any:
            return self.client.generate(model=model, prompt=f"a handwritten {WORDS[number]}", seed=SEED + number)

        wanted = [(model, number) for number in range(10) for model in models]
        start = time.perf_counter()
        with ThreadPoolExecutor(len(wanted)) as pool:
            answers = list(pool.map(lambda pair: ask(*pair), wanted))
        elapsed_ms = (time.perf_counter() - start) * 1e3
        read = self._judge.read([Image.open(io.BytesIO(answer.files[0])) for answer in answers])
        right = sum(int(digit) == number for digit, (_, number) in zip(read, wanted, strict=True))
        readable = right >= MIN_READABLE * len(models)
        text = f"{right} of {len(wanted)} read right"
        self.rows.append(Row(f"burst over {len(models)} models", text, readable, {"total": elapsed_ms}))
        decided = self.client.decisions(100)
        made = [one for one in decided["decisions"] if one["at_s"] >= before_s]
        for one in reversed(made):
            what = f"controller: {one['action']} {one['worker']} to {one['model']}"
            times = {"switch": one["took_s"] * 1e3} if one["took_s"] else {}
            self.rows.append(Row(what, one["reason"], not one["state"].startswith("failed"), times))
        switches = [switch for each in answers if (switch := each.details["switch"]) and switch["built"]]
        for switch in switches:
            reason = decided["free"].get(switch["model"], "its request came before the order")
            text = f"{', '.join(switch['built'])}, {switch['attached_bytes'] / 2**20:.1f} MiB; no order: {reason}"
            self.rows.append(Row(f"switch to {switch['model']}", text, True, {"switch": switch["switch_ms"]}))
        self.rows.append(Row("switches of the burst", f"{len(made) + len(switches)}", bool(made or switches), {}))

    def _unload(self, model: str) -> None:
        """Evict a model. A request that was just answered may hold it for a moment."""
        end_s = time.monotonic() + UNLOAD_S
        while True:
            answer = httpx.post(f"{self.client.url}/v2/repository/models/{model}/unload", timeout=60, trust_env=False)
            if answer.status_code != 409 or time.monotonic() > end_s:
                answer.raise_for_status()
                return
            time.sleep(0.1)

    def _sdxl_sheet(self) -> None:
        self._digits("ten digits, SDXL", "digits-sdxl", "digits-sdxl.png")


def _png(image: Image.Image) -> str:
    """The file in base64, as JSON has it."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def contact_sheet(images: Sequence[Image.Image], scale: int = 4) -> Image.Image:
    """Five in a row, enlarged."""
    width, height = (side * scale for side in images[0].size)
    sheet = Image.new("RGB", (width * 5, height * ((len(images) + 4) // 5)))
    for index, image in enumerate(images):
        enlarged = image.resize((width, height), Image.Resampling.BICUBIC)
        sheet.paste(enlarged, (index % 5 * width, index // 5 * height))
    return sheet


def print_rows(rows: Sequence[Row], to: Console = console) -> None:
    """Print in one sentence whether it worked, then a line for each row, cut where the terminal ends."""
    wrong = [row.what for row in rows if not row.right]
    verdict = f"{len(wrong)} of {len(rows)} answers were wrong: {'; '.join(wrong)}." if wrong else ""
    to.print(verdict or f"It worked: all {len(rows)} answers were right.", style="red" if wrong else "green")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    asked = (to.width - NUMBERS_WIDTH) * 5 // 11
    for name, width in (("asked", asked), ("answer", to.width - NUMBERS_WIDTH - asked)):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=width)
    for name in ("ms", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        text = Text(row.answer) if row.right else Text.assemble(("WRONG ", "red"), row.answer)
        took_ms = row.timings_ms.get("total", row.timings_ms.get("switch"))
        table.add_row(
            Text(row.what), text, "" if took_ms is None else f"{took_ms:,.0f}", row.cache.replace(" of ", "/")
        )
    to.print(table)


def on_device(config: ClusterConfig, device: str) -> ClusterConfig:
    """Return the config with its models on cpu, cuda or sim. Of simulated devices, each service has one of its own."""
    data = config.model_dump()
    for number, service in enumerate(("worker", "text_encoder")):
        data[service]["device"] = f"sim:{number}" if device == "sim" else device
    data["simulated"]["num_devices"] = 2
    return ClusterConfig.model_validate(data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="end after the table")
    parser.add_argument("--port", type=int, help="instead of the config's")
    parser.add_argument("--url", help="ask a cluster of the demo's config that is up there, and end after the table")
    parser.add_argument("--device", choices=("cpu", "cuda", "sim"), default="cpu", help="where the models compute")
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    if options.url:
        return 0 if ask_for_everything(options.url) else 1
    config = on_device(load_cluster_config(CONFIG), options.device)
    if options.port:
        config = config.model_copy(update={"http": config.http.model_copy(update={"port": options.port})})
    stop = threading.Event()
    with (
        StartDisplay("starting the cluster", console) as display,
        cluster_up(config, str(CONFIG), stop, display.show) as url,
    ):
        display.close()
        console.print(f"the cluster is up at {url} after {display.elapsed_s:.1f} s; open {url}/ in a browser")
        right = ask_for_everything(url)
        if not options.once:
            console.print(HOW_TO_TALK.format(url=url), markup=False, soft_wrap=True)
            stop.wait()
    return 0 if right else 1


def ask_for_everything(url: str) -> bool:
    """Print the answers of a cluster. Returns whether all are right."""
    demo = Demo(Client(url))
    with console.status("asking it for everything once"):
        right = demo.run()
    print_rows(demo.rows)
    console.print(f"images: {', '.join(sorted(str(p.relative_to(ROOT)) for p in OUT.glob('digits*.png')))}")
    return right


HOW_TO_TALK = """
The cluster stays up until Ctrl-C. In a browser: {url}/ to create images, {url}/cluster to see it work.
In another terminal:
  . .venv/bin/activate
  atelier generate "a handwritten five" --lora bold -o out/five.png
  atelier generate "a handwritten digit" --control outline:infra/demo/sheets/outline-five.png -o out/outlined.png
  atelier generate "a handwritten six" --image out/five.png --strength 0.8 -o out/six.png
  atelier chat "What is 30 + 12?"
  atelier generate "3 + 4" -m sum-to-digit -o out/seven.png
  atelier status
  curl {url}/v1/images/generations -H 'content-type: application/json' \\
    -d '{{"model": "digits-flux", "prompt": "a handwritten five", "seed": 1}}'
Interactive API documentation: {url}/docs"""

if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        from cluster.records.errors import ClusterError
        from configs.errors import ConfigError

        if not isinstance(error, ClusterError | ConfigError):
            raise
        Console(stderr=True).print(f"[red]error:[/red] {error}", soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
