"""Writes what the pages take from the table of the protocol: `python tests/support/protocol_pages.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from odc.protocol.table import diagram, tables

DOCS = Path(__file__).parents[2] / "docs"
#: Each page, the name of its markers, and what stands between them.
BLOCKS: tuple[tuple[Path, str, Callable[[], str]], ...] = (
    (DOCS / "words.md", "words", tables),
    (DOCS / "protocol.md", "order", lambda: f"```\n{diagram()}```\n"),
)


def replaced(text: str, name: str, block: str) -> str:
    """The page with a new block between its markers, which it must have."""
    between = re.compile(rf"(<!-- {name}:begin -->\n).*(<!-- {name}:end -->)", re.DOTALL)
    found, count = between.subn(lambda match: f"{match[1]}\n{block}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"the markers of {name} stand {count} times on the page")
    return found


if __name__ == "__main__":
    for page, name, block in BLOCKS:
        page.write_text(replaced(page.read_text(encoding="utf-8"), name, block()), encoding="utf-8")
