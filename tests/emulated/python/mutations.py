"""Takes one order out of odc, in a process that has imported it already: by the table in mutations.toml.

The changed source is compiled, and every function of the module gets the code of its changed namesake. So ranks that
were forked from a server can be changed for one test, and are as before after it.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

_TABLE = Path(__file__).parents[1] / "mutations.toml"


class Mutation(NamedTuple):
    """`changes` to the text of `file` (what is there exactly once, and what takes its place) that take an order out.

    `scenario` is the name of a program (tests/gpu/test_orders.py) in which the checker must then report accesses, with
    `meets` in the report. `redundant`: why it need not.
    """

    name: str
    file: str
    changes: list[tuple[str, str]]
    scenario: str = "server"
    meets: str = ""
    redundant: str = ""

    def changed(self) -> str:
        """The text of the file, changed; ValueError where it does not hold what is to be changed."""
        path = Path(__file__).parents[3] / self.file
        text = path.read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {self.file} holds {text.count(old)} times, not once: {old!r}")
            text = text.replace(old, new)
        return text


def table() -> dict[str, Mutation]:
    entries: dict[str, dict[str, Any]] = tomllib.loads(_TABLE.read_text())
    found = {}
    for name, entry in entries.items():
        old, new, also = entry.pop("old"), entry.pop("new"), entry.pop("also", [])
        found[name] = Mutation(name, changes=[(old, new), *map(tuple, also)], **entry)
    return found


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Inside the block this process runs odc without that order."""
    mutation = table()[name]
    module = sys.modules[mutation.file.removesuffix(".py").replace("/", ".")]
    assert module.__file__ is not None
    changed = _by_name(compile(mutation.changed(), module.__file__, "exec", dont_inherit=True))
    before = _change(module, changed)
    assert before, f"{name} has changed nothing that lives in this process"
    _forget_atomics()
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code
        _forget_atomics()


def _by_name(module: CodeType) -> dict[str, CodeType]:
    """The codes of a module's functions by their qualified names, which only one has."""
    found: list[CodeType] = []
    codes = [module]
    while codes:
        inner = [one for one in codes.pop().co_consts if isinstance(one, CodeType)]
        found += inner
        codes += inner
    counts = Counter(code.co_qualname for code in found)
    return {code.co_qualname: code for code in found if counts[code.co_qualname] == 1}


def _change(module: ModuleType, codes: dict[str, CodeType]) -> list[tuple[FunctionType, CodeType]]:
    """Give a module's functions their new codes where these differ by more than lines; returns the old ones."""
    before = []
    for function in _functions(vars(module), module.__name__):
        old = function.__code__
        new = codes.get(old.co_qualname) if old.co_filename == module.__file__ else None
        if new is not None and _essence(new) != _essence(old):
            function.__code__ = new
            before.append((function, old))
    return before


def _functions(members: Mapping[str, Any], module: str) -> Iterator[FunctionType]:
    """Functions and methods, also those inside of decorators. (The garbage collector does not list what is frozen.)"""
    for member in members.values():
        if isinstance(member, type) and member.__module__ == module:
            yield from _functions(vars(member), module)
        found = member.fget if isinstance(member, property) else member
        while found is not None:
            found = getattr(found, "__func__", found)
            if isinstance(found, FunctionType):
                yield found
            found = vars(found).get("__wrapped__") if hasattr(found, "__dict__") else None


def _essence(code: CodeType) -> tuple[Any, ...]:
    consts = [_essence(one) if isinstance(one, CodeType) else (type(one), repr(one)) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts


def _forget_atomics() -> None:
    """Words that are made from now on load and store by functions that are made anew."""
    sys.modules["odc.memory.atomics"].default_atomics.cache_clear()  # type: ignore[attr-defined]
