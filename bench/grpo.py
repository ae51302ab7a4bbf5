"""GRPO on two ranks and skewed response lengths: odc with LB-Mini against FSDP2 with verl's equal counts.

`python -m bench.grpo` runs whole jobs (`odc.experiments.grpo`): real generation, real training. Responses are cut at
lengths drawn from a clipped lognormal (`lengths="drawn"`), the same in every arm, so that skew does not change as the
model learns. The table counts training only, from the first microbatch to the end of the update on the slowest rank;
the rollout is the same work in all arms. Arms are interleaved, and the time is the sum over steps of each step's median
over repeats.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from odc.bench.report import store
from odc.provenance import begin

ARMS = {
    "fsdp2, verl's equal counts": {"arm": "fsdp2", "balance": "verl"},
    "fsdp2, LB-Micro": {"arm": "fsdp2"},
    "fsdp2-resident, LB-Mini": {"arm": "fsdp2-resident"},
    "odc, verl's equal counts": {"arm": "odc", "balance": "verl"},
    "odc, LB-Mini": {"arm": "odc"},
}


def run_arm(config: Any) -> dict[str, Any]:
    """Runs one job; returns seconds, counts, rewards and measured bubbles of all steps but the first."""
    from odc.experiments.grpo import run
    from odc.trace import breakdown, load_spans

    with tempfile.TemporaryDirectory() as spans:
        result = run(config.with_(spans=spans))[0]
        recorded = {rank: load_spans(Path(spans) / f"rank-{rank}.jsonl") for rank in range(config.ranks)}
        bubbles = [step.bubble for step in breakdown(recorded).steps][1:]
    steps = result.steps[1:]
    return {
        "train_s": [step.train_s for step in steps],
        "rollout_s": [step.rollout_s for step in steps],
        "bubble": bubbles,
        "counts": [step.counts for step in steps],
        "loss": [step.loss for step in steps],
        "tokens": [step.response_tokens for step in steps],
    }


def row_of(name: str, runs: list[dict[str, Any]], base: float | None) -> dict[str, Any]:
    """The table's row of one arm."""
    seconds = [median(run["train_s"][i] for run in runs) for i in range(len(runs[0]["train_s"]))]
    total = sum(seconds)
    return {
        "arm": name,
        "train_s a step": total / len(seconds),
        "speed-up": (base or total) / total,
        "bubble": median(fmean(run["bubble"]) for run in runs),
        "microbatches by rank": " ".join("/".join(map(str, counts)) for counts in runs[0]["counts"]),
        "loss, last step": runs[0]["loss"][-1],
    }


def main() -> None:
    from odc.experiments.grpo import GrpoConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--model", default="qwen2-demo")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--response-tokens", type=int, default=768)
    parser.add_argument("--max-tokens", type=int, default=832)
    parser.add_argument("--steps", type=int, default=6, help="the first is not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun = begin()
    config = GrpoConfig(
        model=given.model,
        prompts=given.prompts,
        group=given.group,
        response_tokens=given.response_tokens,
        max_tokens=given.max_tokens,
        steps=given.steps,
        lengths="drawn",
        objective="odc",
        lr=1e-4,
        seed=given.seed,
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for repeat in range(given.repeats):
        for name, changes in ARMS.items():
            runs[name].append(run_arm(config.with_(**changes)))
            print(f"repeat {repeat + 1}: {name}: {fmean(runs[name][-1]['train_s']):.2f} s a step", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    base = None
    for name, some in runs.items():
        rows.append(row_of(name, some, base))
        base = base or rows[0]["train_s a step"] * len(some[0]["train_s"])
    lengths = f"{given.prompts * given.group} responses a step, of {runs[BASE][0]['tokens']} tokens on average"
    store(
        given.results,
        "grpo",
        "GRPO, 2 ranks, skewed responses: training time of a step",
        rows,
        lengths=lengths,
        runs=runs,
        begun=begun,
    )


BASE = next(iter(ARMS))


if __name__ == "__main__":
    main()
