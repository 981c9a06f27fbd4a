"""The table of classes that are served, as `infra/supported/page.py` wrote it: `atelier models --supported`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from deployments.cli.output import Column, print_table

TABLE: Final = Path(__file__).with_name("supported.json")
_COLUMNS: Final = (Column("class"), Column("kind"), Column("way"), Column("compared"))
_REFUSED: Final = "refused: "


class SupportedClass(NamedTuple):
    """A class of a library; `how` it is served, or "refused: " and why; what it `makes`, "" if nothing.

    `is_equal`: a tiny model of it is compared with its own library by the long tests.
    """

    kind: str
    class_name: str
    how: str
    makes: str
    is_equal: bool

    @property
    def is_refused(self) -> bool:
        return self.how.startswith(_REFUSED)

    @property
    def why(self) -> str:
        """Return why it is refused."""
        return self.how.removeprefix(_REFUSED)


def read_table() -> list[SupportedClass]:
    """Return the rows of the table."""
    return [SupportedClass(*row) for row in json.loads(TABLE.read_text(encoding="utf-8"))]


def print_supported(*, wide: bool = False) -> None:
    """Print all classes and how each is served."""
    rows = read_table()
    cells = [[row.class_name, row.kind, row.how, "equal" if row.is_equal else ""] for row in rows]
    print_table(_COLUMNS, cells, wide=wide, title=_counts(rows))


def _counts(rows: list[SupportedClass]) -> str:
    served = Counter(row.kind for row in rows if not row.is_refused)
    return ", ".join(f"{count} {kind}s" for kind, count in served.items()) + " served"
