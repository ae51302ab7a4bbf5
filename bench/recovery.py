"""What the death of a rank costs: odc's recovery beside torchrun with checkpoints; and what keeping costs without one.

Run as `OMP_NUM_THREADS=1 python -m bench.recovery --results bench/results`. Everything is *measured*, on two ranks that
train a small transformer; rank 1 is killed in the forward of some steps. Ways:

* odc, forked: the new process is forked from one that has imported torch, as `odc train --recover` does;
* odc, fresh: a new interpreter;
* torchrun, checkpoints: all ranks are started again, and go on from the last checkpoint (one each ten steps).

`lost_s` is the time from the kill until the killed step is done on every rank, without an ordinary step; `lost_steps`
are steps that were done twice. `but_imports_s` leaves out what the new process takes to import torch and odc. The last
rows compare steps that are kept with steps that are not, in turns: the median and the quartiles of the pairs' ratios.
`keep_s` is what keeping itself takes in a step, from the end of the block of `attempt` to its return.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from bench.recovery_job import train
from bench.script import Script
from odc.experiments.launch import LaunchSite, launch
from odc.ranks.processes import host_store

RANKS, LIMIT_S = 2, 300.0
Note = dict[str, Any]
Notes = dict[int, list[Note]]  # by rank


def notes_of(folder: Path, ranks: int = RANKS) -> Notes:
    return {
        rank: [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    }


def forked(folder: Path, steps: int, kills: list[int]) -> None:
    launch(train, str(folder), steps, "host", kills, ranks=RANKS, restarts=len(kills))


def fresh(folder: Path, steps: int, kills: list[int]) -> None:
    """Starts interpreters, and another in the place of one that has ended with an error."""
    store = host_store()
    site = LaunchSite(range(RANKS), RANKS, "127.0.0.1", store.port)

    def start(rank: int) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "bench.recovery_job", str(folder), str(steps), "host", _listed(kills)]
        return subprocess.Popen(program, env={**os.environ, **site.environment(rank)})

    processes, end = [start(rank) for rank in range(RANKS)], time.monotonic() + LIMIT_S
    while any(process.poll() != 0 for process in processes):
        if time.monotonic() > end:
            raise SystemExit(f"ranks have not ended within {LIMIT_S:g} s")
        for rank, process in enumerate(processes):
            if process.poll():
                processes[rank] = start(rank)
        time.sleep(0.005)


def torchrun(folder: Path, steps: int, kills: list[int]) -> None:
    options = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", str(len(kills))]
    options += ["--monitor-interval", "0.1"]
    program = ["-m", "bench.recovery_job", str(folder), str(steps), "checkpoints", _listed(kills)]
    # Else gloo finds addresses of the ranks before in a store that stays, and needs further restarts at times.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, *program]
    subprocess.run(command, check=True, timeout=LIMIT_S, env=environment)


WAYS = {"odc, forked": forked, "odc, fresh": fresh, "torchrun, checkpoints": torchrun}


def _listed(kills: list[int]) -> str:
    return ",".join(map(str, kills))


def row_of(way: str, notes: Notes) -> dict[str, Any]:
    """One line of the table."""
    ends = [note for each in notes.values() for note in each if note["what"] == "end"]
    ordinary = median(durations(notes))
    kills = [note for note in notes[1] if note["what"] == "killed"]
    lost, but_imports = [], []
    for kill in kills:
        lost.append(done_again(notes, kill) - kill["at"] - ordinary)
        begun = [note for note in notes[1] if note["at"] > kill["at"]]
        imports = next(n["at"] for n in begun if n["what"] == "imported") - begun[0]["at"] if _new(begun) else 0.0
        but_imports.append(lost[-1] - imports)
    done_twice = (len(ends) - len({note["step"] for note in ends}) * RANKS) / RANKS
    return {
        "way": way,
        "kills": len(kills),
        "step_s": ordinary,
        "lost_s": median(lost),
        "most_lost_s": max(lost),
        "but_imports_s": median(but_imports),
        "lost_steps": done_twice / len(kills) + 1,  # and the killed one itself
    }


def done_again(notes: Notes, kill: Note) -> float:
    """When the step that a kill befell was done on every rank."""
    wanted = "end", kill["step"]
    return max(
        min(note["at"] for note in each if (note["what"], note["step"]) == wanted and note["at"] > kill["at"])
        for each in notes.values()
    )


def _new(begun: list[Note]) -> bool:
    """Whether the process whose notes these are has imported torch itself."""
    return begun[0]["what"] == "began"


def durations(notes: Notes) -> list[float]:
    """Seconds of the steps that nothing interrupted."""
    found = []
    for each in notes.values():
        for first, second in itertools.pairwise(each):
            if (first["what"], second["what"]) == ("begin", "end"):
                found.append(second["at"] - first["at"])
    return found


def draw(path: Path, jobs: dict[str, Notes]) -> None:
    """Every job as one line a rank: steps, those that are done again, and kills."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(jobs), 1, sharex=True, figsize=(10, 1.4 * len(jobs)), layout="constrained")
    for axis, (way, notes) in zip(axes, jobs.items(), strict=True):
        zero = min(note["at"] for each in notes.values() for note in each if note["what"] == "begin")
        for rank, each in notes.items():
            seen: set[int] = set()
            for first, second in itertools.pairwise(each):
                if (first["what"], second["what"]) == ("begin", "end"):
                    colour = "tab:orange" if first["step"] in seen else "tab:blue"
                    axis.barh(-rank, second["at"] - first["at"], left=first["at"] - zero, color=colour, height=0.8)
                    seen.add(first["step"])
            for note in each:
                if note["what"] == "killed":
                    axis.plot(note["at"] - zero, -rank, "x", color="black", markersize=9, markeredgewidth=2)
        axis.set_yticks([-rank for rank in notes], [f"rank {rank}" for rank in notes])
        axis.set_title(way, fontsize=10, loc="left")
    axes[-1].set_xlabel("seconds; a cross is a kill, orange is a step that is done again")
    figure.savefig(path, dpi=100)


def kept_rows(pairs: int) -> list[dict[str, Any]]:
    """Steps that are kept beside steps that are not, for two models."""
    rows = []
    models = ("9.5M parameters", 256, 12, 3 * pairs), ("101M parameters", 1024, 8, pairs)
    for name, width, layers, count in models:
        (found, *_) = launch(keep_in_turns, width, layers, count, ranks=RANKS, restarts=1)
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        rows.append({"way": f"kept beside not kept, {name}", **found})
    return rows


def keep_in_turns(width: int, layers: int, pairs: int) -> dict[str, float]:
    """Seconds of a step without keeping, those that keeping takes, and the ratio of steps with it to steps without."""
    import odc

    torch.set_num_threads(1)
    recovery = odc.Recovery()
    block = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    model: Any = torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    for layer in model.layers:
        odc.fully_shard(layer)
    odc.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    recovery.protect(model, optimizer)
    times: dict[int, list[float]] = {1: [], 1 << 30: []}
    keeping = []
    for number in recovery.steps(2 * pairs + 2):
        every = (1, 1 << 30)[(number + number // 2) % 2]  # kept, not, not, kept
        recovery.every = every
        begin = time.perf_counter()
        with recovery.attempt():
            model(torch.randn(8, 128, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            trained = time.perf_counter()
        if number >= 2:
            end = time.perf_counter()
            times[every].append(end - begin)
            keeping += [end - trained] * (every == 1)
    kept, not_kept = times.values()
    lower, middle, upper = quantiles((a / b for a, b in zip(kept, not_kept, strict=True)), n=4)
    return {
        "step_s": median(not_kept),
        "keep_s": median(keeping),
        "pairs": pairs,
        "kept_over_not": middle,
        "lower_quartile": lower,
        "upper_quartile": upper,
    }


def main() -> None:
    script = Script(
        __doc__,
        kills=(3, "of each way"),
        between=(12, "steps between two kills"),
        pairs=(10, "of steps of the large model; of the small one three times as many"),
    )
    given, jobs, rows = script.given, {}, []
    kills = [given.between * (i + 1) - 5 for i in range(given.kills)]
    for way, run in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), kills[-1] + given.between - 3, kills)
            jobs[way] = notes_of(Path(folder))
        rows.append(row_of(way, jobs[way]))
        print(rows[-1], file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row["lost_s"])
    given.results.mkdir(parents=True, exist_ok=True)
    draw(given.results / "recovery.png", jobs)
    script.store("recovery", "What the death of a rank costs, on two ranks", [*rows, *kept_rows(given.pairs)])


if __name__ == "__main__":
    main()
