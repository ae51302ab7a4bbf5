"""Writes the figures of the README and of docs/ from what the benchmarks stored: `python -m bench.readme`.

A figure in the README is the figure that was measured, and a test compares them. What the figures mean is text here,
and has to be read again when they change. The pages of docs/ have theirs in `bench.pages`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import pages
from bench.quoted import RESULTS, best, command, load, note, prose, taken
from bench.quoted_speed import REGIMES
from odc.bench.report import table
from odc.experiments.table import between_passes

README = Path(__file__).parent.parent / "README.md"
_BEGIN, _END = "<!-- measured:begin (made by `python -m bench.readme`) -->", "<!-- measured:end -->"


def section(results: Path = RESULTS) -> str:
    """The text between the marks, marks included."""
    demo = load("demo", results)
    return "\n\n".join([_BEGIN, _head(demo), _table(demo), _emulated(results), taken(results), _END])


def replaced(text: str) -> str:
    """The README with its section made anew."""
    pattern = re.compile(r"<!-- measured:begin.*?<!-- measured:end -->", re.DOTALL)
    if not pattern.search(text):
        raise ValueError("the README has no section of figures")
    return pattern.sub(lambda _: section(), text)


def _head(demo: dict[str, Any]) -> str:
    machine, job = demo["machine"], demo["job"]
    return prose(
        f"The demo (`{command(demo)}`): {job['ranks']} CPU ranks on {machine['cores']} "
        f"cores ({machine['processor']}, torch {demo['versions']['torch']}), {job['steps'] - demo['skipped_steps']} "
        f"steps, each the median of {demo['repeats']} interleaved runs. `odc` is {_gain(demo)}, the fastest arm of "
        f"torch. Read ratios, not speeds.{note(demo)}"
    )


def _gain(demo: dict[str, Any]) -> str:
    speeds = {name: arm["total"]["tokens_per_s"] for name, arm in demo["arms"].items()}
    rival = best({name: -speed for name, speed in speeds.items() if not name.startswith("odc")})
    return f"{speeds['odc'] / speeds[rival]:.2f} times as fast as `{rival}`"


def _table(demo: dict[str, Any]) -> str:
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("tokens/s", lambda arm: f"{arm['total']['tokens_per_s']:,.0f}"),
        ("step, s (median)", lambda arm: f"{arm['step_s']['median']:.2f}"),
        ("bubble, measured", lambda arm: f"{arm['bubble']['median']:.1%}"),
        ("bubble of any plan, at least (predicted)", lambda arm: f"{arm['plan']['bound']:.1%}"),
        ("memory between microbatches, MiB", between_passes),
        ("largest loss gap to fsdp2", lambda arm: f"{arm['loss']['largest_difference']:.0e}".replace("0e+00", "0")),
    ]
    return table([{"": name, **{arm: cell(figures) for arm, figures in demo["arms"].items()}} for name, cell in rows])


def _emulated(results: Path) -> str:
    """The gain of the last row of `bench.emulated`, `odc`, over each arm of torch, the fastest first, by lengths."""
    said, notes = [], ""
    for name, lengths in REGIMES.items():
        result = load(f"emulated_{name}", results)
        seconds = {row["arm"]: row["step_s"] for row in result["rows"]}
        ours = result["rows"][-1]["step_s"]
        rivals = sorted((one for one in seconds if not one.startswith("odc")), key=seconds.__getitem__)
        gains = ", ".join(f"{seconds[rival] / ours:.2f} (`{rival}`)" for rival in rivals)
        said.append(f"on {lengths} lengths {gains}")
        notes += note(result)
    return prose(
        "With *emulated* compute on eight ranks, `odc` is so many times as fast as torch's arms: "
        f"{'; '.join(said)}. [Figures](bench/results/README.md).{notes}"
    )


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    for page in pages.PAGES:
        page.write_text(pages.replaced(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the figures of {RESULTS.name} into {README.name} and {len(pages.PAGES)} pages")
