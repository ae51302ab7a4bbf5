from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import TraceError
from odc.trace import FETCH, MARKS, WAIT, Span, load_spans, save_spans

NUMBER = st.integers(-(2**62), 2**62)
SPANS = st.lists(
    st.builds(
        Span,
        st.sampled_from([FETCH, WAIT, *MARKS]),
        st.text(),
        NUMBER,
        NUMBER,
        NUMBER,
        NUMBER,
        st.text(),
        NUMBER,
        NUMBER,
    )
)


@given(SPANS)
def test_round_trip(tmp_path_factory, spans):
    path = tmp_path_factory.mktemp("spans") / "rank 3.jsonl"
    save_spans(path, spans)
    loaded = load_spans(path)
    assert loaded == spans
    assert all(type(span) is Span for span in loaded)


def test_the_folder_is_made_and_an_old_file_replaced(tmp_path):
    path = tmp_path / "a" / "b.jsonl"
    save_spans(path, [Span(FETCH, "main", 0, 1)] * 3)
    save_spans(str(path), [Span(WAIT, "main", 0, 1)])
    assert load_spans(path) == [Span(WAIT, "main", 0, 1)]
    assert [each.name for each in path.parent.iterdir()] == ["b.jsonl"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "b.jsonl"
    save_spans(path, [Span(FETCH, "main", 0, 1)])
    with pytest.raises(TypeError):
        save_spans(path, [Span(WAIT, "main", 0, 1), Span(WAIT, "main", 0, object())])
    assert load_spans(path) == [Span(FETCH, "main", 0, 1)]
    assert [each.name for each in tmp_path.iterdir()] == ["b.jsonl"]


@pytest.mark.parametrize("text", ["", "hello\n", "{}\n", '{"format": "odc-spans-0", "fields": []}\n'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "b.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=r"b\.jsonl is not a file of spans"):
        load_spans(path)


@pytest.mark.parametrize("line", ['["fetch","main",0', "[1]", "7", "null"])
def test_a_damaged_line_is_refused(tmp_path, line):
    path = tmp_path / "b.jsonl"
    save_spans(path, [Span(FETCH, "main", 0, 1)])
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
    with pytest.raises(TraceError, match="damaged"):
        load_spans(path)
