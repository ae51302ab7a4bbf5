"""`odc doctor`: whether odc can run here, on what, and what to install for more."""

from __future__ import annotations

import textwrap
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
            help="Print the memory that a GPU holds for this model instead: a Hugging Face config (JSON), or "
            "qwen2.5-7b and the like, with the untied heads of DeepSeek-R1-Distill-Qwen; with commas, several.",
            show_default="none",
        ),
    ] = None,
    ranks: Annotated[int | None, Option(help="With --model: ranks, all in one mesh.", show_default="8")] = None,
    hosts: Annotated[int | None, Option(help="With --model: hosts that they run on.", show_default="1")] = None,
    reach: Annotated[
        bool, Option("--reach", help="Started on every host by the job's launcher: do all hosts reach each other?")
    ] = False,
) -> None:
    """Look at driver, torch, Triton, NVSHMEM, shared memory, network and extras; say what is missing.

    Exit code 0: odc can run here (and everything of --need works); 1: it cannot, and the report says why.
    With --model: a table of memory, computed from the layout of the heap; nothing is allocated or looked at.
    With --reach: host 0 prints all hosts, the ways between them, and which of them could be one; exit code 1 there if a
    way does not work.
    """
    if (reach or model is not None) and (as_json or need is not None):
        raise ConfigError("--reach and --model print tables of their own: leave out --need and --json")
    if reach and model is not None:
        raise ConfigError("--reach and --model print different tables: give one of them")
    if model is None and (ranks is not None or hosts is not None):
        raise ConfigError("--ranks and --hosts go with --model")
    if reach:
        _print_reach()
        return
    if model is not None:
        names = [name.strip() for name in model.split(",")]
        _print_ledger(names, 8 if ranks is None else ranks, 1 if hosts is None else hosts)
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
        _print(findings, missing, uses)
    if missing:
        raise Exit(1)


def _print(findings: Any, missing: Any, uses: list[str]) -> None:
    """One screen: what stands in the way, with advice, then every finding, each on a line, by what it is for."""
    from rich.console import Console
    from rich.text import Text

    from odc.doctor import GROUPS

    wanted = "" if uses == ["run"] else f", with {', '.join(uses[1:])}"
    print(f"odc {'cannot run here' if missing else 'can run here'}{wanted}", flush=True)
    for finding in missing:
        print(f"  {finding.what}: {finding.found}\n    -> {finding.do}", flush=True)
    console = Console(highlight=False)
    for title, kinds in GROUPS.items():
        needs = ", ".join(kind for kind in kinds if kind != "run")
        console.print(Text.assemble((title, "bold"), f" (--need {needs})"), **_CUT)
        for finding in findings:
            if finding.use in kinds and not finding.what.startswith("extra "):
                mark = _mark(finding.state, finding in missing)
                console.print(Text.assemble(mark, f" {finding.what:14} {finding.found}"), **_CUT)
    others = {kind for kinds in GROUPS.values() for kind in kinds}
    extras = [one for one in findings if one.what.startswith("extra ") or one.use not in others]
    _print_extras(console, extras)
    console.print("What to do about a line: odc doctor --need NAME; everything: odc doctor --json")


_CUT: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}


def _mark(state: str, needed: bool = False) -> Any:
    from rich.text import Text

    return Text(f"  {state:7}", "green" if state == "ok" else "red" if needed else "yellow")


def _print_extras(console: Any, findings: list[Any]) -> None:
    """The names of extras by state, what is broken and plugins on lines of their own, and once how to install one."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from odc.errors import install

    # An extra is its packages; what a plugin says where it works is worth a line.
    whole = [
        one for one in findings if one.state == "broken" or (one.state == "ok" and not one.what.startswith("extra "))
    ]
    console.print(Text.assemble(("Integrations and other extras", "bold"), " (--need NAME)"))

    def wrapped(state: str, text: str) -> None:
        """A mark, and text under it in as many lines as it takes."""
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_row(_mark(state), Text(text))
        console.print(table)

    for state in ("ok", "absent"):
        names = [one.what.removeprefix("extra ") for one in findings if one.state == state and one not in whole]
        if names:
            whole_names = ", ".join(name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)  # no name over two lines
            wrapped(state, textwrap.fill(whole_names, console.width - 10, break_on_hyphens=False))
    if any(one.state == "absent" for one in findings):
        console.print(Padding(install("NAME"), (0, 0, 0, 10)))
    for one in whole:
        wrapped(one.state, f"{one.what}: {one.found}")


def _label(model: str) -> str:
    """How the table calls a model: a file by its name, or its folder's, as all of Hugging Face's have one name."""
    path = Path(model)
    if path.suffix != ".json":
        return model
    return path.parent.name if path.stem == "config" else path.stem


def _print_ledger(models: list[str], ranks: int, hosts: int) -> None:
    from rich.console import Console

    from odc.doctor.ledger import ledger_table
    from odc.simulate.catalog import config_named

    labels = [_label(name) for name in models]
    names = labels if len({*labels}) == len(models) else models
    configs = {name: config_named(model) for name, model in zip(names, models, strict=True)}
    Console().print(ledger_table(configs, ranks, hosts))


def _print_reach() -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from odc.doctor.reach import look, parted
    from odc.settings import Settings

    seen = look(Settings(timeout_s=120.0))
    if seen is None:
        return
    hosts, ways = seen
    places = Table("host", "rank", "name", "address", "interface", "MTU")
    for one in hosts:
        places.add_row(
            str(one.number), str(one.rank), one.name, one.address, one.interface or "not known", str(one.mtu or "")
        )
    table = Table("from", "to", "round trip, ms", "MB/s", "")
    for way in sorted(ways, key=lambda way: not way.wrong):  # what does not work comes first
        figures = (f"{way.milliseconds:.2f}", f"{way.rate:.0f}") if not way.wrong else ("", "")
        table.add_row(
            str(way.source), str(way.target), *figures, f"[red]{escape(way.wrong)}[/red]" if way.wrong else "ok"
        )
    console = Console()
    console.print(places, table)
    for line in parted(hosts):
        console.print(escape(line), highlight=False)
    if any(way.wrong for way in ways):
        raise Exit(1)
