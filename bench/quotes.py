"""The figures of every quote in bench/quotes.md, taken from stored results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

from bench.stored import Result, best, cases, cells, column, command, find, load, note, page, rows, span
from odc.experiments.table import between_passes

Figures = Mapping[str, Any]
_MADE: dict[str, Callable[[], Figures]] = {}
_ONE_RESULT = {"taken": "demo"}  # quotes of one result as it is; the others have the name of their result


def figures_of(name: str) -> Figures:
    """What the replacement fields of quote `name` stand for."""
    made = _MADE.get(name)
    return made() if made else stored(_ONE_RESULT.get(name, name))


def stored(name: str) -> dict[str, Any]:
    """All of the stored result `name`, its `note`, the command as pages show it, and rows `by` their first column."""
    result = load(name)
    by = {next(iter(row.values())): row for row in result.get("rows", ())}
    return {**result, "note": note(result), "command": command(result), "by": by}


def _quote(function: Callable[[], Figures]) -> Callable[[], Figures]:
    _MADE[function.__name__] = function
    return function


# whole jobs ----------------------------------------------------------------------------------------------------------


@_quote
def demo() -> Figures:
    result = stored("demo")
    arms = result["arms"].values()
    speed = {name: arm["total"]["tokens_per_s"] for name, arm in result["arms"].items()}
    rival = best({name: -each for name, each in speed.items()})
    gaps = (f"{arm['loss']['largest_difference']:.0e}".replace("0e+00", "0") for arm in arms)
    gains = {name: stored(f"emulated_{name}") for name in ("longalign", "swe_smith")}
    return result | {
        "counted": result["job"]["steps"] - result["skipped_steps"],
        "rival": rival,
        "gain": speed["odc"] / speed[rival],
        "names": cells(result["arms"]),
        "speed": cells(speed.values(), ",.0f"),
        "step": cells((arm["step_s"]["median"] for arm in arms), ".2f"),
        "bubble": cells((arm["bubble"]["median"] for arm in arms), ".1%"),
        "bound": cells((arm["plan"]["bound"] for arm in arms), ".1%"),
        "memory": cells(between_passes(arm) for arm in arms),
        "gap": cells(gaps),
        **{name: _over_each(gain) for name, gain in gains.items()},
        "emulated_note": "".join(gain["note"] for gain in gains.values()),
    }


def _over_each(emulated: Result) -> str:
    """How many times as fast as each arm of torch `odc` is, the fastest first."""
    seconds = {row["arm"]: row["step_s"] for row in emulated["rows"]}
    theirs = sorted((arm for arm in seconds if not arm.startswith("odc")), key=seconds.__getitem__)
    return ", ".join(f"{seconds[arm] / seconds['odc']:.2f} (`{arm}`)" for arm in theirs)


@_quote
def emulated() -> Figures:
    both = {name: stored(f"emulated_{name}") for name in ("longalign", "swe_smith")}
    for name, result in both.items():
        least = min(row["step_s"] for row in result["rows"] if not row["arm"].startswith("odc"))
        lines = [{**row, "over": least / row["step_s"]} for row in result["rows"]]
        both[name] = result | {"control": result["control"][-1], "rows": lines}
    forms = {"step_s": ".1f", "speed-up": ".2f", "over": ".2f", "bubble": ".0%", "bound / step": ".2f"}
    pairs = list(zip(*(result["rows"] for result in both.values()), strict=True))
    return both | {
        "rows": [
            {
                "arm": pair[0]["arm"],
                **{key: " / ".join(format(r[key], form) for r in pair) for key, form in forms.items()},
            }
            for pair in pairs
        ]
    }


@_quote
def train_mm() -> Figures:
    result = stored("train_mm")
    arms = result["arms"]
    lines = []
    for name, arm in arms.items():
        idle = ", ".join(f"{arm['phases'][phase]['bubble']['median']:.0%}" for phase in ("image", "audio", "llm"))
        lines.append({**arm, "name": name, "by_phase": idle, "gflops": arm["useful_flops_per_s"] / 1e9})
    rival = best({name: -arm["tokens_per_s"] for name, arm in arms.items()})

    def times(slow: str, fast: str) -> str:
        by_speed = arms[fast]["tokens_per_s"] / arms[slow]["tokens_per_s"]
        return f"{by_speed:.2f} ({arms[slow]['step_s']['median'] / arms[fast]['step_s']['median']:.2f})"

    return result | {
        "rows": lines,
        "counted": result["job"]["steps"] - result["skipped_steps"],
        "under_fsdp2": times("fsdp2/none", "fsdp2/full"),
        "under_odc": times("odc/none", "odc/full"),
        "both": times("fsdp2/none", "odc/full"),
        "rival": rival,
        "over_rival": times(rival, "odc/full"),
    }


@_quote
def grpo() -> Figures:
    result = stored("grpo")
    seconds = {row["arm"]: row["train_s a step"] for row in result["rows"]}
    least = seconds[best(seconds)]
    return result | {"rows": [{**row, "over": least / row["train_s a step"]} for row in result["rows"]]}


@_quote
def handover() -> Figures:
    rates, steps = stored("handover"), load("handover_steps")
    kept, fresh = (span([row["ratio"] for row in rows(rates, pages=pages)]) for pages in ("kept", "fresh"))
    buffers = [find(steps, buffers=count) for count in (1, 2)]
    return rates | {
        "sizes": span([row["MiB"] for row in rates["rows"]], ".0f"),
        "kept": kept,
        "fresh": fresh,
        "one": buffers[0],
        "longer": [row["read/alone"] - 1 for row in buffers],
        "extra": span([(row["read_s"] - row["alone_s"]) * 1e3 for row in buffers], ".0f"),
    }


@_quote
def handover_far() -> Figures:
    result = stored("handover_far")
    return result | {"link": result["rows"][0]["link"]}


@_quote
def verl_step() -> Figures:
    result = stored("verl_step")
    control = result["control"]
    return result | {"slower": control["fsdp2"] / control["odc"]}


@_quote
def deaths() -> Figures:
    result = stored("deaths")
    return result | {"rows": [{**row, "where": row["slowest at"].replace("_", " ")} for row in result["rows"]]}


# the runtime's parts -------------------------------------------------------------------------------------------------


@_quote
def verbs() -> Figures:
    fetch, push, sizes = load("fetch"), load("push"), (1, 4, 16, 64)
    of_pages = {
        pages: [find(fetch, dtype="float32", parameters=9, pages=pages, unit_MiB=size) for size in sizes]
        for pages in ("kept", "fresh")
    }
    kept = of_pages["kept"]
    server, direct = (
        [find(push, accumulate=mode, chunk_MiB=size, dtype="float32") for size in sizes]
        for mode in ("server", "direct")
    )
    return {
        "note": note(fetch) or note(push),
        **{pages: column(found, "ratio", ".2f") for pages, found in of_pages.items()},
        "bookkeeping": column(kept, "bookkeeping_ms", ".2f"),
        "gloo_fetch": cells((row["gloo_ms"] / row["fetch_ms"] for row in kept), ".2f"),
        "server": column(server, "ratio", ".2f"),
        "gloo_push": cells((row["gloo_ms"] / row["push_ms"] for row in server), ".2f"),
        "direct": column(direct, "ratio", ".2f"),
        "lost": kept[0]["bookkeeping_ms"] / (kept[0]["fetch_ms"] - kept[0]["memcpy_ms"]),
    }


@_quote
def overlap() -> Figures:
    result = stored("overlap")

    def gain(compute: str, prefetch: int, push_overlap: bool) -> float:
        return float(find(result, compute=compute, prefetch=prefetch, push_overlap=push_overlap)["ratio"]) - 1

    both, ahead, behind = gain("emulated", 1, True), gain("emulated", 1, False), gain("emulated", 0, True)
    return result | {"both": both, "ahead": ahead, "behind": behind, "real": gain("real", 1, True)}


@_quote
def inputs() -> Figures:
    result = stored("inputs")
    return result | {"eager": find(result, prefetch="all (eager)"), "one": find(result, prefetch="1")}


@_quote
def order() -> Figures:
    result = stored("order")
    both = [row["times_default"] for row in rows(result, what="push, reproducible")]  # of fp32, then of bf16
    return result | {"reproducible": both, "fp64": find(result, what="add alone, fp64")}


# plans ---------------------------------------------------------------------------------------------------------------


@_quote
def planners() -> Figures:
    result = stored("planners")
    compared = [row for row in result["rows"] if row["sizes"] in ("equal", "unequal")]
    return result | {"compared": compared, "others": [row for row in result["rows"] if row not in compared]}


@_quote
def dispatch() -> Figures:
    result = stored("dispatch")
    kinds = {"balancing": "algorithm", "placing": "node-wise", "phases": "three phases", "volume": "volume"}
    kinds |= {"exchange": "exchange of", "ahead": "planning a step", "between": "the same, planned between"}
    groups = {kind: [row for row in result["rows"] if row["what"].startswith(what)] for kind, what in kinds.items()}
    return {**result, **groups}


# simulations, hosts and split samples --------------------------------------------------------------------------------


@_quote
def trust() -> Figures:
    result = stored("simulated_vs_emulated")
    result["ratios"] = span([row["simulated/emulated"] for row in result["rows"]])
    result["ranks"] = ", ".join(str(ranks) for ranks in sorted({row["ranks"] for row in result["rows"]}))
    for name in ("longalign", "swe_smith"):
        emulated = stored(f"emulated_{name}")
        result[name] = emulated | {"best": max(emulated["rows"], key=lambda row: row["speed-up"])}
    return result


@_quote
def hosts() -> Figures:
    result, lines = stored("hosts"), []
    for case, by_arm in cases(result):
        seconds = {arm: row["seconds"] for arm, row in by_arm.items()}
        rival = best(seconds)
        line = {arm: _over(seconds, arm, rival) for arm in ("odc", "odc-inline", "odc-hybrid")}
        each = " / ".join(_over(seconds, "odc", arm) for arm in ("fsdp2-hybrid", "fsdp2", "gloo"))
        lines.append({**line, "case": case, "rival": rival, "of_each": each})
    return result | {"rows": lines, "bytes": span([row["bytes / formula"] for row in result["rows"]])}


def _over(seconds: Mapping[str, float], arm: str, rival: str) -> str:
    return f"{seconds[arm] / seconds[rival]:.2f}" if {arm, rival} <= seconds.keys() else "-"


def _each(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


@_quote
def changes() -> Figures:
    """By arm, the fastest over the limited link first; of each rate in turn."""
    result = stored("changes")
    limited, free = dict.fromkeys(row["link"] for row in result["rows"])
    rates = list(dict.fromkeys(row["learning rate"] for row in result["rows"]))

    def of(arm: str, link: str, key: str) -> list[float]:
        found = (find(result, **{"arm": arm, "link": link, "learning rate": rate}) for rate in rates)
        return [float(row[key]) for row in found]

    values = {
        arm: {
            "out": of(arm, limited, "out of whole"),
            "limited": of(arm, limited, "seconds of whole"),
            "free": of(arm, free, "seconds of whole"),
            "cpu": of(arm, free, "CPU of whole"),
        }
        for arm in sorted(
            {row["arm"] for row in result["rows"]} - {"alone"}, key=lambda arm: of(arm, limited, "seconds")
        )
    }
    lines = [{"arm": arm, **{key: _each(some) for key, some in its.items()}} for arm, its in values.items()]
    alone, whole = of("alone", limited, "seconds"), of("whole", limited, "seconds")
    remain = {
        arm: _each(
            (seconds - least) / (longest - least)
            for seconds, least, longest in zip(of(arm, limited, "seconds"), alone, whole, strict=True)
        )
        for arm in ("changes", "auto", "int8")
    }
    shown = " / ".join(f"{rate:g}" for rate in rates)
    return result | {"rows": lines, "values": values, "rates": shown, "remain": remain}


@_quote
def rounded_sums() -> Figures:
    return stored("int8_sums")


@_quote
def decoupled() -> Figures:
    result = stored("decoupled")
    return result | {"busy": find(result, what="84 pushes, beside a busy owner"), "status": result["rows"][-1]}


@_quote
def changes_demo() -> Figures:
    result = stored("changes_demo")
    cpu = {arm: _each(row["CPU of whole"] for row in rows(result, arm=arm)) for arm in ("auto", "changes")}
    return result | {"cpu": cpu, "rates": " / ".join(f"{row['learning rate']:g}" for row in rows(result, arm="auto"))}


@_quote
def hosts_bytes() -> Figures:
    result = stored("hosts_bytes")
    (least,) = rows(result, arm="odc", weights="changed, lr 1e-05", sums="int8")
    arms = {row["arm"]: row["bytes out a parameter"] / least["bytes out a parameter"] for row in result["rows"]}
    of = {by: [times for arm, times in arms.items() if arm.startswith(f"fsdp2 by {by}")] for by in ("gloo", "rings")}
    return result | {by: f"{min(times):.0f} to {max(times):.0f}" for by, times in of.items()}


@_quote
def packing() -> Figures:
    result = stored("packing")
    return result | {
        "both": " / ".join(f"{row['both, s/GB']:.2f}" for row in result["rows"]),
        "copy": span([row["a copy, s/GB"] for row in result["rows"]]),
    }


@_quote
def recovery() -> Figures:
    result, hosts_ = stored("recovery"), stored("recovery_hosts")
    ways = [row for row in result["rows"] if "lost_s" in row]
    kept = [row for row in result["rows"] if "kept_over_not" in row]
    return result | {"ways": ways, "kept": kept, "host": hosts_["rows"][0], "buddies": hosts_["rows"][1]}


@_quote
def hosts_simulated() -> Figures:
    result, lines = stored("simulated_hosts"), []
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    for case, by_arm in cases(result):
        ratios = (f"{by_arm[arm]['simulated / measured']:.2f}" if arm in by_arm else "-" for arm in arms)
        lines.append({"case": case, "of_measured": cells(ratios)})
    return result | {"rows": lines, "arms": cells(f"`{arm}`" for arm in arms)}


@_quote
def split() -> Figures:
    result, wide, demo = stored("split_longalign"), stored("split_bytes"), stored("split_demo")
    by_count: dict[int, dict[str, Result]] = {}
    for row in result["rows"]:
        by_count.setdefault(row["samples a rank"], {})[row["arm"]] = row
    counts = by_count.values()
    seconds = [{arm: row["step_s"] for arm, row in rows.items()} for rows in counts]

    def over(arm: str) -> list[str]:
        return [_over(each, arm, "odc-split") for each in seconds]

    rivals = [best(each, but="odc-split") for each in seconds]
    whole, cut = (demo["arms"][arm] for arm in ("odc", "odc-split"))
    return result | {
        "minibatches": result["lengths"].rpartition("; ")[2].replace("the 1 most", "the most"),
        "slower": result["control"]["fsdp2"] / result["control"]["odc"],
        "counts": cells(f"{count} a rank" for count in by_count),
        "over_ideal": cells(f"{by['odc']['over mean']:.2f} -> {by['odc-split']['over mean']:.2f}" for by in counts),
        "over_best": cells(f"{over(rival)[i]} (`{rival}`)" for i, rival in enumerate(rivals)),
        "over_fsdp2": cells(over("fsdp2")),
        "at_most": cells((by["fsdp2"]["over mean"] for by in counts), ".2f"),
        "over_equal": cells(over("fsdp2-equal-samples")),
        "pieces": cells((by["odc-split"]["pieces"] for by in counts), ".0f"),
        "wide": wide,
        "demo": demo,
        "gain": whole["total"]["seconds"] / cut["total"]["seconds"],
        "demo_pieces": fmean(cut["plan"]["pieces"]),
    }


@_quote
def split_trust() -> Figures:
    result = stored("split_longalign")
    return {"ratios": span([row["simulated/emulated"] for row in rows(result, arm="odc-split")])}


@_quote
def reproduction() -> Figures:
    """The page is written by hand around printed rows: source, what, published, simulated, other lengths, agrees."""
    judged = re.compile(r" \| (yes|\*\*no\*\*)")
    lines = [line.split(" | ") for line in page("reproduction").splitlines() if judged.search(line)]
    outcomes = [cells[-1].removesuffix(" |") for cells in lines]
    gains = [[float(cell.split("x")[0]) - 1 for cell in cells[2:4]] for cells in lines if "bubble" not in cells[1]]
    return {
        "published": len(lines),
        "agree": outcomes.count("yes"),
        "within": sum(outcome.endswith(", b") for outcome in outcomes),
        "opposite": sum(published * simulated < 0 for published, simulated in gains),
    }
