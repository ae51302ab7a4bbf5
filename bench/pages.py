"""The paragraphs and tables of docs/ and bench/results/README.md that quote stored results, made from those results.

A page holds each of them between `<!-- figures:NAME -->` and `<!-- figures:end -->`. `python -m bench.readme` writes
them anew, and a test compares the pages with what is stored, so that no figure can drift. What the figures mean is text
here, and has to be read again when they change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from bench import quoted, quoted_hosts
from bench import quoted_plans as plans
from bench import quoted_runs as runs
from bench import quoted_speed as speed
from bench import quoted_split as splits

ROOT = Path(__file__).parent.parent
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "results" / "README.md")
_BLOCK = re.compile(r"(<!-- figures:(?!end)([a-z_]+) -->\n)(?:.*?\n)??(<!-- figures:end -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        *(plans.planners, plans.policies, plans.post_balancing, plans.node_wise, plans.node_exact, plans.overhead),
        *(plans.volume, plans.exchange, plans.trust),
        *(
            runs.evaluation,
            runs.generation,
            runs.gather,
            runs.handover,
            runs.grpo,
            runs.inputs,
            runs.train_mm,
            runs.order,
            runs.convergence,
            runs.pieces,
            runs.deaths,
        ),
        *(
            quoted.taken,
            speed.emulated,
            speed.verbs,
            speed.overlap,
            quoted_hosts.hosts,
            quoted_hosts.hosts_simulated,
            splits.split,
            splits.split_trust,
        ),
    )
}


def replaced(text: str) -> str:
    """A page with all its blocks made anew; raises KeyError for a block that nothing makes."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


def names(text: str) -> list[str]:
    """The names of a page's blocks."""
    return [found[2] for found in _BLOCK.finditer(text)]
