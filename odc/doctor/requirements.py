"""What odc's extras need, as its installed metadata lists it, and versions as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata

_DISTRIBUTION = "odc-fsdp"
_DEVELOPERS = frozenset({"test", "lint", "dev"})
_REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?\s*([^;]*?)\s*;.*extra\s*==\s*['\"]([^'\"]+)['\"]")


def names_of_extras() -> list[str]:
    """The installed odc's extras, without those for developers; none where it runs from source."""
    try:
        return [name for name in by_extra(metadata.requires(_DISTRIBUTION) or []) if name not in _DEVELOPERS]
    except metadata.PackageNotFoundError:
        return []


def packages_of(extra: str) -> list[tuple[str, str]]:
    """[(package, condition)] of one of `names_of_extras`."""
    return by_extra(metadata.requires(_DISTRIBUTION) or [])[extra]


def by_extra(requires: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """{extra: [(package, condition)]} from lines of metadata; an extra that names others has their packages as well."""
    rows = [match.groups() for line in requires if (match := _REQUIREMENT.match(line))]

    def packages(extra: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for package, inner, condition, of in rows:
            if of == extra and package == _DISTRIBUTION:
                found += [one for name in inner.split(",") for one in packages(name.strip())]
            elif of == extra:
                found.append((package, condition))
        return found

    return {extra: packages(extra) for extra in dict.fromkeys(row[3] for row in rows)}


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    leading = re.match(r"(?:\d+\.)*\d+", text)
    return tuple(int(number) for number in leading[0].split(".")) if leading else ()
