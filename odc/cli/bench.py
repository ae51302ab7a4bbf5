"""`odc bench`: what the runtime's parts cost on this machine, each beside its baselines; or two saved runs compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from odc.bench.parts import PARTS, QUICK, THOROUGH
from odc.cli.files import require_writable, writing
from odc.errors import ConfigError
from odc.provenance import json_text

_HERE = [name for name, part in PARTS.items() if part.on != "cuda"]
_CUDA_ONLY = [name for name in PARTS if name not in _HERE]
_QUICK_SIZES = "64K,1M,16M"
_SIZES = f"{_QUICK_SIZES},64M,256M"
_FIGURES = Path("runs/bench/suite.json")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bench(
    only: Annotated[
        str | None,
        Option(help=f"With commas, of {', '.join(_HERE)}; on CUDA also {', '.join(_CUDA_ONLY)}.", show_default="all"),
    ] = None,
    ranks: Annotated[str | None, Option(help="Numbers of ranks, with commas.", show_default="what fits")] = None,
    sizes: Annotated[
        str | None, Option(help="Bytes, with commas.", show_default=f"{_SIZES}; quick: {_QUICK_SIZES}")
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda.", show_default="cuda where there is one")] = None,
    quick: Annotated[bool, Option("--quick", help="Few rounds, small sizes: does it run, not how fast.")] = False,
    json: Annotated[Path | None, Option(help="Where figures are written.", show_default=str(_FIGURES))] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        Option(metavar="A.json B.json", help="Measure nothing: compare two saved runs.", show_default="none"),
    ] = None,
) -> None:  # fmt: skip
    """Measure get, put, accumulate, publish, signal, unit gather, push, begin and finish, and planners.

    Prints one table, with what each is measured against in the same run, and
    writes it as JSON with machine and versions. Exit code 1: something could
    not be measured, and the last lines say why.
    """
    if compare is None:  # before torch is loaded
        print(f"odc bench: takes {'a minute' if quick else 'minutes'} on a quiet machine", file=sys.stderr, flush=True)
    elif quick or any((only, ranks, sizes, device, json)):
        raise ConfigError("--compare measures nothing: leave out the other options")
    from odc.bench import suite, tables

    if compare is not None:
        print(tables.compare(*(tables.load(path) for path in compare)))
        return
    on, json = _device(device), json or _FIGURES
    parts = suite.parts_of(on, [name.strip() for name in only.split(",")] if only else None)
    worlds = _worlds(ranks) if ranks else suite.fitting_ranks(on)
    wanted = [_bytes(word) for word in (sizes or (_QUICK_SIZES if quick else _SIZES)).split(",")]
    with writing("json", json):
        json.parent.mkdir(parents=True, exist_ok=True)
    require_writable("json", json)
    result = suite.run(parts, worlds, wanted, on, QUICK if quick else THOROUGH, tables.to_stderr)
    if on == "cuda" and not only:
        result["left_out"] += filter(None, (suite.unfit(name, on) for name in PARTS))
    try:
        with writing("json", json):
            json.write_text(json_text(result), encoding="utf-8")
    finally:  # what was measured is shown though a disk is full
        print(tables.show(result))
    print(f"\nfigures  {json}")
    if result["failed"]:
        raise SystemExit(1)


def _device(name: str | None) -> str:
    import torch

    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device: cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: there is no CUDA device here (`odc doctor` says why)")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _worlds(text: str) -> list[int]:
    try:
        worlds = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"ranks: whole numbers with commas between them, not {text!r}") from None
    if min(worlds) < 1:
        raise ConfigError(f"ranks: at least 1, not {min(worlds)}")
    return worlds


def _bytes(word: str) -> int:
    """64K, 16M, 1G or plain bytes; a multiple of 4096, at least that."""
    number, unit = (word.strip()[:-1], word.strip()[-1].upper()) if word.strip()[-1:].isalpha() else (word, "")
    try:
        size = int(number) * (_UNITS[unit] if unit else 1)
    except (ValueError, KeyError):
        raise ConfigError(f"sizes: bytes such as 65536, 64K or 16M, not {word!r}") from None
    if size < 4096 or size % 4096:
        raise ConfigError(f"sizes: multiples of 4096 bytes, not {word.strip()}")
    return size
