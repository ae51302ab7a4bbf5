"""Paragraphs and tables of docs/split.md and docs/simulate.md: what splitting long samples gains."""

from __future__ import annotations

from statistics import fmean

from bench.quoted import Result, best, command, find, load, note, prose, span
from odc.bench.report import table

TOKENS = 256  #: tokens of a plan for one that `bench.split` exchanges
REGIMES = {"longalign": "LongAlign-like"}


def split() -> str:
    """docs/split.md: eight emulated ranks by samples a rank, and two measured ones."""
    results = {lengths: load(f"split_{name}") for name, lengths in REGIMES.items()}
    counts = sorted({row["samples a rank"] for result in results.values() for row in result["rows"]})
    lines = [
        {"lengths": f"{lengths}: {what}", **{f"{count} a rank": cell(result, count) for count in counts}}
        for lengths, result in results.items()
        for what, cell in (
            ("step / ideal, `odc` -> `odc-split`", _over_ideal),
            ("speed-up over the best other arm", _over_best),
            ("over `fsdp2`", lambda result, count: _speed_up(result, count, "fsdp2")),
            ("of at most", lambda result, count: f"{_row(result, count, 'fsdp2')['over mean']:.2f}"),
            ("over `fsdp2-equal-samples`", lambda result, count: _speed_up(result, count, "fsdp2-equal-samples")),
            ("pieces a step", lambda result, count: f"{_row(result, count, 'odc-split')['pieces']:.0f}"),
        )
    ]
    control = span([result["control"]["fsdp2"] / result["control"]["odc"] for result in results.values()])
    first = next(iter(results.values()))
    emulated = prose(
        f"*Emulated*: 8 ranks, cost of a 7B model, slept (`{command(first)}`, "
        f"{first['lengths'].rpartition('; ')[2]}). Ideal is the mean rank's compute: "
        "no plan gains more than `fsdp2` takes over it. On a control "
        f"of equal samples `fsdp2` takes {control} times as long as `odc`. Left out: units have 64 KiB, and of "
        f"{TOKENS} tokens one exchanges keys and values." + "".join(note(result) for result in results.values())
    )
    return "\n\n".join([emulated, table(lines), _true_bytes(load("split_bytes")), _measured(load("split_demo"))])


def _over_ideal(result: Result, count: int) -> str:
    return " -> ".join(f"{_row(result, count, arm)['over mean']:.2f}" for arm in ("odc", "odc-split"))


def _over_best(result: Result, count: int) -> str:
    rows = [row for row in result["rows"] if row["samples a rank"] == count]
    rival = best({row["arm"]: row["step_s"] for row in rows if row["arm"] != "odc-split"})
    return f"{_speed_up(result, count, rival)} (`{rival}`)"


def _true_bytes(result: Result) -> str:
    whole, thinned, true = (find(result, way=way) for way in ("odc", "odc-split, thinned", "odc-split"))
    return prose(
        f"*Emulated* compute, true bytes of keys and values ({true['keys and values, MiB a step']:,.0f} MiB a step, "
        f"{result['lengths']}; `{command(result)}`): where the mean rank sleeps {result['slept_s']:g} s, a step takes "
        f"{true['step_s']:.1f} s under `odc-split`, {thinned['step_s']:.1f} s with one token in {TOKENS} exchanged, "
        f"and {whole['step_s']:.1f} s under `odc`. Four ranks move these bytes on two cores.{note(result)}"
    )


def _speed_up(result: Result, count: int, base: str) -> str:
    if count == 1 and base == "fsdp2-equal-samples":  # with one sample a rank it is `fsdp2`
        return "-"
    return f"{_row(result, count, base)['step_s'] / _row(result, count, 'odc-split')['step_s']:.2f}"


def _row(result: Result, count: int, arm: str) -> Result:
    return find(result, **{"samples a rank": count, "arm": arm})


def _measured(demo: Result) -> str:
    whole, pieces = (demo["arms"][arm] for arm in ("odc", "odc-split"))
    seconds = [arm["total"]["seconds"] for arm in (whole, pieces)]
    return prose(
        f"*Measured*: `{command(demo)}` on {demo['machine']['cores']} cores ({demo['machine']['processor']}). "
        f"`odc-split` is {seconds[0] / seconds[1]:.2f} times as fast as `odc`, whose plans have a bubble of at least "
        f"{whole['plan']['bubble']:.0%}; {fmean(pieces['plan']['pieces']):.1f} pieces a step, losses within "
        f"{pieces['loss']['largest_difference']:.0e}.{note(demo)}"
    )


def split_trust() -> str:
    """docs/simulate.md: simulated against emulated split samples."""
    ratios = [
        row["simulated/emulated"]
        for name in REGIMES
        for row in load(f"split_{name}")["rows"]
        if row["arm"] == "odc-split"
    ]
    return f"* Under `odc-split` simulated steps are {span(ratios)} of the [emulated](split.md#when-it-helps) ones."
