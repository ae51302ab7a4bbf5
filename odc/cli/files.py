"""Files that a command writes: one error, which names the option, wherever one cannot be written."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from odc.errors import ConfigError


@contextlib.contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Around writing `path`, which the option `name` gave: an OSError becomes a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name}: cannot write {path}: {error.strerror or error}") from error


def require_writable(name: str, path: Path) -> None:
    """Before long work: `path` can be written, or where there is none yet, a file in its folder; or ConfigError."""
    if str(path) == "-":
        raise ConfigError(f"{name}: name a file, or /dev/stdout, not -")
    with writing(name, path):
        if path.is_dir() or path.is_file():
            path.open("ab").close()
        elif not path.exists():  # a pipe, or a device, is no place to try
            tempfile.TemporaryFile(dir=path.parent).close()
