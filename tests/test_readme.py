"""The README's program runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_program_of_the_readme_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "loop.py"
    # A file a rank: what two ranks print may interleave.
    ending = f'open(f"{tmp_path}/rank-{{rank}}", "w").write(f"{{step}} {{loss.isfinite().item()}}")\n'
    script.write_text(program + ending, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(README.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["2 True", "2 True"]


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z]+(?:-[a-z]+)*)", readme, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_figures_of_the_readme_are_the_stored_ones() -> None:
    sys.path.insert(0, str(README.parent))  # `bench` is a folder of modules, not an installed package
    try:
        from bench.readme import section
    finally:
        sys.path.remove(str(README.parent))
    assert section() in README.read_text(encoding="utf-8"), "run `python -m bench.readme`"
