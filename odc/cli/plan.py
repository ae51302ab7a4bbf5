"""`odc plan`: one plan of the lengths in a file, as a table and JSON. Loads no torch."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from odc.balance import Cost, Plan, cost_from_config, linear_cost, policy_named, quadratic
from odc.balance.inputs import read_elements, read_lengths
from odc.cli.files import require_writable, writing
from odc.errors import ConfigError
from odc.simulate.catalog import config_named


def plan(
    lengths: Annotated[Path, Option(help="File: integers, a JSON list, or JSON lines with a field of lengths.")],
    ranks: Annotated[int, Option(help="Number of ranks.")] = 8,
    max_tokens: Annotated[
        str | None,
        Option(help="Most tokens of a microbatch; with commas, one cap a rank.", show_default="the longest sample"),
    ] = None,
    policy: Annotated[str, Option(help="local-sort, lb-micro, lb-mini or lb-split.")] = "lb-mini",
    quadratic_cost: Annotated[
        str | None, Option("--quadratic", metavar="A,B", help="Cost A*l + B*l*l.", show_default="one unit per token")
    ] = None,
    model: Annotated[
        str | None,
        Option(
            help="Hugging Face config (JSON), its folder, or a name such as qwen2.5-7b: cost in FLOPs of this model.",
            show_default="none",
        ),
    ] = None,
    speeds: Annotated[str | None, Option(help="Speed of every rank, with commas.", show_default="all 1")] = None,
    field: Annotated[str, Option(help="Field of JSON objects: an integer, or a list to count.")] = "length",
    group_field: Annotated[
        str | None,
        Option(help="Field of JSON objects whose equals stay on one rank, such as uid.", show_default="none"),
    ] = None,
    equal_samples: Annotated[bool, Option("--equal-samples", help="lb-micro with equal sample counts.")] = False,
    floor: Annotated[int | None, Option(help="lb-split: fewest tokens of a piece.", show_default="2048")] = None,
    node: Annotated[int | None, Option(help="lb-split: ranks of one host.", show_default="all")] = None,
    contiguous: Annotated[
        bool, Option("--contiguous", help="lb-split: each piece one slice, not two that make up for each other.")
    ] = False,
    seed: Annotated[int, Option(help="Decides between samples of equal cost and length.")] = 0,
    json: Annotated[Path | None, Option(help="Where the plan goes as JSON.", show_default="nowhere")] = None,
) -> None:
    """Plan one minibatch whose sample lengths are in a file; print the table. All times are predicted."""
    if json is not None:
        require_writable("json", json)
    sizes = read_lengths(lengths, field)
    options: dict[str, Any] = {}
    if speeds is not None:
        options["speeds"] = _numbers("speeds", speeds, float)
    if group_field is not None:
        options["groups"] = _names(lengths, group_field)
    options |= _of_one_policy(
        policy, "lb-micro", "equal-samples is an option", {"equal_samples": equal_samples or None}
    )
    pieces = {"floor": floor, "node": node, "one_slice": contiguous or None}
    options |= _of_one_policy(policy, "lb-split", "floor, node and contiguous are options", pieces)
    caps = _numbers("max-tokens", max_tokens, int) if max_tokens is not None else [max(sizes)]
    made: Plan = policy_named(policy.replace("-", "_"))(
        sizes, ranks, caps if len(caps) > 1 else caps[0], _cost(quadratic_cost, model), seed, **options
    )
    if json is not None:
        with writing("json", json):
            json.write_text(made.to_json() + "\n", encoding="utf-8")
    print(made)
    if json is not None:
        print(f"plan     {json}")


def _of_one_policy(policy: str, only: str, what: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of `options` that were given; if there are any, ConfigError unless `policy` is the only one with them."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and policy.replace("_", "-") != only:
        raise ConfigError(f"{what} of {only}, not of {policy}")
    return given


def _cost(quadratic_cost: str | None, model: str | None) -> Cost:
    if quadratic_cost is not None and model is not None:
        raise ConfigError("quadratic and model are two costs: give one")
    if quadratic_cost is not None:
        numbers = _numbers("quadratic", quadratic_cost, float)
        if len(numbers) != 2:
            raise ConfigError(f"quadratic must be two numbers A,B, not {quadratic_cost!r}")
        return quadratic(*numbers)
    if model is not None:
        return cost_from_config(config_named(model))
    return linear_cost


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} must be numbers with commas between them, not {text!r}") from None


def _names(path: Path, field: str) -> list[str]:
    elements = read_elements(path)
    missing = [i for i, element in enumerate(elements) if not (isinstance(element, dict) and field in element)]
    if missing:
        raise ConfigError(f"group-field: element {missing[0]} of {path} has no field {field!r}")
    return [json_module.dumps(element[field]) for element in elements]
