"""Which of torch's tests are run, and why the others are not."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True)
class Exclusion:
    """Tests that do not apply.

    Args:
        reason: one sentence.
        tests: patterns of `file::Class::method`; the file without its folder and ending.
    """

    reason: str
    tests: tuple[str, ...]


@dataclass
class Selection:
    """The listed exclusions, and which of their patterns named a test."""

    exclusions: list[Exclusion]
    used: set[str] = field(default_factory=set)

    def reason(self, name: str) -> str | None:
        """Why the test does not apply; None if it does."""
        for exclusion in self.exclusions:
            for pattern in exclusion.tests:
                if fnmatchcase(name, pattern):
                    self.used.add(pattern)
                    return exclusion.reason
        return None

    def unused(self) -> list[str]:
        """Patterns that named no test: another version of torch has them, or they are out of date."""
        return [pattern for exclusion in self.exclusions for pattern in exclusion.tests if pattern not in self.used]


def read(path: Path) -> Selection:
    """Read `not_applicable.toml`.

    Raises:
        ValueError: an entry without a reason or without tests, or a pattern that is listed twice.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("exclusion", [])
    exclusions = [Exclusion(entry.get("reason", "").strip(), tuple(entry.get("tests", ()))) for entry in entries]
    for exclusion in exclusions:
        if not exclusion.reason or not exclusion.tests:
            raise ValueError(f"{path}: every exclusion has a reason and tests, got {exclusion}")
    patterns = [pattern for exclusion in exclusions for pattern in exclusion.tests]
    if twice := sorted({pattern for pattern in patterns if patterns.count(pattern) > 1}):
        raise ValueError(f"{path}: listed twice: {', '.join(twice)}")
    return Selection(exclusions)


def wanted(name: str, words: Iterable[str]) -> bool:
    """Whether the name holds one of the words, or there are none."""
    chosen = list(words)
    return not chosen or any(word in name for word in chosen)
