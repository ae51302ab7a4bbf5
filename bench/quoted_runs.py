"""Paragraphs and tables of docs/ about evaluation, reinforcement learning and other runs."""

from __future__ import annotations

from bench.quoted import below, best, command, find, load, note, prose, span
from odc.bench.report import table


def evaluation() -> str:
    """bench/results/README.md: forwards and time of four ways."""
    result = load("evaluation")
    lines = [
        {
            "way": row["way"].replace("odc, by length", "odc, dealt by length"),
            "forwards by rank": row["forwards by rank"],
            "in all": row["forwards"],
            "times as fast as the first": f"{row['times as fast as the first']:.2f}",
            "share of the best possible": f"{row['share of the best']:.2f}",
        }
        for row in result["rows"]
    ]
    return table(lines) + below(result)


def generation() -> str:
    """docs/transformers.md: lockstep against each rank's own pace."""
    result = load("generation")
    own, kept = (find(result, way=way) for way in ("odc", "odc, kept"))
    return prose(
        f"Measured (`{command(result)}`, 2 ranks, 2 cores, {result['lengths']}): "
        f"{own['times as fast as the first']:.2f} times as fast as FSDP2 in lockstep (in single runs "
        f"{own['least']:.2f} to {own['most']:.2f}), {own['times as fast as the second']:.2f} times as fast as odc in "
        f"lockstep. With `model.set_reshard_after_forward(False)`, which keeps a whole model in memory, "
        f"{kept['times as fast as the first']:.2f} times.{note(result)}"
    )


def gather() -> str:
    """bench/results/README.md: bringing results together."""
    result = load("gather")
    names = {
        "dist.gather_object": "`dist.gather_object` (rank by rank)",
        "in order, into a list": "`gather_results`, a list in order",
        "in order, into a function": "`gather_results(into=...)`, in order",
    }
    lines = [
        {
            "way": names[row["way"]],
            "times as long as the first": f"{row['times as long as gather_object']:.2f}",
            "MiB held on rank 0 beyond its own results": row["MiB held on rank 0"],
        }
        for row in result["rows"]
    ]
    return table(lines) + below(result)


def handover() -> str:
    """bench/results/README.md: a reader outside the job."""
    rates, steps = load("handover"), load("handover_steps")
    kept, fresh = ([r["ratio"] for r in rates["rows"] if r["pages"] == pages] for pages in ("kept", "fresh"))
    sizes = [r["MiB"] for r in rates["rows"]]
    one, two = (find(steps, buffers=n) for n in (1, 2))
    extra = [(r["read_s"] - r["alone_s"]) * 1e3 for r in (one, two)]
    return prose(
        f"Measured (`{command(rates)}`, 2 ranks, 2 cores, {span(sizes, '.0f')} MiB): a "
        f"full fetch runs at {span(kept)} of memcpy's rate into memory that is there, at {span(fresh)} into new "
        f"memory. With *emulated* compute of {one['slept_s']:g} s a step, a third process that reads without pause "
        f"({one['reads a step']:.0f} reads a step) makes steps {one['read/alone'] - 1:.1%} longer with one buffer and "
        f"{two['read/alone'] - 1:.1%} with two: {span(extra, '.0f')} ms, which it takes from the two cores and "
        f"memory.{note(rates)}"
    )


def grpo() -> str:
    """bench/results/README.md: verl's equal counts against the arms."""
    result = load("grpo")
    least = min(row["train_s a step"] for row in result["rows"] if not row["arm"].startswith("odc"))
    lines = [
        {
            "arm": row["arm"],
            "training, s a step": f"{row['train_s a step']:.2f}",
            "speed-up": f"{row['speed-up']:.2f}",
            "over the best of torch's": f"{least / row['train_s a step']:.2f}",
            "bubble, measured": f"{row['bubble']:.0%}",
        }
        for row in result["rows"]
    ]
    return table(lines) + below(result)


def inputs() -> str:
    """bench/results/README.md: prepared ahead against all at once."""
    result = load("inputs")
    eager, one = find(result, prefetch="all (eager)"), find(result, prefetch="1")
    return prose(
        "With rollout server and trainer *emulated* (slept), 32 microbatches of 4 MiB (`make bench "
        'ARGS="-k inputs"`), one '
        f"prepared ahead takes {one['peak_MiB']:.0f} MiB instead of {eager['peak_MiB']:.0f}, uses samples "
        f"{one['mean_age_ms']:.0f} ms after they were made instead of {eager['mean_age_ms']:.0f}, and the step takes "
        f"{one['step_s']:.2f} s instead of {eager['step_s']:.2f}.{note(result)}"
    )


def train_mm() -> str:
    """bench/results/README.md: the demo's arms."""
    result = load("train_mm")
    arms = result["arms"]
    fastest = max(arms, key=lambda name: arms[name]["tokens_per_s"])
    lines = []
    for name, arm in arms.items():
        phases = [arm["phases"][phase] for phase in ("image", "audio", "llm")]
        cells = {
            "step, s": f"{arm['step_s']['median']:.2f}",
            "tokens/s": f"{arm['tokens_per_s']:,.0f}",
            "useful GFLOP/s": f"{arm['useful_flops_per_s'] / 1e9:.0f}",
            "bubble": f"{arm['bubble']['median']:.0%}",
            "bubble of image, audio, llm": ", ".join(f"{phase['bubble']['median']:.0%}" for phase in phases),
            "audio padded": f"{phases[1]['padding']:.0%}",
        }
        bold = {"step, s", "tokens/s", "useful GFLOP/s"} if name == fastest else set()
        lines.append({"": f"`{name}`", **{key: f"**{v}**" if key in bold else v for key, v in cells.items()}})
    steps = result["job"]["steps"] - result["skipped_steps"]
    ranks = result["job"]["ranks"]
    head = (
        f"{ranks} ranks on {result['machine']['cores']} cores, {result['job']['minibatch_size']} examples a step, "
        f"{steps} counted steps, medians over {result['repeats']} interleaved runs "
        f"(`{command(result)}`).{note(result)}"
    )
    return f"{prose(head)}\n\n{table(lines)}\n\n{_gains(result)}"


def _gains(result: dict[str, object]) -> str:
    arms: dict[str, dict[str, object]] = result["arms"]  # type: ignore[assignment]

    def times(slow: str, fast: str) -> str:
        speed, step = ({name: figure(arms[name]) for name in (slow, fast)} for figure in (_tokens_per_s, _median_step))
        return f"{speed[fast] / speed[slow]:.2f} ({step[slow] / step[fast]:.2f})"

    rival = best({name: -_tokens_per_s(arm) for name, arm in arms.items() if not name.startswith("odc")})
    return prose(
        "By tokens/s over all steps (in brackets by the median step), balancing every phase is worth "
        f"{times('fsdp2/none', 'fsdp2/full')} under FSDP2 and {times('odc/none', 'odc/full')} under odc; both together "
        f"{times('fsdp2/none', 'odc/full')}. Over the fastest arm of torch, `{rival}`, `odc/full` gains "
        f"{times(rival, 'odc/full')}."
    )


def _tokens_per_s(arm: dict[str, object]) -> float:
    return float(arm["tokens_per_s"])  # type: ignore[arg-type]


def _median_step(arm: dict[str, object]) -> float:
    return float(arm["step_s"]["median"])  # type: ignore[index]


def order() -> str:
    """bench/results/README.md: what it costs that the order of arrival does not matter."""
    result = load("order")

    def times(what: str) -> str:
        found = [find(result, what=f"push, {what}", dtype=dtype)["times_default"] for dtype in ("float32", "bfloat16")]
        return f"{found[0]:.1f} (fp32 gradients) and {found[1]:.1f} (bf16)"

    added = find(result, what="add alone, fp64")["times_default"]
    return prose(
        f"Measured (`{command(result)}`, 2 ranks, {result['rows'][0]['MiB']} MiB, one "
        f"interleaved run, {result['machine']['cpu']}): a push until the owner has added it takes "
        f"{times('reproducible')} times as long with `reproducible=True` as by default. "
        f"Adding fp32 to fp64 alone takes {added:.1f} times as long as "
        f"to fp32.{note(result)}"
    )


def convergence() -> str:
    """bench/results/README.md: losses of the arms, step by step."""
    result = load("convergence")
    job = result["job"]
    lines = [
        {
            "arm": f"`{row['arm']}`",
            "first loss": f"{row['first loss']:.2f}",
            "mean of the last 50": f"{row['mean loss of the last 50']:.2f}",
            "largest distance to `fsdp2`": f"{row['largest gap']:.1e}",
            "at the last step": f"{row['final gap']:.1e}",
        }
        for row in result["rows"]
    ]
    return f"{table(lines)}\n\n" + prose(
        f"`{command(result)}`: {job['ranks']} ranks, config `{job['model']}`, {job['steps']} steps of "
        f"{job['minibatch_size']} documents of the demo's text. `fsdp2-resident` is the control.{note(result)}"
    )


def pieces() -> str:
    """docs/split.md: what cutting a sample in two costs the processor."""
    result = load("pieces")
    ratios = {row["what"].rpartition(" ")[2]: row for row in result["rows"]}
    fp32, bf16 = (
        f"{ratios[dtype]['pieces_over_whole']} ({ratios[dtype]['least']} to {ratios[dtype]['most']})"
        for dtype in ("float32", "bfloat16")
    )
    return prose(
        f"Two pieces of a sample of 4,096 tokens take {fp32} times the processor time of the whole sample in fp32, "
        f"{bf16} in bf16, medians, least and most of turns (*measured*, `bench/bench_pieces.py`).{note(result)}"
    )


def deaths() -> str:
    """docs/errors.md: how long after a kill every survivor has raised."""
    result = load("deaths")
    lines = [
        {
            "ranks": row["ranks"],
            "kills": row["kills"],
            "median, s": f"{row['median_s']:.2f}",
            "most, s": f"{row['most_s']:.2f}",
            "slowest where it was killed in": row["slowest at"].replace("_", " "),
        }
        for row in result["rows"]
    ]
    return f"{table(lines)}\n\n" + prose(
        "*Measured*: from SIGKILL of a rank until the last survivor had raised, naming it "
        f"(`{command(result)}`).{note(result)}"
    )
