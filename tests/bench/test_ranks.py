from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from odc.bench.ranks import RankPool, held
from odc.ranks.processes import RanksFailed


def keep(value: int) -> int:
    before = getattr(held, "value", 0)
    held.value = value * (1 + dist.get_rank())
    return int(before)


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no good")


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def sleep_on_one() -> None:
    time.sleep(600 * dist.get_rank())


def raise_here() -> None:
    if dist.get_rank() == 0:
        raise ValueError("no good here")


def test_ranks_keep_what_a_function_leaves() -> None:
    with RankPool(2) as pool:
        assert pool.each(keep, 3) == [0, 0]
        assert pool.each(keep, 4) == [3, 6]
        assert pool.others(keep, 5) == [8]
    assert not vars(held) and not dist.is_initialized()


def run_on(pool: RankPool, function: Callable[[], None]) -> None:
    if function is sleep_on_one:
        pool._timeout_s = 3.0  # of this command, not of the group
    pool.each(function)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (raise_on_one, RanksFailed, r"(?s)rank 1 failed:.*ValueError: no good"),
        (die_on_one, RanksFailed, r"(?s)rank 1 failed:.*exit code 7"),
        (sleep_on_one, RanksFailed, r"rank 1 did not answer in 3 s"),
        (raise_here, ValueError, r"no good here"),
    ],
)
def test_what_fails_is_named_and_the_next_pool_works(function, error: type[Exception], message: str) -> None:
    pool = RankPool(2)
    with pytest.raises(error, match=message), pool:
        run_on(pool, function)
    with RankPool(2) as pool:
        assert pool.each(keep, 1) == [0, 0]


def test_functions_of_a_script_run_on_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from odc.bench.ranks import RankPool\n"
        "class Kept:\n    pass\n"
        "def rank(kept):\n    assert type(kept) is Kept\n    return dist.get_rank()\n"
        "if __name__ == '__main__':\n    with RankPool(2) as pool:\n        print(pool.each(rank, Kept()))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, check=False)
    assert (done.stdout, done.returncode) == ("[0, 1]\n", 0), done.stderr
