"""Makes the contact sheets of the documents: python infra/demo/contact_sheets.py [--url URL] [--out FOLDER] [--seed N].

Beside them lies the outline of a five, to try the ControlNet with.

All images come from the demo cluster through OpenAI's client. The same seed gives the same sheets: on the CPU, no
image depends on what is computed beside it.
"""

from __future__ import annotations

import argparse
import base64
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from PIL import Image, ImageDraw, ImageFont

from digits import WORDS, first_of_each, load_split, outline, to_image
from measure_pipelines import demo_cluster
from run_demo import EDIT_STRENGTH

SHEETS = Path(__file__).parent / "sheets"
SIDE = 64
LABEL_WIDTH = 210
GREY_LEVELS = 32
NEUTRAL_PROMPT = "a handwritten digit"
PARTIAL_IMAGES = 3


@dataclass(frozen=True)
class SheetRow:
    """Ten images and their label."""

    label: str
    images: list[Image.Image]


class Painter:
    """Asks a cluster for ten images at a time."""

    def __init__(self, url: str, seed: int) -> None:
        direct = openai.DefaultHttpxClient(trust_env=False)
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=direct)
        self._seed = seed

    def paint(self, model: str, options: Callable[[int], dict[str, Any]] = lambda _: {}) -> list[Image.Image]:
        """One of each digit; `options` has further fields of the request, such as its prompt."""

        def ask(digit: int) -> Image.Image:
            answer = self._client.images.generate(**self._request(model, digit, options(digit)))
            return _image(answer.data[0].b64_json)

        return self._all(ask)

    def paint_partially(self, model: str) -> list[list[tuple[str, Image.Image]]]:
        """For each digit its partial images and the completed one, with their steps."""

        def ask(digit: int) -> list[tuple[str, Image.Image]]:
            request = self._request(model, digit, {})
            events = self._client.images.generate(**request, stream=True, partial_images=PARTIAL_IMAGES)
            return [(_step(event), _image(event.b64_json)) for event in events]

        return self._all(ask)

    def _request(self, model: str, digit: int, options: dict[str, Any]) -> dict[str, Any]:
        extra = {"seed": self._seed + digit} | options
        prompt = extra.pop("prompt", f"a handwritten {WORDS[digit]}")
        return {"model": model, "prompt": prompt, "extra_body": extra}

    def _all(self, ask: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(10) as pool:
            return list(pool.map(ask, range(10)))


def digits_sheet(painter: Painter) -> list[SheetRow]:
    """The digits that the three pipelines draw."""
    names = ("digits-flux", "digits-flux-inverted", "digits-sdxl")
    return [SheetRow(name, painter.paint(name)) for name in names]


def changes_sheet(painter: Painter) -> list[SheetRow]:
    """A LoRA, a ControlNet and image-to-image, each with its input."""
    plain, outlines = painter.paint("digits-flux"), unseen_outlines()

    def follow(digit: int) -> dict[str, Any]:
        return {"prompt": NEUTRAL_PROMPT, "control": [{"name": "outline", "image": _file(outlines[digit])}]}

    def edit(digit: int) -> dict[str, Any]:
        prompt = f"a handwritten {WORDS[(digit + 5) % 10]}"
        return {"prompt": prompt, "init_image": _file(plain[digit]), "strength": EDIT_STRENGTH}

    return [
        SheetRow("digits-flux", plain),
        SheetRow("LoRA: bold", painter.paint("digits-flux", lambda _: {"lora": [{"name": "bold"}]})),
        SheetRow("image to image: 5 more", painter.paint("digits-flux", edit)),
        SheetRow("outlines", outlines),
        SheetRow("ControlNet: outline", painter.paint("digits-flux", follow)),
    ]


def unseen_outlines() -> list[Image.Image]:
    """The outlines of ten digits that no model has seen."""
    return [to_image(ink) for ink in outline(first_of_each(load_split()[1], 1).ink)]


def partial_sheet(painter: Painter) -> list[SheetRow]:
    """The partial images of a stream."""
    rows = []
    for name in ("digits-flux", "digits-sdxl"):
        columns = painter.paint_partially(name)
        for place, (step, _) in enumerate(columns[0]):
            rows.append(SheetRow(f"{name}, {step}", [column[place][1] for column in columns]))
    return rows


def draw_sheet(rows: list[SheetRow]) -> Image.Image:
    """Labels on the left, ten images to a row."""
    sheet = Image.new("L", (LABEL_WIDTH + 10 * SIDE, SIDE * len(rows)), 255)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for number, row in enumerate(rows):
        pen.text((6, SIDE * number + SIDE // 2), row.label, fill=0, font=font, anchor="lm")
        for column, image in enumerate(row.images):
            enlarged = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            sheet.paste(enlarged, (LABEL_WIDTH + column * SIDE, number * SIDE))
    return sheet.quantize(GREY_LEVELS)


def _step(event: Any) -> str:
    is_partial = event.type.endswith("partial_image")
    return f"step {event.step} of {event.num_steps}" if is_partial else "completed"


def _image(b64_json: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64_json)))


def _file(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the contact sheets of the documents.")
    parser.add_argument("--url", help="of a running demo cluster; default: start one")
    parser.add_argument("--out", type=Path, default=SHEETS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    unseen_outlines()[5].save(options.out / "outline-five.png")  # to try the ControlNet with
    with nullcontext(options.url) if options.url else demo_cluster() as url:
        painter = Painter(url, options.seed)
        for name, make_rows in (("digits", digits_sheet), ("changes", changes_sheet), ("partial", partial_sheet)):
            path = options.out / f"{name}.png"
            draw_sheet(make_rows(painter)).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
