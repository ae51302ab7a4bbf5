"""Which half of the suite a test belongs to: `make test` runs the quick one, `make test-all` the rest as well.

The quick half shows every behaviour once. It leaves out tests marked `thorough`; of a test that is parametrised over
several things it runs as many cases as it takes for each value of each to occur; and it tries few examples of a
property. The rest is what the quick half leaves out, and the properties again, with more examples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import hypothesis
import pytest

ALL_EXAMPLES, QUICK_EXAMPLES = 100, 20  # of a property that does not set its own number
Value = tuple[tuple[str, ...], tuple[str, ...]]  # names of parameters that go together, and what they are set to

# Files with long tests, which begin first: at the end no process of several has one to run while the others are done.
LONGEST = (
    "kernels/test_compile.py",
    "cli/test_cli.py",
    "kernels/test_dropin.py",
    "bench/test_suite.py",
    "test_readme.py",
    "torch_suite/test_runner.py",
    "experiments/test_launch.py",
)


def longest_first(items: list[pytest.Item], folder: Path) -> None:
    """Move the tests of `LONGEST`, which lie in `folder`, to the front; all others keep their order."""
    places = {folder / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def beginning_with(items: list[pytest.Item], number: int) -> None:
    """Rotate the files, so that the one of this number, modulo how many there are, comes first.

    Where there is no time for all, another number runs others.
    """
    files = list(dict.fromkeys(item.path for item in items))
    if files:
        places = {path: (at - number) % len(files) for at, path in enumerate(files)}
        items.sort(key=lambda item: places[item.path])


def left_out(items: Iterable[pytest.Item], extent: str) -> set[pytest.Item]:
    """Of these tests, those that `extent` (quick, rest or all) does not ask for."""
    if extent == "all":
        return set()
    tests = list(items)
    quick = quick_half(tests)
    if extent == "quick":
        return set(tests) - quick
    return {item for item in quick if not is_property(item)}


def quick_half(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The tests that show every behaviour once."""
    cases: dict[tuple[object, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thorough") is None:
            cases[item.parent, getattr(item, "originalname", item.name)].append(item)
    return {item for some in cases.values() for item in covering(some)}


def covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Cases of one test in which each value of each of its parameters occurs; of two that do as well, the earlier."""
    values = {item: values_of(item) for item in cases}
    missing, chosen = set[Value]().union(*values.values()), list[pytest.Item]()
    while missing:
        best = max(cases, key=lambda item: len(values[item] & missing))
        missing -= values[best]
        chosen.append(best)
    return chosen or cases


def values_of(item: pytest.Item) -> frozenset[Value]:
    """The row that each `parametrize` of a test contributed to this case; empty for a test without parameters."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return frozenset()
    rows = {arguments(mark.args[0]) for mark in item.iter_markers("parametrize")}
    alone = set(callspec.params).difference(*rows)  # parameters of fixtures
    return frozenset(
        (names, tuple(repr(callspec.params[name]) for name in names)) for names in [*rows, *((name,) for name in alone)]
    )


def arguments(names: str | Sequence[str]) -> tuple[str, ...]:
    """The first argument of `parametrize`, split."""
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)


def examples(of: int) -> int:
    """For `max_examples` of a property whose examples take long: `of`, or a fifth in the quick half."""
    return max(2, of * hypothesis.settings.default.max_examples // ALL_EXAMPLES)


def up_to(of: int) -> int:
    """For `max_examples` of a property whose examples are cheap: `of`, or at most as many as any in the quick half."""
    most = hypothesis.settings.default.max_examples
    return of if most >= ALL_EXAMPLES else min(of, most)


def is_property(item: pytest.Item) -> bool:
    """Whether hypothesis draws the test's examples."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
