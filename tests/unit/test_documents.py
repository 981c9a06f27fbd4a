"""Names in the documents exist: files, commands with their options, keys of the config, targets of make, paths."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
import yaml
from pydantic import BaseModel, ValidationError

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.cli.main import _app
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service
from deployments.ingress.web_pages import PAGES

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "weights", "cluster", "deployments")
OF_HOUSE = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "BENCHMARKS.md", "infra/demo/README.md")
OF_FOLDERS = [path for package in PACKAGES for path in (ROOT / package).glob("*/README.md")]
DOCUMENTS = [
    *OF_HOUSE,
    *sorted(str(path.relative_to(ROOT)) for path in [*(ROOT / "docs").rglob("*.md"), *OF_FOLDERS]),
]
CARDS = [str(path.relative_to(ROOT)) for path in (ROOT / "infra/demo/models").glob("*/README.md")]
MAX_WORDS = 30_000
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
COMMANDS = typer.main.get_command(_app)
MINIMAL: dict[str, Any] = {"models": [{"id": "m", "path": "/m"}]}


def read(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(text: str, language: str) -> list[str]:
    return [block for found, block in FENCE.findall(text) if found == language]


def spans(text: str) -> list[str]:
    return SPAN.findall(FENCE.sub("", text))


def command_lines(text: str) -> Iterator[str]:
    """Yield the beginnings of the lines of blocks, and spans."""
    for block in blocks(text, ""):
        yield from block.replace("\\\n", "").splitlines()
    yield from spans(text)


def mistakes_of_command(line: str) -> Iterator[str]:
    words = shlex.split(line, comments=True)[1:]
    command: Any = COMMANDS
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            yield f"no command {words[0]!r} in {line!r}"
            return
        command = command.commands[words.pop(0)]
    known = {"--help"} | {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    for word in words:
        option = word.partition("=")[0]
        if re.match(r"--?[a-z]", option) and option not in known:
            yield f"no option {option!r} in {line!r}"


def models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_of(argument)]


def is_key(dotted: str) -> bool:
    models: list[type[BaseModel]] = [ClusterConfig]
    for name in dotted.split("."):
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        models = [model for field in fields for model in models_of(field.annotation)]
    return True


def mistakes_of_config(content: dict[str, Any]) -> Iterator[str]:
    """Yield the values that the schema refuses; models that stand in another block of the page may be named."""
    try:
        ClusterConfig.model_validate(MINIMAL | content)
    except ValidationError as error:
        for one in error.errors():
            if not one["msg"].startswith("unknown model"):
                yield f"{'.'.join(map(str, one['loc']))}: {one['msg']}"


def mapping_of(span: str) -> dict[str, Any] | None:
    """Return a span that is a piece of a config, such as `http: {port: 80}`."""
    section = span.partition(":")[0]
    if ": " not in span or section not in ClusterConfig.model_fields:
        return None
    found = yaml.safe_load(span)
    return found if isinstance(found, dict) and isinstance(found[section], dict) else None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_and_option_exists(document: str) -> None:
    lines = [line for line in command_lines(read(document)) if re.match(r"atelier( |$)", line)]
    assert [mistake for line in lines for mistake in mistakes_of_command(line)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_piece_of_a_config_fits_the_schema(document: str) -> None:
    text = read(document)
    pieces = [yaml.safe_load(block) for block in blocks(text, "yaml")]
    pieces += [piece for span in spans(text) if (piece := mapping_of(span)) is not None]
    assert [mistake for piece in pieces for mistake in mistakes_of_config(piece)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_dotted_key_exists(document: str) -> None:
    keys = {span.partition(":")[0] for span in spans(read(document))}
    dotted = {key for key in keys if re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", key) and not key.endswith((".py", ".md"))}
    of_config = {key for key in dotted if key.split(".")[0] in ClusterConfig.model_fields}
    assert {key for key in of_config if not is_key(key)} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_target_of_make_exists(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = command_lines(read(document))
    assert {found[1] for line in lines if (found := re.match(r"make ([a-z-]+)", line))} - targets == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_exists(document: str) -> None:
    text = read(document)
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", text)
    assert [link for link in links if not ((ROOT / document).parent / link).exists()] == []
    paths = {
        span for span in spans(text) if re.fullmatch(rf"({'|'.join((*PACKAGES, 'tests', 'infra'))})/[\w./-]*", span)
    }
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_files_named_in_a_folders_readme_are_there() -> None:
    for path in OF_FOLDERS:
        named = {span for span in spans(path.read_text()) if re.fullmatch(r"[\w/]+\.py", span)}
        assert {name for name in named if not (ROOT / name).exists() and not any(path.parent.rglob(name))} == set(), (
            path
        )


def test_the_architecture_fits_two_pages() -> None:
    assert len(read("ARCHITECTURE.md").split()) < 1200


def words_of(text: str) -> int:
    """Return how many words a document has; the bars of its tables are none."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def test_all_documents_together_are_short() -> None:
    counted = {*DOCUMENTS, *CARDS, "CHANGELOG.md"} - {"docs/supported.md"}  # a generated table of classes
    sizes = {document: words_of(read(document)) for document in counted}
    assert sum(sizes.values()) < MAX_WORDS, sorted(sizes.items(), key=lambda item: -item[1])[:10]


def test_words_are_counted_without_bars_of_tables() -> None:
    assert words_of("| a key | **two** |\n|---|---|\n\n- 3 x `four`") == 6


def tables_without_a_line_before(text: str) -> list[str]:
    """Return the heads of tables that would be text in the site: a table begins its block."""
    lines = FENCE.sub("", text).splitlines()
    return [
        head
        for above, head, rule in zip(["", *lines], lines, lines[1:], strict=False)
        if re.fullmatch(r"\s*\|(-+\|)+", rule) and above.strip()
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_table_renders(document: str) -> None:
    text = read(document)
    assert tables_without_a_line_before(text) == []
    stray = [
        rows for rows in re.findall(r"^\|[^\n]*\n\n(?=\|)((?:\|[^\n]*\n)+)", text, re.MULTILINE) if "|---" not in rows
    ]
    assert stray == [], "rows behind an empty line belong to no table"


def test_a_table_that_does_not_render_is_found() -> None:
    assert tables_without_a_line_before("12 classes.\n| a | b |\n|---|---|\n") == ["| a | b |"]
    assert tables_without_a_line_before("12 classes.\n\n| a | b |\n|---|---|\n") == []


def test_every_path_of_the_api_is_served() -> None:
    config = ClusterConfig.model_validate(MINIMAL | {"ingress": {"shared_memory": {}}})
    replicas: Any = object()  # nobody asks them
    page = create_http_app(
        Service(config, RegistrySnapshot(NamedActor(lambda: replicas)), replicas, replicas), config
    ).openapi()
    served = {re.sub(r"{[^}]*}", "{}", path) for path in page["paths"]} | {
        "/docs",
        "/chat/completions",
        "/models",
        *PAGES,
    }  # without /v1 they are rewritten; the schema has no pages
    named = {path for span in spans(read("docs/api.md")) for path in re.findall(r"(?:^| )(/[\w/{}.-]+)", span)}
    assert len(named) > 40
    assert {path for path in named if re.sub(r"{[^}]*}", "{}", path) not in served} - {
        "/v1",
        "/v2",
        "/dev/shm",
    } == set()


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("atelier stauts", "no command 'stauts'"),
        ("atelier keys add me --admin --fiel keys", "no option '--fiel'"),
        ("atelier status --why  # --nothing", ""),
    ],
)
def test_wrong_commands_are_found(line: str, mistake: str) -> None:
    found = [*mistakes_of_command(line)]
    assert [text[: len(mistake)] for text in found] == [mistake][: len(found)]
    assert bool(found) == bool(mistake)


def test_wrong_keys_are_found() -> None:
    assert is_key("ingress.image_streams.keep_s")
    assert not is_key("ingress.image_streams.keeps")
    assert [*mistakes_of_config({"http": {"prot": 1}})] == ["http.prot: Extra inputs are not permitted"]
    assert mapping_of("http: {port: 80}") == {"http": {"port": 80}}
