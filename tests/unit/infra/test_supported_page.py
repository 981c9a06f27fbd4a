"""The table of what is served says what registration does, and its page says what the table does."""

from __future__ import annotations

import json

import pytest
from kit.seeding import seeded_random
from typer.testing import CliRunner

from deployments.cli.main import _app
from deployments.cli.models import read_table
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.llm.models.stock_classes import OWN_CACHE, PAGED, RECURRENT, SEEING
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import check_class
from deployments.engines.stock.text_parts import text_parts
from infra.supported import encoders, pipelines
from infra.supported.page import PAGE, page


def test_a_sample_of_pipelines_is_served_as_the_table_says() -> None:
    """The long tests look at all of them."""
    rows = [row for row in read_table() if row.kind == "pipeline" and "not installed" not in row.how]
    for row in seeded_random().sample(rows, 12):
        if row.is_refused:
            with pytest.raises(EngineError) as caught:
                check_class(row.class_name)
            assert row.why == str(caught.value)
            continue
        check_class(row.class_name)
        stock = "stock path" if text_parts(row.class_name) else "stock path, encodes itself"
        assert row.how == ("fast path" if row.class_name in FAMILIES else stock), row.class_name


def test_the_table_has_what_the_engines_know() -> None:
    rows = {(row.kind, row.class_name): row for row in read_table()}
    assert len(rows) == len(read_table())
    ways = {
        "stock path with the paged cache": PAGED,
        "stock path with the paged cache and states": RECURRENT,
        "stock path with its own cache": OWN_CACHE,
    }
    for how, names in (ways | {"stock path with the paged cache, sees images": SEEING}).items():
        assert all(rows["language model", name].how == how for name in names)
    assert all(rows["pipeline", name].is_equal for name in (*pipelines.COMPARED, *FAMILIES))
    for kind, known in (("encoder", encoders.ENCODERS), ("classifier", encoders.CLASSIFIERS)):
        own = [name for found, name in rows if found == kind]
        assert sorted(own) == sorted(row.class_name for row in known)


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_table())


def test_the_command_line_prints_the_table() -> None:
    shown = CliRunner().invoke(_app, ["models", "--supported", "--wide"])
    assert shown.exit_code == 0
    assert "refused: " in shown.output
    printed = CliRunner().invoke(_app, ["models", "--supported", "--json"])
    assert [tuple(row.values()) for row in json.loads(printed.output)["classes"]] == read_table()
