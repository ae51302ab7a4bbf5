"""A study as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from odc.errors import OdcError
from odc.simulate.study import Study

if TYPE_CHECKING:
    from rich.table import Table


def study_table(study: Study) -> Table:
    """A rich Table: one row an arm; `counts` are microbatches a rank. Raises OdcError when rich is not installed."""
    try:
        from rich.table import Table
    except ImportError as error:
        raise OdcError("printing a table needs rich: pip install 'odc-fsdp[cli]'") from error
    scenario = study.scenario
    table = Table(
        title=f"simulated: {scenario.model} on {scenario.ranks} x {scenario.machine},\n"
        f"{scenario.samples_per_rank} samples a rank, lengths like {scenario.lengths}",
        caption=f"means of {scenario.minibatches} minibatches, speed-ups over {study.arms[0].arm}; no plan has a\n"
        f"longest rank below {study.bound_s:.3g} s; bubble = waiting for ranks + for transfers",
    )
    table.add_column("arm", no_wrap=True)
    for head in ("step, s", "speed-up", "bubble", "waiting", "transfer", "counts"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in study.arms:
        shares = (f"{share:.1%}" for share in (row.bubble, row.waiting, row.transfer))
        table.add_row(row.arm, f"{row.step_s:.3g}", f"{row.speedup:.3f}", *shares, f"{row.microbatches:.1f}")
    return table
