"""`odc simulate`: the step time of each arm on a machine that is only described."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from odc.cli.files import require_writable, writing
from odc.cli.options import options_from
from odc.compiled import numba
from odc.errors import ConfigError
from odc.provenance import json_text
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
    from odc.simulate.study import AXES, study, sweep, usual_values

    if slow:
        from odc.experiments.config import factors_by_rank

        given["slow"] = factors_by_rank(slow)
    axes = list(AXES) if sweeps == "all" else [axis.strip() for axis in sweeps.split(",")] if sweeps else []
    if picture and not axes:
        raise ConfigError("picture: say what to draw it along (--sweep all)")
    if json:
        require_writable("json", Path(json))
    from rich.console import Console

    from odc.simulate.report import study_table

    scenario = Scenario(**((scenario_from_yaml(file) if file else {}) | given))
    began = time.monotonic()
    values = {axis: found for axis in axes if (found := usual_values(scenario, axis))}
    if axes and not values:
        raise ConfigError(f"sweep: no value along {', '.join(axes)} goes with this scenario")
    drawn = _drawable(picture or "simulated.png") if axes else None
    compiles = "; the first run compiles for half a minute" if numba() else ""
    _say(f"{len(scenario.arms)} arms on the same minibatches{compiles}")
    done = study(scenario)
    swept: dict[str, list[Study]] = {}
    _write(json, done, swept)
    Console().print(study_table(done))
    for axis, along in values.items():
        swept[axis] = sweep(scenario, axis, along, _say)
        _write(json, done, swept)
    if drawn is not None:
        _draw(drawn, scenario, swept)
    if json:
        print(f"figures  {json}")
    _say(f"done in {time.monotonic() - began:.1f} s")


def _drawable(picture: str) -> Path:
    """The file of a picture, a .png where no kind is named; ConfigError where it cannot be written."""
    from odc.simulate.report import require_drawable

    path = Path(picture)
    require_writable("picture", path)
    if not path.suffix:
        path = Path(f"{path}.png")
        require_writable("picture", path)
    require_drawable(path)
    return path


def _draw(path: Path, scenario: Scenario, swept: dict[str, list[Study]]) -> None:
    from odc.simulate.report import draw_sweeps

    title = f"{scenario.model} on {scenario.machine}, lengths like {scenario.lengths}: simulated"
    with writing("picture", path):
        draw_sweeps(path, swept, title)
    print(f"picture  {path}")


def _write(json: str | None, done: Study, swept: dict[str, list[Study]]) -> None:
    """Writes what is known by now, so that no later failure loses it."""
    if not json:
        return
    figures = {
        "schema": "odc-simulate-1",
        "command": ["odc", *sys.argv[1:]],
        "study": done.to_dict(),
        "sweeps": {axis: [one.to_dict() for one in studies] for axis, studies in swept.items()},
    }
    with writing("json", Path(json)):
        Path(json).write_text(json_text(figures))


def _say(text: str) -> None:
    print(f"odc simulate: {text}", file=sys.stderr, flush=True)
