"""Takes every figure that README and docs/ quote again, at this commit, then writes the pages: `make figures`.

Run as root on a machine with nothing else to do, with a clean tree; it takes about 105 minutes on two cores. A step
whose results are stored at this commit already is skipped, so a run that was ended goes on where it was. Before each
step it waits, `SETTLE_S` at most, until the load of the one before has died down. A step that fails does not end the
run; those that failed are listed at the end, and the exit code is 1. Pages are not code: they may change meanwhile.

`python -m bench.figures --only deaths,hosts` takes some steps again, whatever is stored; `--list` prints the steps.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.stored import QUIET, RESULTS, load
from odc.provenance import commit

ROOT = Path(__file__).parent.parent
SETTLE_S, _LIMIT_S = 100.0, 1800.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class FigureStep:
    """A command after `python -m`, and the results that it stores. `overlay` names the environment that it runs in."""

    command: str
    stores: tuple[str, ...]
    overlay: str = ".venv"

    def words(self) -> list[str]:
        python = ROOT / self.overlay / "bin" / "python"
        return [str(python) if python.exists() else sys.executable, "-m", *shlex.split(self.command)]


def _bench(name: str, options: str = "", *stores: str, overlay: str = ".venv") -> FigureStep:
    words = f"bench.{name} {options} --results bench/results".split()
    return FigureStep(" ".join(words), stores or (name,), overlay)


def _pytest(*names: str, overlay: str = ".venv") -> FigureStep:
    """Several in one step are measured without a pause: the load before them is that before the first."""
    words = ("pytest -q --timeout 1200", *(f"bench/bench_{name}.py" for name in names), "--results bench/results")
    return FigureStep(" ".join(words), names, overlay)


def _compare(command: str, name: str) -> FigureStep:
    return FigureStep(f"odc.cli {command} --json bench/results/{name}.json", (name,))


STEPS = (
    _compare("compare --demo --repeats 3 --steps 5", "demo"),
    _bench("emulated", "--regime longalign --steps 2 --scale 0.3", "emulated_longalign"),
    _bench("hosts"),
    _bench("changes", overlay=".venv-trl"),
    _bench("changes", "--demo --links none --tokens 256 --repeats 40", "changes_demo"),
    _bench("landings", overlay=".venv-nixl"),
    _bench("emulated", "--regime swe-smith --steps 2 --scale 0.08", "emulated_swe_smith"),
    _pytest("fetch", "push", "overlap", "pieces", "inputs"),
    _pytest("packing"),
    _bench("split", "--regime longalign --counts 1 4 --steps 1 --seconds 9", "split_longalign"),
    _compare(
        "compare --demo --max-tokens 8192 --minibatch-size 3 --arms odc,odc-split --repeats 2 --steps 5", "split_demo"
    ),
    _bench("evaluation", "--seconds 0.15", "evaluation", "gather"),
    _bench("deaths"),
    _bench("stand_in"),
    _bench("decoupled"),
    _bench("virtual_step"),
    _bench("recovery"),
    _bench("recovery_hosts"),
    _compare("train-mm --demo --repeats 2 --steps 4 --arms fsdp2/none,fsdp2/full,odc/none,odc/full", "train_mm"),
    _bench("split_bytes", "--steps 1"),
    _bench("generation", "--repeats 3 --requests 8"),
    _bench("handover", "--seconds 1 --pairs 3 --steps 4 --rounds 7", "handover", "handover_steps"),
    _bench("handover", "--far", "handover_far", overlay=".venv-trl"),
    _bench("weight_sync", overlay=".venv-integrations"),
    _bench("verl_step", overlay=".venv-integrations"),
    _bench("grpo", "--steps 4 --repeats 1 --response-tokens 512 --max-tokens 576"),
    _bench("simulated_vs_emulated", "--ranks 2 8 --steps 1 --scale 0.2"),
    _pytest("dispatch"),
    _pytest("planners", overlay=".venv-integrations"),
    _bench("order", "--rounds 60"),
    _bench("convergence", "--steps 200"),
    _bench("int8_sums", "--seeds 2"),
    _bench("simulated_hosts", "", "simulated_hosts", "hosts_bytes"),  # of what others have stored
)


def stored_at(step: FigureStep, wanted: str) -> bool:
    """Whether all that the step stores was taken at this commit."""
    try:
        return all(load(name).get("commit") == wanted for name in step.stores)
    except (OSError, ValueError):
        return False


def settle(limit_s: float) -> float:
    """Waits until the load is at most QUIET, or for `limit_s`; returns the 1-minute load average."""
    deadline = time.monotonic() + limit_s
    while os.getloadavg()[0] > QUIET and time.monotonic() < deadline:
        time.sleep(1.0)
    return os.getloadavg()[0]


def take(step: FigureStep, wanted: str) -> str:
    """Runs one step; returns what went wrong, or nothing. Its ranks end with it: they watch their parent."""
    try:
        done = subprocess.run(step.words(), cwd=ROOT, env={**os.environ, **_ENVIRONMENT}, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"ran for more than {_LIMIT_S:g} s"
    if done.returncode:
        return f"ended with exit code {done.returncode}"
    return "" if stored_at(step, wanted) else "stored nothing at this commit: did the code change meanwhile?"


def take_all(steps: Sequence[FigureStep], wanted: str, *, again: bool = False, limit_s: float = SETTLE_S) -> list[str]:
    """Runs the steps that are not stored at commit `wanted` (`again`: all); returns what failed."""
    failed, began = [], time.monotonic()
    for number, step in enumerate(steps, start=1):
        title = f"[{number}/{len(steps)}] {', '.join(step.stores)}"
        if not again and stored_at(step, wanted):
            print(f"{title}: stored at this commit", flush=True)
            continue
        print(f"{title}: python -m {step.command}", flush=True)
        before, start = settle(limit_s), time.monotonic()
        wrong = take(step, wanted)
        took = f"{time.monotonic() - start:.0f} s, {(time.monotonic() - began) / 60:.1f} minutes in all"
        print(f"{title}: {wrong or 'done'} ({took}, load {before:.2f} before)", flush=True)
        if wrong:
            failed.append(f"{step.stores[0]}: {wrong}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of results, with commas between them; taken again even if stored")
    parser.add_argument("--list", action="store_true", help="print the steps and run none")
    arguments = parser.parse_args()
    only = set(arguments.only.split(",")) if arguments.only else set()
    unknown = only - {name for step in STEPS for name in step.stores}
    if unknown:
        parser.error(f"no step stores {', '.join(sorted(unknown))}")
    steps = [step for step in STEPS if not only or only & set(step.stores)]
    if arguments.list:
        print("\n".join(f"{', '.join(step.stores)}: python -m {step.command}" for step in steps))
        return
    wanted = commit()
    if wanted is None or wanted.endswith("+dirty"):
        sys.exit("figures need a clean checkout: commit or remove what differs outside docs/ and bench/results")
    failed = take_all(steps, wanted, again=bool(only))
    if subprocess.run([sys.executable, "-m", "bench.readme"], cwd=ROOT, check=False).returncode:
        failed.append("bench.readme: could not write the pages")
    print(f"{len(steps)} steps, {len(failed)} failures; pages are written from {RESULTS.name}", flush=True)
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
