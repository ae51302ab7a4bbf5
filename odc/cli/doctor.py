"""`odc doctor`: whether odc can run here, on what, and what to install for more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option

from odc.errors import ConfigError


def doctor(
    need: Annotated[
        str | None,
        Option(
            help="What must work, with commas: cuda, nvshmem, network, kernels, train, verl, ...",
            show_default="run alone",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    model: Annotated[
        str | None,
        Option(
            help="Print the memory that a GPU holds for this model instead: a Hugging Face config (JSON) or qwen2.5-7b "
            "and the like; with commas, several.",
            show_default="none",
        ),
    ] = None,
    ranks: Annotated[int, Option(help="With --model: ranks, all in one mesh.")] = 8,
    hosts: Annotated[int, Option(help="With --model: hosts that they run on.")] = 1,
) -> None:
    """Look at driver, torch, Triton, NVSHMEM, shared memory, network and extras; say what is missing.

    Exit code 0: odc can run here (and everything of --need works); 1: it cannot, and the report says why.
    With --model: a table of memory, computed from the layout of the heap; nothing is allocated or looked at.
    """
    if model is not None:
        _print_ledger([name.strip() for name in model.split(",")], ranks, hosts)
        return
    from odc import doctor as doctors

    known = doctors.known_uses()
    uses = ["run", *(name.strip() for name in (need or "").split(",") if name.strip())]
    unknown = [use for use in uses if use not in known]
    if unknown:
        raise ConfigError(f"need: {unknown[0]} is none of {', '.join(sorted(known))}")
    findings = doctors.examine(doctors.all_checks())
    missing = doctors.lacking(findings, uses)
    if as_json:
        print(doctors.to_json(findings))
    else:
        _print(findings, missing, uses, doctors.State.OK)
    if missing:
        raise Exit(1)


def _print(findings: Any, missing: Any, uses: list[str], well: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    wanted = "" if uses == ["run"] else f", with {', '.join(uses[1:])}"
    print(f"odc {'cannot run here' if missing else 'can run here'}{wanted}", flush=True)
    for finding in missing:
        print(f"  {finding.what}: {finding.found}\n    -> {finding.do}", flush=True)
    made = Table("", "state", "found")
    for finding in findings:
        bad = finding.state != well
        style = ("red" if finding in missing else "yellow") if bad else "green"
        text = escape(finding.found) + (f"\n[bold]->[/bold] {escape(finding.do)}" if bad else "")
        made.add_row(finding.what, f"[{style}]{finding.state}[/{style}]", text)
    Console().print(made)


def _print_ledger(models: list[str], ranks: int, hosts: int) -> None:
    from rich.console import Console

    from odc.doctor.ledger import ledger_table
    from odc.simulate.catalog import config_named

    configs = {Path(name).stem if name.endswith(".json") else name: config_named(name) for name in models}
    Console().print(ledger_table(configs, ranks, hosts))
