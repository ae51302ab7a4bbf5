"""docs/verl.md in an empty folder: its two commands, for three steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.verl import needs_verl

pytestmark = needs_verl
PAGE = Path(__file__).parents[3] / "docs" / "verl.md"
EXAMPLES = Path(__file__).parents[3] / "examples"


def run(*command: str, cwd: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    after = PAGE.read_text(encoding="utf-8").split("test_docs.py runs this")[1]
    commands = re.findall(r"```bash\n(.*?)```", after, re.DOTALL)[0].replace(" examples/", f" {EXAMPLES}/")
    short = (
        "set -e\n"
        + commands.strip()
        + " trainer.total_training_steps=3 trainer.save_freq=2 engine.use_torch_compile=false"
    )
    output = run("bash", "-c", short, cwd=tmp_path)
    assert re.findall(r"step:(\d) - ", output) == ["1", "2", "3"], output[-3000:]
    assert (tmp_path / "checkpoints" / "global_step_2").is_dir()
