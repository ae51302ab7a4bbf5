"""Reading raw data: what is read, in which order, and the errors for what cannot be read."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

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
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xff"}')
    for path, name in ((tmp_path, "txt"), (tmp_path / "latin.jsonl", "jsonl")):
        with pytest.raises(DataError, match=rf"latin\.{name} is not UTF-8"):
            read_source(path)
    assert names(read_source(tmp_path, unreadable="skip")) == ["a.txt"]
    assert "skipped 1 files" in caplog.text


def test_nothing_there(tmp_path: Path):
    with pytest.raises(DataError, match="no file or folder"):
        read_source(tmp_path / "missing")
    with pytest.raises(DataError, match=r"no non-empty file ends in \.txt, \.md, \.py"):
        read_source(tmp_path)
    (tmp_path / "data.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"there is data\.jsonl; name the JSONL file itself"):
        read_source(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no documents"):
        read_source(tmp_path / "empty.jsonl")


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
        ("{", "line 2 is not JSON"),
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
    with pytest.raises(DataError, match="row 0 has neither"):
        read_source(tmp_path / "labels")


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
