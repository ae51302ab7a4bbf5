"""What the death of a whole host costs, and what keeping states on other hosts does: bytes out of each host.

Run as root, as `OMP_NUM_THREADS=1 python -m bench.recovery_hosts --results bench/results`. Hosts are network namespaces
of this machine, joined without a limit, and train the model of `bench.recovery`; everything is *measured*.

* On 2 hosts of 2 ranks with `keep="buddy"` all ranks of a host are killed within a step, of either host in turn, and
  forked anew there at once. `detected_s` runs from the kill until both survivors have learned of it, `lost_s` until the
  step is done on every rank, without an ordinary step.
* On 3 hosts of 1 rank the bytes that a host's device sends from the end of one step to that of the next, by `keep`;
  `extra_bytes` is what a buddy adds, of the host where it is least and of that where it is most, and `formula` the
  12 E / N bytes of docs/recovery.md, which leave out the text: 13 KB a rank and 0.2 KB a parameter tensor.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench import recovery_job
from bench.recovery import Note, Notes, done_again, durations, notes_of
from bench.script import Script

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the hosts are those of the tests
LIMIT_S = 300.0


def trained(hosts: Any, per_host: int, folder: Path, steps: int, keep: str, restarts: int) -> Notes:
    """A job of `recovery_job` on all hosts, and its notes."""
    from support.recovering_hosts import Launch, run_program_on

    launches = [Launch(range(i * per_host, (i + 1) * per_host), restarts) for i in range(len(hosts))]
    run_program_on(hosts, per_host, launches, False, recovery_job.train, folder, steps, keep, [])
    return notes_of(folder, per_host * len(hosts))


def kill_hosts(hosts: Any, folder: Path, kills: list[int], killed: list[Note]) -> None:
    """Once the last rank has begun step k of `kills`, kill the ranks of a host, the last and the first in turn."""
    from support.recovering_hosts import kill_ranks

    lines = folder / f"{2 * len(hosts) - 1}.jsonl"
    for number, step in enumerate(kills):
        deadline = time.monotonic() + LIMIT_S
        while not lines.exists() or f'"begin", "step": {step},' not in lines.read_text():
            if time.monotonic() > deadline:
                raise SystemExit(f"step {step} has not begun within {LIMIT_S:g} s")
            time.sleep(0.005)
        killed.append({"host": (number + 1) % 2, "at": time.monotonic()})
        kill_ranks(hosts[(number + 1) % 2])


def lost_hosts(kills: list[int], steps: int) -> dict[str, Any]:
    """One row: what the deaths of whole hosts cost."""
    from support.hosts import Hosts

    killed: list[Note] = []
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        killer = threading.Thread(target=kill_hosts, args=(hosts, Path(folder), kills, killed))
        killer.start()
        notes = trained(hosts, 2, Path(folder), steps, "buddy", 2 * len(kills))
        killer.join()
    ordinary, lost, detected = median(durations(notes)), [], []
    for kill in killed:
        survivors = [each for rank, each in notes.items() if rank // 2 != kill["host"]]
        kill["step"] = max(n["step"] for each in notes.values() for n in each if _begun(n) and n["at"] < kill["at"])
        lost.append(done_again(notes, kill) - kill["at"] - ordinary)
        learned = [min(n["at"] for n in each if n["what"] == "lost" and n["at"] > kill["at"]) for each in survivors]
        detected.append(max(learned) - kill["at"])
    return {
        "way": 'a host of 2 x 2 ranks is killed, keep="buddy"',
        "kills": len(killed),
        "step_s": ordinary,
        "lost_s": median(lost),
        "most_lost_s": max(lost),
        "detected_s": median(detected),
        "lost_but_detected_s": median(a - b for a, b in zip(lost, detected, strict=True)),
    }


def _begun(note: Note) -> bool:
    return bool(note["what"] == "begin")


def sent_a_step(keep: str, steps: int) -> list[float]:
    """Bytes out of each of 3 hosts a step, without the first two.

    At the end of a step the states of the steps before are whole at all buddies, and nothing has been read of its own.
    """
    from support.hosts import Hosts

    with Hosts(3) as hosts, tempfile.TemporaryDirectory() as folder:
        notes = trained(hosts, 1, Path(folder), steps, keep, 0)
    counted = [[note["sent"] for note in each if note["what"] == "end"] for each in notes.values()]
    return [(each[-1] - each[1]) / (len(each) - 2) for each in counted]


def buddy_bytes(steps: int) -> dict[str, Any]:
    """One row: bytes with a buddy beside bytes without."""
    without, with_buddy = (sent_a_step(keep, steps) for keep in ("host", "buddy"))
    extra = [more - less for more, less in zip(with_buddy, without, strict=True)]
    formula = 12 * sum(parameter.numel() for parameter in recovery_job.model_of().parameters()) / len(extra)
    return {
        "way": 'bytes out of each of 3 x 1 ranks, keep="buddy" beside keep="host"',
        "bytes without": mean(without),
        "bytes with": mean(with_buddy),
        "extra_bytes": mean(extra),
        "formula": formula,
        "extra / formula": mean(extra) / formula,
        "least": min(extra) / formula,
        "most": max(extra) / formula,
    }


def main() -> None:
    script = Script(
        __doc__,
        kills=(3, "of whole hosts"),
        between=(12, "steps between two kills"),
        steps=(14, "whose bytes are counted"),
    )
    given = script.given
    kills = [given.between * (i + 1) - 5 for i in range(given.kills)]
    rows = []
    for row in (lost_hosts(kills, kills[-1] + given.between - 3), buddy_bytes(given.steps)):
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    script.store("recovery_hosts", "The death of a whole host, and bytes of buddies, on hosts of one machine", rows)


if __name__ == "__main__":
    main()
