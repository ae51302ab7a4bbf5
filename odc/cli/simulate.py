"""`odc simulate`: what each arm's step would take on a machine that is not there."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from odc.errors import ConfigError

_DATA, _MACHINE, _OUTPUT = "Data and model", "Machine", "Output"


def simulate(
    file: Annotated[str | None, Argument(help="YAML file with any of the options below, by name.")] = None,
    lengths: Annotated[
        str | None,
        Option(help="longalign, swe-smith, swe-smith-32k, aime, grpo, or a file or datasets folder.",
               rich_help_panel=_DATA),
    ] = None,
    sigma: Annotated[float | None, Option(help="Width of a named distribution.", rich_help_panel=_DATA)] = None,
    max_length: Annotated[int | None, Option(help="Cut samples at so many tokens.", rich_help_panel=_DATA)] = None,
    packing_ratio: Annotated[
        float | None, Option(help="Tokens of a microbatch over the longest sample. [default: 1]", rich_help_panel=_DATA)
    ] = None,
    samples_per_rank: Annotated[int | None, Option(help="In a minibatch. [default: 4]", rich_help_panel=_DATA)] = None,
    minibatches: Annotated[int | None, Option(help="Drawn and simulated. [default: 20]", rich_help_panel=_DATA)] = None,
    model: Annotated[
        str | None,
        Option(help="qwen2.5-1.5b, -7b, -14b, -32b, or a Hugging Face config. [default: qwen2.5-1.5b]",
               rich_help_panel=_DATA),
    ] = None,
    checkpointing: Annotated[
        bool | None, Option("--checkpointing/--no-checkpointing", help="[default: on]", rich_help_panel=_DATA)
    ] = None,
    seed: Annotated[int | None, Option(help="Of lengths and jitter. [default: 0]", rich_help_panel=_DATA)] = None,
    machine: Annotated[
        str | None,
        Option(help="a100-roce, a100, a100-free, h100 or mi300x. [default: a100-roce]", rich_help_panel=_MACHINE),
    ] = None,
    ranks: Annotated[int | None, Option(help="Devices. [default: 8]", rich_help_panel=_MACHINE)] = None,
    ranks_per_node: Annotated[int | None, Option(help="[default: the machine's]", rich_help_panel=_MACHINE)] = None,
    efficiency: Annotated[
        float | None, Option(help="Share of peak FLOPs. [default: 0.4]", rich_help_panel=_MACHINE)
    ] = None,
    intra_bandwidth: Annotated[float | None, Option(help="Bytes/s in a node.", rich_help_panel=_MACHINE)] = None,
    inter_bandwidth: Annotated[float | None, Option(help="Bytes/s to others.", rich_help_panel=_MACHINE)] = None,
    collective: Annotated[str | None, Option(help="ring or tree.", rich_help_panel=_MACHINE)] = None,
    prefetch: Annotated[int | None, Option(help="Units ahead, 0 or 1. [default: 1]", rich_help_panel=_MACHINE)] = None,
    owner_skew: Annotated[
        float | None, Option(help="Fullest owner's share over the mean. [default: 1]", rich_help_panel=_MACHINE)
    ] = None,
    jitter: Annotated[
        float | None, Option(help="Sigma of compute noise. [default: 0]", rich_help_panel=_MACHINE)
    ] = None,
    slow: Annotated[
        list[str] | None, Option(help="RANK=FACTOR on its compute time; repeatable.", rich_help_panel=_MACHINE)
    ] = None,
    arms: Annotated[str | None, Option(help="Which, with commas; the first is the base of speed-ups.")] = None,
    sweeps: Annotated[
        str | None,
        Option("--sweep", help="all, or samples_per_rank, max_length, packing_ratio, ranks, with commas.",
               rich_help_panel=_OUTPUT),
    ] = None,
    picture: Annotated[str | None, Option(help="Where the sweeps are drawn.", rich_help_panel=_OUTPUT)] = None,
    json: Annotated[str | None, Option(help="Where figures are written.", rich_help_panel=_OUTPUT)] = None,
    reproduce: Annotated[
        str | None, Option(help="Write published ratios beside simulated ones there, as a page.",
                           rich_help_panel=_OUTPUT),
    ] = None,
) -> None:  # fmt: skip
    """Simulate arms on the same minibatches: table, bubbles along sweeps, JSON. Nothing is run or measured."""
    own = {"file", "sweeps", "picture", "json", "reproduce"}
    given = {name: value for name, value in locals().items() if value is not None and name not in {"own", *own}}
    if "arms" in given:
        given["arms"] = tuple(name.strip() for name in given["arms"].split(","))
    if "slow" in given:
        given["slow"] = _slow(given["slow"])
    if reproduce:
        _reproduce(given, file, reproduce, json)
    else:
        _simulate(file, given, sweeps, picture, json)


def _slow(pairs: list[str]) -> dict[int, float]:
    try:
        return {int(rank): float(factor) for rank, factor in (pair.split("=") for pair in pairs)}
    except ValueError:
        raise ConfigError(f"slow: write RANK=FACTOR, for example 3=1.5, not {' '.join(pairs)!r}") from None


def _simulate(
    file: str | None, given: dict[str, Any], sweeps: str | None, picture: str | None, json: str | None
) -> None:
    from rich.console import Console

    from odc.simulate.scenario import Scenario, scenario_from_yaml
    from odc.simulate.study import AXES, study, sweep, usual_values
    from odc.simulate.tables import study_table

    scenario = Scenario(**((scenario_from_yaml(file) if file else {}) | given))
    began = time.monotonic()
    done = study(scenario)
    Console().print(study_table(done))
    axes = list(AXES) if sweeps == "all" else [axis.strip() for axis in sweeps.split(",")] if sweeps else []
    swept = {axis: sweep(scenario, axis, usual_values(scenario, axis), _say) for axis in axes}
    if swept:
        from odc.simulate.draw import draw_sweeps

        path = Path(picture or "simulated.png")
        title = f"{scenario.model} on {scenario.machine}, lengths like {scenario.lengths}: simulated"
        draw_sweeps(path, swept, title)
        print(f"picture  {path}")
    elif picture:
        raise ConfigError("picture: say what to draw it along (--sweep all)")
    if json:
        figures = {
            "schema": "odc-simulate-1",
            "command": ["odc", *sys.argv[1:]],
            "study": done.to_dict(),
            "sweeps": {axis: [one.to_dict() for one in studies] for axis, studies in swept.items()},
        }
        Path(json).write_text(jsonlib.dumps(figures, indent=1) + "\n")
        print(f"figures  {json}")
    _say(f"done in {time.monotonic() - began:.1f} s")


def _reproduce(given: dict[str, Any], file: str | None, path: str, json: str | None) -> None:
    if file or set(given) - {"minibatches", "seed"}:
        raise ConfigError("--reproduce says itself what to simulate; it takes --minibatches, --seed and --json only")
    from odc.simulate.reproduce import page, reproduce

    minibatches, seed = given.get("minibatches", 20), given.get("seed", 0)
    rows = reproduce(minibatches, seed, _say)
    Path(path).write_text(page(rows, minibatches, seed), encoding="utf-8")
    print(f"page     {path}")
    if json:
        Path(json).write_text(jsonlib.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(f"figures  {json}")


def _say(text: str) -> None:
    print(f"odc simulate: {text}", file=sys.stderr, flush=True)
