"""Every order that can be taken out is one that the code has; without emulated CUDA, so every change is looked at."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "emulated/python"))

import mutations


def test_each_mutation_changes_the_code_as_it_is() -> None:
    wrong = []
    for name, mutation in mutations.table().items():
        try:
            ast.parse(mutation.changed())
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)
