"""Names of models on a hub, as people copy them: from a page's address, or without anything before them."""

from __future__ import annotations

import re
from typing import Final

_PAGES: Final = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<name>[^/?#]+/[^/?#]+)(?P<rest>/[^?#]*)?(?:[?#].*)?"
)
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_hint(source: str) -> str:
    """Return the `hf://` URL that somebody meant by a page's address or a bare name; "" where it is neither."""
    if page := _PAGES.fullmatch(source):
        rest = re.sub(r"^/(resolve|blob|tree)/(?P<revision>[^/]+)", r"@\g<revision>", page["rest"] or "").rstrip("/")
        return f"hf://{page['name']}{rest.removeprefix('@main') if rest.startswith('@main') else rest}"
    return f"hf://{source}" if _NAME.fullmatch(source) else ""
