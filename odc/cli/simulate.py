"""`odc simulate`: the step time of each arm on a machine that is only described."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from odc.cli.files import require_writable, writing
from odc.cli.options import options_from
from odc.compiled import numba
from odc.errors import ConfigError
from odc.simulate.scenario import Scenario, scenario_from_yaml

if TYPE_CHECKING:
    from odc.simulate.study import Study

_OUTPUT: dict[str, Any] = {"rich_help_panel": "Output"}


@options_from(Scenario)
def simulate(
    given: dict[str, Any],
    file: Annotated[str | None, Argument(help="YAML file with any of the options below, by name.")] = None,
    slow: Annotated[
        str | None,
        Option(help="RANK:FACTOR on its compute time, with commas.", show_default="none", rich_help_panel="Machine"),
    ] = None,
    sweeps: Annotated[
        str | None,
        Option(
            "--sweep",
            help="all, or samples_per_rank, max_length, packing_ratio, ranks, with commas.",
            show_default="none",
            **_OUTPUT,
        ),
    ] = None,
    picture: Annotated[
        str | None, Option(help="Where the sweeps are drawn.", show_default="simulated.png", **_OUTPUT)
    ] = None,
    json: Annotated[str | None, Option(help="Where figures are written.", show_default="nowhere", **_OUTPUT)] = None,
) -> None:
    """Simulate arms on the same minibatches: table, bubbles along sweeps, JSON. Nothing is run or measured."""
    if slow:
        from odc.experiments.config import factors_by_rank

        given["slow"] = factors_by_rank(slow)
    for name, where in (("picture", picture), ("json", json)):
        if where:
            require_writable(name, Path(where))
    from rich.console import Console

    from odc.simulate.report import study_table
    from odc.simulate.study import AXES, study, sweep, usual_values

    scenario = Scenario(**((scenario_from_yaml(file) if file else {}) | given))
    began = time.monotonic()
    axes = list(AXES) if sweeps == "all" else [axis.strip() for axis in sweeps.split(",")] if sweeps else []
    values = {axis: usual_values(scenario, axis) for axis in axes}
    compiles = "; the first run compiles for half a minute" if numba() else ""
    _say(f"{len(scenario.arms)} arms on the same minibatches{compiles}")
    done = study(scenario)
    Console().print(study_table(done))
    swept = {axis: sweep(scenario, axis, values[axis], _say) for axis in axes}
    if swept:
        _draw(Path(picture or "simulated.png"), scenario, swept)
    elif picture:
        raise ConfigError("picture: say what to draw it along (--sweep all)")
    if json:
        _write(Path(json), done, swept)
    _say(f"done in {time.monotonic() - began:.1f} s")


def _draw(path: Path, scenario: Scenario, swept: dict[str, list[Study]]) -> None:
    from odc.simulate.report import draw_sweeps

    title = f"{scenario.model} on {scenario.machine}, lengths like {scenario.lengths}: simulated"
    with writing("picture", path):
        draw_sweeps(path, swept, title)
    print(f"picture  {path}")


def _write(path: Path, done: Study, swept: dict[str, list[Study]]) -> None:
    figures = {
        "schema": "odc-simulate-1",
        "command": ["odc", *sys.argv[1:]],
        "study": done.to_dict(),
        "sweeps": {axis: [one.to_dict() for one in studies] for axis, studies in swept.items()},
    }
    with writing("json", path):
        path.write_text(jsonlib.dumps(figures, indent=1) + "\n")
    print(f"figures  {path}")


def _say(text: str) -> None:
    print(f"odc simulate: {text}", file=sys.stderr, flush=True)
