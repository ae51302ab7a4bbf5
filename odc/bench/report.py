"""What a benchmark reports: a table, and the same as JSON and markdown with machine, versions and command."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from odc.provenance import Measurement, memory_bytes, processor, versions_of


def machine() -> dict[str, Any]:
    """Processor, cores and memory; nothing that names the host."""
    cores, kernel = len(os.sched_getaffinity(0)), platform.release().split("-")[0]
    memory_gib = round(memory_bytes() / 2**30, 1)
    found: dict[str, Any] = {"cpu": processor(), "cores": cores, "memory_gib": memory_gib, "kernel": kernel}
    if torch.cuda.is_available():
        device, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        found |= {"gpu": device.name, "gpus": count, "gpu_memory_gib": round(device.total_memory / 2**30, 1)}
    return found


def versions() -> dict[str, str]:
    """Versions that a figure depends on; what is not installed is left out."""
    packages = ("odc-fsdp", "numpy", "numba", "triton", "nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "odc-fsdp": "source"}
    found |= versions_of(packages)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as driver:
        found["driver"] = next((word for word in driver.readline().split() if word[:1].isdigit()), "unknown")
    return found


def command() -> str:
    """How this process was started, without paths of this machine."""
    if "pytest" in sys.argv[0]:
        head = "python -m pytest"
    elif Path(sys.argv[0]).name == "odc":
        head = "odc"
    else:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        head = f"python -m {spec.name}" if spec else f"python {os.path.relpath(sys.argv[0])}"
    return "OMP_NUM_THREADS=1 " + shlex.join([*head.split(), *sys.argv[1:]])


def facts(begun: Measurement) -> dict[str, Any]:
    """How a stored result was made; the measurement `begun` ends now."""
    return {"command": command(), **begun.facts(), "machine": machine(), "versions": versions()}


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, min and max."""
    return {"median": median(samples), "min": min(samples), "max": max(samples)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys as a markdown table; floats with three significant digits."""
    if not rows:
        return "(no rows)"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def store(
    folder: Path,
    name: str,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    begun: Measurement,
    show: bool = True,
    **more: Any,
) -> None:
    """Writes `<folder>/<name>.json` and `.md`; `begun` was taken before the first row. `show` prints the table."""
    result = {"title": title, **facts(begun), **more, "rows": list(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    where = ", ".join(f"{key} {value}" for key, value in {**result["machine"], **result["versions"]}.items())
    load, commit = result["load_1min"], result["commit"] or "unknown"
    when = f"{result['date']}, commit {commit}, load {load['begin']} at the beginning and {load['end']} at the end"
    notes = "".join(f"\n{key}: {value}\n" for key, value in more.items() if isinstance(value, str))
    text = f"# {title}\n\n`{result['command']}`\n\n{where}\n\n{when}\n{notes}\n{table(rows)}\n"
    (folder / f"{name}.md").write_text(text)
    if show:
        print(f"\n{title}\n{table(rows)}\nstored in {folder / name}.json and .md", flush=True)
