"""Raw training data, read into memory in one sorted order that is the same on every machine.

A row holds a text, a conversation, or a prompt and the completion that is trained on. Files must be UTF-8. Empty texts
are skipped and counted in a log message.
"""

from __future__ import annotations

import json
import logging
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from odc.errors import DataError, install
from odc.saved_dataset import read_saved_dataset

_log = logging.getLogger(__name__)

Unreadable = Literal["error", "skip"]

_UNREADABLE_JSON = (ValueError, RecursionError)  # also integers of too many digits; too many brackets in each other
_JSON, _JSONL = ".json", (".jsonl", ".ndjson", ".jsonlines")
_PARQUET = ".parquet"
_TABLES = (".csv", ".tsv")
_ROWS = re.compile(rb"\s*(\[\s*\{|\{[^\n]*\}\s*\n\s*\{)")  # how a list of objects begins, and objects line by line
_AT_ONCE = 1024  # rows of a Parquet file
_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")
_UNREAD = ("thinking", "reasoning_content", "tool_calls", "function_call")  # of a message; templates write them

Message = dict[str, str]
COLUMNS = "'messages', 'prompt' and 'completion', or 'text'"
_READ = ("messages", "prompt", "completion", "text", "tools")


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt, which is context, and its completion, the targets of the loss: two texts, or messages in both."""

    prompt: str | tuple[Message, ...]
    completion: str | tuple[Message, ...]


Content = str | tuple[Message, ...] | PromptCompletion


@dataclass(frozen=True)
class RawDocument:
    """One row or file, before tokenization. `name` is a relative path, `file.jsonl:line` or `folder[row]`."""

    name: str
    content: Content


@dataclass(frozen=True)
class TextFolder:
    """A folder of text files, read recursively: files with one of `extensions`, without folders named in `exclude`."""

    path: Path
    extensions: tuple[str, ...] = (".txt", ".md", ".py")
    exclude: tuple[str, ...] = ()


Source = Path | TextFolder


def stdlib_source() -> TextFolder:
    """The running Python's own standard library, without installed packages and folders called `test`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return TextFolder(root, extensions=(".py",), exclude=("site-packages", "dist-packages", "test"))


def source_named(name: str) -> Source:
    """The source a user names: `stdlib`, or a path to data of any kind that `read_source` reads."""
    return stdlib_source() if name == "stdlib" else Path(name)


def read_source(source: Source, *, unreadable: Unreadable = "error") -> list[RawDocument]:
    """All documents of `source` with something in them, in an order that does not depend on the machine.

    A path is a folder of text files, a JSON, JSONL or Parquet file, a folder of Parquet files, one text file, or a
    folder written by `datasets.save_to_disk` (of several splits, `train`). `content_of` describes rows. Raises
    DataError when there is nothing to read, for a table or a folder of texts that holds rows too, for a malformed line
    or row or (unless `unreadable` is "skip") an unreadable file, naming it, and without the package that reads it.
    """
    folder = source if isinstance(source, TextFolder) else None
    path = folder.path if folder else source
    assert isinstance(path, Path)
    if not path.exists():
        raise DataError(f"there is no file or folder {path}")
    found: Iterator[RawDocument]
    if parquet := parquet_files(path):
        found = (document for file in parquet for document in _parquet(file))
    elif path.is_file():
        found = _file(path, unreadable)
    elif folder is None and is_datasets_folder(path):
        found = _datasets(path)
    else:
        if folder is None:
            folder = TextFolder(path)
            _refuse_rows(folder)
        found = _files(_listed(folder), folder.path, unreadable)
    documents = list(found)
    filled = [document for document in documents if document.content]
    if len(filled) < len(documents):
        _log.info("%s: skipped %d empty documents", path, len(documents) - len(filled))
    if not filled:
        searched = f": no non-empty file ends in {', '.join(folder.extensions)}" if folder else ""
        raise DataError(f"{path} holds no documents{searched}")
    return filled


def parquet_files(path: Path) -> list[Path]:
    """`path` if it is a Parquet file, or the Parquet files of that folder, sorted; empty for any other path."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in files if file.suffix.lower() == _PARQUET and file.is_file()]


def is_datasets_folder(path: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this folder."""
    return any((path / name).is_file() for name in _DATASETS)


def _refuse_rows(folder: TextFolder) -> None:
    """Raises DataError for the folder of a data set, whose texts are no more than its README."""
    for path in _listed(replace(folder, extensions=(*_JSONL, _JSON, _PARQUET))):
        if path.suffix.lower() != _JSON or _begins_with_rows(path):
            also = ", or a folder of Parquet files" if path.suffix.lower() == _PARQUET else ""
            raise DataError(
                f"{folder.path} would be read as a folder of texts, but {path} holds rows: name that file{also}"
            )


def _begins_with_rows(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return _ROWS.match(file.read(1 << 20)) is not None
    return False


def _listed(folder: TextFolder) -> list[Path]:
    """The folder's files sorted by their path in POSIX form; hidden files and folders are left out."""
    files = []
    for path in folder.path.rglob("*"):
        parts = path.relative_to(folder.path).parts
        if path.suffix.lower() not in folder.extensions or any(part.startswith(".") for part in parts):
            continue
        if not any(part in folder.exclude for part in parts[:-1]) and path.is_file():
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(folder.path).as_posix())


def _file(path: Path, unreadable: Unreadable) -> Iterator[RawDocument]:
    """The rows of a file of JSON, or the text of any other but a table."""
    suffix = path.suffix.lower()
    if suffix in _TABLES:
        raise DataError(f"{path} is a table, which is not read: write its rows as JSON Lines (.jsonl) or as Parquet")
    if suffix == _JSON:
        return _json(path, _utf8(path))
    return _lines(path, _utf8(path)) if suffix in _JSONL else _files([path], path.parent, unreadable)


def _files(paths: Sequence[Path], root: Path, unreadable: Unreadable) -> Iterator[RawDocument]:
    skipped = []
    for path in paths:
        try:
            yield RawDocument(path.relative_to(root).as_posix(), path.read_bytes().decode("utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            if unreadable == "error":
                why = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
                raise DataError(f"{path} {why}") from error
            skipped.append(path)
    if skipped:
        _log.warning("skipped %d files that cannot be read as UTF-8, the first is %s", len(skipped), skipped[0])


def _utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8") from error


def _json(path: Path, text: str) -> Iterator[RawDocument]:
    """The rows of a list; of anything else, one of each line."""
    if not text.lstrip().startswith("["):
        return _lines(path, text)
    try:
        return _rows(path, json.loads(text))
    except _UNREADABLE_JSON as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error


def _lines(path: Path, text: str) -> Iterator[RawDocument]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        name = f"{path.name}:{number}"
        try:
            row = json.loads(line)
        except _UNREADABLE_JSON as error:
            why = getattr(error, "msg", error)
            raise DataError(f"{path}, line {number} cannot be read as JSON: {why}") from error
        yield RawDocument(name, content_of(row, f"{path}, line {number}"))


def _parquet(path: Path) -> Iterator[RawDocument]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow: {install('parquet')}") from error
    try:
        file = ParquetFile(path)
        batches = file.iter_batches(batch_size=_AT_ONCE, columns=_columns(path, file.schema_arrow.names))
        yield from _rows(path, (row for batch in batches for row in batch.to_pylist()))
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _datasets(path: Path) -> Iterator[RawDocument]:
    dataset = read_saved_dataset(path)
    return _rows(path, dataset.select_columns(_columns(path, dataset.column_names)))


def _columns(path: Path, names: Sequence[str]) -> list[str]:
    """Those that are read: decoding others, such as images, takes time and memory on every rank."""
    found = [name for name in _READ if name in names]
    if not found:
        raise DataError(f"{path} has neither {COLUMNS}")
    return found


def _rows(path: Path, rows: Iterable[Any]) -> Iterator[RawDocument]:
    for number, row in enumerate(rows):
        yield RawDocument(f"{path.name}[{number}]", content_of(row, f"{path}, row {number}"))


def content_of(row: Any, where: str) -> Content:
    """The row's messages if it has any, else its prompt and completion, else its text; other columns are not read.

    Raises DataError, which begins with `where`, for a conversation with tools as well.
    """
    content = _content(row, where)
    spoken = content.prompt if isinstance(content, PromptCompletion) else content
    if isinstance(spoken, tuple) and row.get("tools") not in (None, [], "", "[]"):
        raise DataError(
            f"{where} has 'tools', which the chat template would not be given: write them into a system message as it "
            "does, or take them out"
        )
    return content


def _content(row: Any, where: str) -> Content:
    if isinstance(row, dict):
        if row.get("messages") is not None:
            return _messages(row["messages"], where, "messages")
        if row.get("prompt") is not None and row.get("completion") is not None:
            return _pair(row["prompt"], row["completion"], where)
        if row.get("text") is not None:
            return _string(row["text"], where, "text")
    raise DataError(f"{where} has neither {COLUMNS}")


def texts_of(content: Content) -> Iterator[str]:
    """Every text in it, in order."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, PromptCompletion):
        yield from texts_of(content.prompt)
        yield from texts_of(content.completion)
    else:
        yield from (message["content"] for message in content)


def _pair(prompt: Any, completion: Any, where: str) -> PromptCompletion:
    if isinstance(prompt, str) and isinstance(completion, str):
        return PromptCompletion(_string(prompt, where, "prompt"), _string(completion, where, "completion"))
    if isinstance(prompt, list) and isinstance(completion, list):
        return PromptCompletion(_messages(prompt, where, "prompt"), _messages(completion, where, "completion"))
    kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise DataError(f"{where}: 'prompt' and 'completion' must both be strings, or both lists of messages, not {kinds}")


def _string(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} must be a string, not {type(value).__name__}")
    return _encodable(value, where, repr(column))


def _encodable(text: str, where: str, what: str) -> str:
    """JSON can escape half of a surrogate pair, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise DataError(f"{where}: {what} has half of a surrogate pair, {lone}, which UTF-8 cannot hold") from error
    return text


def _messages(values: Any, where: str, column: str) -> tuple[Message, ...]:
    if not isinstance(values, list):
        raise DataError(f"{where}: {column!r} must be a list, not {type(values).__name__}")
    messages = []
    for index, message in enumerate(values):
        pair = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not all(isinstance(value, str) for value in pair):
            raise DataError(f"{where}: message {index} needs a 'role' and a 'content', both strings")
        if unread := [key for key in _UNREAD if message.get(key)]:
            raise DataError(
                f"{where}: message {index} has {unread[0]!r}, which would not be trained: write it into 'content' as "
                "the model's chat template does, or take it out"
            )
        role, content = (_encodable(str(value), where, f"message {index}") for value in pair)
        messages.append({"role": role, "content": content})
    return tuple(messages)
