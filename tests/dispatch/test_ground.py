"""Planning stands on the balancers and numpy: no torch, no process group, nothing optional."""

from __future__ import annotations

import subprocess
import sys


def test_planning_loads_neither_torch_nor_an_optional_library() -> None:
    program = (
        "import sys, odc.dispatch; from odc.dispatch.route import Route; "
        "from odc.dispatch import BalancePolicy, Nodes, Phase, Records, node_wise, plan_step, post_balance; "
        "move = post_balance([[5, 9], [3]], BalancePolicy()); Route.of(move, {'rows': [5, 9, 3]}, 0); "
        "node_wise(move, [5, 9, 3], 1); "
        "heavy = {'torch', 'numba', 'scipy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
