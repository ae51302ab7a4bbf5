"""Judges a run that is over: `python -m support.ordered FOLDER`, of EMULATED_RECORD. Exit code 1: conflicts."""

from __future__ import annotations

import sys
from pathlib import Path

from support.ordered import Judge, Logs, report


def judged(folder: Path) -> tuple[Judge, list[str]]:
    """The judge and the reports of a run whose record is in `folder`."""
    judge, logs = Judge(), Logs(folder)
    return judge, report(judge, logs, judge.judge(logs, all_of_it=True))


if __name__ == "__main__":
    judge, texts = judged(Path(sys.argv[1]))
    print(*texts, sep="\n")
    print(f"{judge.accesses} accesses by {len(judge.processes)} processes were judged: {len(texts)} conflicts")
    sys.exit(bool(texts))
