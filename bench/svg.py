"""The frame of a drawn picture."""

from __future__ import annotations

from collections.abc import Iterable

_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#1f2328">
<rect width="{width}" height="{height}" fill="#ffffff"/>"""


def document(width: int, height: int, elements: Iterable[str]) -> str:
    """A whole picture, in pixels, on white."""
    return "\n".join([_HEAD.format(width=width, height=height), *elements, "</svg>", ""])
