"""A study as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from odc.errors import OdcError
from odc.simulate.study import Study

if TYPE_CHECKING:
    from rich.table import Table


def study_table(study: Study) -> Table:
    """A rich Table: one row an arm. Raises OdcError when rich is not installed."""
    try:
        from rich.table import Table
    except ImportError as error:
        raise OdcError("printing a table needs rich: pip install 'odc-fsdp[cli]'") from error
    scenario = study.scenario
    table = Table(
        title=f"simulated: {scenario.model} on {scenario.ranks} x {scenario.machine}, lengths like {scenario.lengths}, "
        f"{scenario.samples_per_rank} samples a rank",
        caption=f"means of {scenario.minibatches} minibatches; no plan has a longest rank below {study.bound_s:.3g} s\n"
        "bubble = waiting for ranks + standing still for transfers",
    )
    table.add_column("arm")
    for head in ("step, s", f"speed-up over {study.arms[0].arm}", "bubble", "waiting", "transfer", "microbatches"):
        table.add_column(head, justify="right")
    for row in study.arms:
        shares = (f"{share:.1%}" for share in (row.bubble, row.waiting, row.transfer))
        table.add_row(row.arm, f"{row.step_s:.3g}", f"{row.speedup:.3f}", *shares, f"{row.microbatches:.1f}")
    return table
