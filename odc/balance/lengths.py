"""Lengths from a file, for planning and simulating without the data itself.

Chose to tell the format by the content over the file's name: lengths come out of other tools' logs under any name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from odc.errors import DataError


def read_lengths(path: str | Path, field: str = "length") -> list[int]:
    """Tokens of every sample listed in a file.

    The file holds integers between spaces, commas or line ends; or a JSON list; or JSON lines. Elements of a list and
    lines are integers or objects whose `field` is an integer or a list (such as `input_ids`), which counts its items.
    Raises DataError naming the file and the element that is none of these.
    """
    return [_length(element, field, f"{path}: element {i}") for i, element in enumerate(read_elements(path))]


def read_elements(path: str | Path) -> list[Any]:
    """What a file of lengths lists: integers, or objects. Raises DataError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from error
    start = text.lstrip()[:1]
    try:
        if start == "[":
            elements = json.loads(text)
        elif start == "{":
            elements = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            elements = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise DataError(f"{path}: neither integers, nor a JSON list, nor JSON lines: {error}") from error
    if not elements:
        raise DataError(f"{path}: lists no lengths")
    return list(elements)


def _length(element: Any, field: str, where: str) -> int:
    if isinstance(element, dict):
        if field not in element:
            raise DataError(f"{where} has no field {field!r}")
        element = element[field]
    if isinstance(element, list):
        return len(element)
    if isinstance(element, bool) or not isinstance(element, int):
        raise DataError(f"{where} is {element!r}, neither an integer nor a list")
    return element
