"""Reading raw data: what is read, in which order, and the errors for what cannot be read."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from odc.errors import DataError
from odc.experiments.data.sources import (
    PromptCompletion,
    RawDocument,
    TextFolder,
    read_source,
    source_named,
    stdlib_source,
)

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def names(documents: list[RawDocument]) -> list[str]:
    return [document.name for document in documents]


def test_folder_is_recursive_sorted_and_filtered(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    texts = {"z.txt": "z\r\ny\n", "b/a.MD": "é", "b/c.bin": "no", ".git/x.py": "no", "a.py": "a", "empty.txt": ""}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    with caplog.at_level(logging.INFO):
        documents = read_source(tmp_path)
    assert "skipped 1 empty" in caplog.text
    assert names(documents) == ["a.py", "b/a.MD", "z.txt"]
    assert [document.content for document in documents] == ["a", "é", "z\r\ny\n"], "line ends are kept"
    assert read_source(tmp_path / "a.py") == [RawDocument("a.py", "a")]
    assert names(read_source(TextFolder(tmp_path, (".bin", ".py"), exclude=("b",)))) == ["a.py"]


def test_file_that_is_not_utf8(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("a")
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xff"}')
    for path, name in ((texts, "txt"), (tmp_path / "latin.jsonl", "jsonl")):
        with pytest.raises(DataError, match=rf"latin\.{name} is not UTF-8"):
            read_source(path)
    assert names(read_source(texts, unreadable="skip")) == ["a.txt"]
    assert "skipped 1 files" in caplog.text


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str):
    text = {"a.txt": "one", "a.jsonl": '{"text": "one"}', "a.json": '[{"text": "one"}]'}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [document.content for document in read_source(tmp_path / name)] == ["one"]


def test_nothing_there(tmp_path: Path):
    with pytest.raises(DataError, match="no file or folder"):
        read_source(tmp_path / "missing")
    with pytest.raises(DataError, match=r"no non-empty file ends in \.txt, \.md, \.py"):
        read_source(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no documents"):
        read_source(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.jsonl", "{}"),
        ("data/train-00000-of-00001.parquet", "version https://git-lfs"),
        ("train.json", '[\n  {"instruction": "q"}\n]'),
        ("train.json", '{"text": "a"}\n{"text": "b"}\n'),
    ],
)
def test_a_data_set_with_its_readme_is_no_folder_of_texts(tmp_path: Path, name: str, text: str):
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("about the data")
    for harmless in ("package.json", "empty.json", ".hidden.jsonl"):
        (tmp_path / harmless).write_text('{"a": {\n"b": [1]}}\n' if harmless == "package.json" else "")
    assert names(read_source(tmp_path)) == ["README.md"]
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"folder of texts, but {tmp_path / name} holds rows: name that file"):
        read_source(tmp_path)
    assert names(read_source(TextFolder(tmp_path))) == ["README.md"]


def test_a_file_of_json_holds_rows(tmp_path: Path):
    path = tmp_path / "data.json"
    expected = ["one", tuple(CHAT)]
    rows = [json.dumps({"text": "one"}), json.dumps({"messages": CHAT})]
    for text in (f"\n[{rows[0]},\n  {rows[1]}]", "\n".join(rows)):
        path.write_text(text)
        assert [document.content for document in read_source(path)] == expected
    for text, message in (
        ('[{"instruction": "q", "output": "a"}]', "row 0 has neither"),
        ('{"data": [{"text": "a"}]}', "line 1 has neither"),
        ("[{", r"data\.json cannot be read as JSON"),
        (f'[{{"text": "a", "n": {"9" * 5000}}}]', r"data\.json cannot be read as JSON: Exceeds the limit"),
        ("[]", "holds no documents"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_source(path)


def test_a_table_is_no_text(tmp_path: Path):
    for name in ("a.csv", "a.TSV", "a.rst", "LICENSE"):
        (tmp_path / name).write_text("text,label\na,1\n")
    for name in ("a.csv", "a.TSV"):
        with pytest.raises(DataError, match=rf"{name} is a table, .* JSON Lines"):
            read_source(tmp_path / name)
    assert names(read_source(tmp_path / "a.rst") + read_source(tmp_path / "LICENSE")) == ["a.rst", "LICENSE"]


def test_jsonl_of_text_and_messages(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    # U+2028 is not an end of line in JSONL.
    path.write_text(
        '{"text": "one\u2028two"}\n\n' + json.dumps({"messages": CHAT, "text": "not this"}) + "\n", encoding="utf-8"
    )
    assert read_source(path) == [
        RawDocument("data.jsonl:1", "one\u2028two"),
        RawDocument("data.jsonl:3", tuple(CHAT)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 cannot be read as JSON: Expecting"),
        pytest.param(f"[{'9' * 5000}]", "line 2 cannot be read as JSON: Exceeds the limit", id="digits"),
        pytest.param("[" * 100_000, "line 2 cannot be read as JSON: maximum recursion", id="brackets"),
        ("[1]", "line 2 has neither 'messages', 'prompt' and 'completion', or 'text'"),
        ('{"prompt": "x"}', "line 2 has neither"),
        ('{"prompt": "x", "completion": []}', "must both be strings, or both lists of messages, not str and list"),
        ('{"prompt": [], "completion": [3]}', "message 0 needs a 'role' and a 'content'"),
        ('{"text": 3}', "'text' must be a string, not int"),
        ('{"messages": "hi"}', "'messages' must be a list, not str"),
        ('{"messages": [{"role": "user"}]}', "message 0 needs a 'role' and a 'content'"),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]}',
            "message 0 has 'tool_calls', which would not be trained",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "both strings"),
        (r'{"text": "broken \ud83d here"}', r"line 2: 'text' has half of a surrogate pair, U\+D83D at character 7"),
        (r'{"prompt": "\udc00", "completion": "a"}', r"line 2: 'prompt' has half .* U\+DC00 at character 0"),
        (r'{"prompt": "a", "completion": "\udc00"}', "line 2: 'completion' has half"),
        (r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "line 2: message 0 has half"),
        (r'{"prompt": [], "completion": [{"role": "\ud83d", "content": ""}]}', "line 2: message 0 has half"),
    ],
)
def test_bad_jsonl_lines_are_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_source(path)


def test_tools_are_refused_beside_conversations_alone(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    chats = ({"messages": CHAT}, {"prompt": CHAT, "completion": CHAT[1:]})
    fine = [*(chat | {"tools": none} for chat in chats for none in (None, [], "", "[]")), {"text": "a", "tools": [1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in fine))
    assert len(read_source(path)) == len(fine)
    for chat in chats:
        path.write_text(json.dumps(chat | {"tools": [{"name": "f"}]}))
        with pytest.raises(DataError, match="line 1 has 'tools', which the chat template would not be given"):
            read_source(path)


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text(r'{"text": "\ud83d\ude00"}')
    assert read_source(tmp_path / "data.jsonl") == [RawDocument("data.jsonl:1", "\N{GRINNING FACE}")]


def test_prompts_and_completions(tmp_path: Path):
    rows = [{"prompt": "q", "completion": "a", "text": "not this"}, {"prompt": CHAT, "completion": CHAT[1:]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [document.content for document in read_source(tmp_path / "data.jsonl")] == [
        PromptCompletion("q", "a"),
        PromptCompletion(tuple(CHAT), tuple(CHAT[1:])),
    ]


@pytest.mark.parametrize(
    ("file", "package", "message"),
    [
        ("data.parquet", "pyarrow", r"data.parquet needs pyarrow: pip install -e '.\[parquet\]' in a clone"),
        ("state.json", "datasets", r"pip install -e '.\[datasets\]' in a clone"),
    ],
)
def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, package: str, message: str):
    (tmp_path / file).write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=message):
        read_source(tmp_path)


def test_datasets_folder(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="needs the datasets extra: make test-integrations")
    datasets.Dataset.from_dict({"text": ["a", "", "c"]}).save_to_disk(str(tmp_path / "plain"))
    assert read_source(tmp_path / "plain") == [RawDocument("plain[0]", "a"), RawDocument("plain[2]", "c")]
    chat = datasets.Dataset.from_dict({"messages": [CHAT]})
    datasets.DatasetDict({"train": chat, "test": chat}).save_to_disk(str(tmp_path / "splits"))
    assert read_source(tmp_path / "splits") == [RawDocument("splits[0]", tuple(CHAT))]
    datasets.DatasetDict({"test": chat}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(DataError, match="no split 'train', only test"):
        read_source(tmp_path / "other")
    datasets.Dataset.from_dict({"label": [1]}).save_to_disk(str(tmp_path / "labels"))
    with pytest.raises(DataError, match="labels has neither"):
        read_source(tmp_path / "labels")
    rows = {"messages": [CHAT], "tools": ["[1]"], "label": [1]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "tools"))
    with pytest.raises(DataError, match="row 0 has 'tools'"):
        read_source(tmp_path / "tools")
    (tmp_path / "plain" / "dataset_info.json").unlink()
    with pytest.raises(DataError, match="plain is no folder that datasets' save_to_disk wrote whole"):
        read_source(tmp_path / "plain")


class _Rows:
    """One row of a data set; keeps which columns were asked for."""

    def __init__(self, names: list[str], asked: list[list[str]]) -> None:
        self.column_names, self.asked = names, asked

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([dict.fromkeys(self.column_names, "a")])

    def select_columns(self, names: list[str]) -> _Rows:
        self.asked.append(names)
        return _Rows(names, self.asked)


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_only_columns_that_are_read_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    asked: list[list[str]] = []
    rows = _Rows(["image", "tools", "text"], asked)

    class File:
        def __init__(self, path: Path) -> None:
            self.schema_arrow = SimpleNamespace(names=rows.column_names)

        def iter_batches(self, batch_size: int, columns: list[str]) -> list[SimpleNamespace]:
            return [SimpleNamespace(to_pylist=lambda: list(rows.select_columns(columns)))]

    fakes = {
        "pyarrow": SimpleNamespace(ArrowException=ArithmeticError),
        "pyarrow.parquet": SimpleNamespace(ParquetFile=File),
        "datasets": SimpleNamespace(DatasetDict=dict, load_from_disk=lambda path: rows),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    path = tmp_path / "a.parquet" if kind == "parquet" else tmp_path
    (tmp_path / ("a.parquet" if kind == "parquet" else "state.json")).touch()
    assert [document.content for document in read_source(path)] == ["a"]
    assert asked == [["text", "tools"]]
    rows.column_names = ["image"]
    with pytest.raises(DataError, match=f"{path.name} has neither 'messages'"):
        read_source(path)


def test_standard_library_is_skewed_and_free_of_packages_and_tests():
    source = stdlib_source()
    documents = read_source(source)
    sizes = sorted(len(document.content) for document in documents)
    mean = sum(sizes) / len(sizes)
    assert len(documents) > 300
    assert sizes[-1] > 10 * mean
    for document in documents:
        assert not {"site-packages", "dist-packages", "test"} & set(document.name.split("/"))
    assert source_named("stdlib") == source
    assert source_named("some/folder") == Path("some/folder")
