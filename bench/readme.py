"""Writes the figures that the README and docs/ quote, and the pictures of docs/ made of them: `python -m bench.readme`.

A page holds a quote between `<!-- figures:NAME -->` and `<!-- figures:end -->`. The words of a quote stand in
bench/quotes.md under `## NAME`, with a replacement field (as of `str.format`) for each figure; `bench.quotes` takes the
figures from stored results. A test compares the pages with both, so that no figure can drift.

A line of a quote is a paragraph or a row of a table. A row that begins with `|*` is repeated for each of the `rows`,
one with `|*NAME` for each of the figures NAME.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from bench import changes_picture, hosts_picture, quotes
from odc.bench.report import table

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "results" / "README.md")
TEMPLATES = Path(__file__).parent / "quotes.md"
_BLOCK = re.compile(r"(<!-- figures:(?!end)([a-z_]+) -->\n)(?:.*?\n)??(<!-- figures:end -->)", re.DOTALL)


def replaced(text: str) -> str:
    """A page with all its quotes made anew; raises KeyError for one without a template."""
    made = templates()
    return _BLOCK.sub(lambda found: f"{found[1]}{quote(made[found[2]], found[2])}\n{found[3]}", text)


def names(text: str) -> list[str]:
    """The names of a page's quotes."""
    return [found[2] for found in _BLOCK.finditer(text)]


def templates() -> dict[str, str]:
    """The words of every quote, by name."""
    parts = re.split(r"^## (\w+)\n", TEMPLATES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def quote(template: str, name: str) -> str:
    """A quote as it stands on a page; of a result that is new, until it is stored, that it is."""
    try:
        figures = quotes.figures_of(name)
    except FileNotFoundError:
        return "*These figures have not been taken yet.*"
    made = list[str]()
    for in_table, lines in groupby(template.splitlines(), key=lambda line: line.startswith("|")):
        if in_table:
            made.append(table(list(_rows(lines, figures))))
        else:
            made += (_paragraph(line, figures) for line in lines)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(made)).strip()


def _paragraph(line: str, figures: Mapping[str, Any]) -> str:
    text, indent = line.format_map(figures), "  " if line.startswith("* ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _rows(lines: Iterable[str], figures: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The rows of a table by its heads, which are its first line."""
    filled = []
    for line in lines:
        repeated = re.match(r"\|\*(\w*)", line)
        many = figures[repeated[1] or "rows"] if repeated else [{}]
        filled += [line[repeated.end() if repeated else 1 :].format_map({**figures, **row}) for row in many]
    heads, *cells = ([cell.strip() for cell in line.strip()[:-1].split("|")] for line in filled)
    for row in cells:
        yield dict(zip(heads, row, strict=True))


def write() -> None:
    """Writes all pages and the picture."""
    for page in PAGES:
        page.write_text(replaced(page.read_text(encoding="utf-8")), encoding="utf-8")
    for picture in (hosts_picture, changes_picture):
        picture.PICTURE.write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    write()
    print(f"wrote the figures of {len(templates())} quotes into {len(PAGES)} pages")
