"""GRPO on two ranks and skewed response lengths: odc with LB-Mini against FSDP2 with verl's equal counts.

`python -m bench.grpo` runs whole jobs (`odc.experiments.grpo`): real generation, real training. Responses are cut at
lengths drawn from a clipped lognormal (`lengths="drawn"`), the same in every arm, so that skew does not change as the
model learns. The table counts training only, from the first microbatch to the end of the update on the slowest rank;
the rollout is the same work in all arms. Arms are interleaved, and the time is the sum over steps of each step's median
over repeats.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.script import Script

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


def row_of(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's row of one arm."""
    seconds = [median(run["train_s"][i] for run in runs) for i in range(len(runs[0]["train_s"]))]
    return {
        "arm": name,
        "train_s a step": fmean(seconds),
        "speed-up": 1.0,  # over the first arm, filled in with all rows
        "bubble": median(fmean(run["bubble"]) for run in runs),
        "microbatches by rank": " ".join("/".join(map(str, counts)) for counts in runs[0]["counts"]),
        "loss, last step": runs[0]["loss"][-1],
    }


def main() -> None:
    from odc.experiments.grpo import GrpoConfig

    script = Script(
        __doc__,
        model=("qwen2-demo", "shipped config"),
        prompts=(4, "of a step"),
        group=(4, "responses to a prompt"),
        response_tokens=(768, "at most"),
        max_tokens=(832, "cap of a microbatch"),
        steps=(6, "the first is not counted"),
        repeats=(3, "runs of each arm"),
        seed=(0, "of weights, prompts and lengths"),
    )
    given = script.given
    same = ("model", "prompts", "group", "response_tokens", "max_tokens", "steps", "seed")
    config = GrpoConfig(lengths="drawn", lr=1e-4, **{name: getattr(given, name) for name in same})
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for repeat in range(given.repeats):
        for name, changes in ARMS.items():
            runs[name].append(run_arm(config.with_(**changes)))
            print(f"repeat {repeat + 1}: {name}: {fmean(runs[name][-1]['train_s']):.2f} s a step", file=sys.stderr)
    rows = [row_of(name, some) for name, some in runs.items()]
    for row in rows:
        row["speed-up"] = rows[0]["train_s a step"] / row["train_s a step"]
    tokens = next(iter(runs.values()))[0]["tokens"]
    lengths = f"{given.prompts * given.group} responses a step, of {tokens} tokens on average"
    title = "GRPO, 2 ranks, skewed responses: training time of a step"
    script.store("grpo", title, rows, lengths=lengths, runs=runs)


if __name__ == "__main__":
    main()
