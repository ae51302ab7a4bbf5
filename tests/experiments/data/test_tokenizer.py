"""Tokenizers: every text survives, special tokens in a text stay text, and what is saved loads as the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import DataError
from odc.experiments.data.bpe import SMALLEST_VOCAB, BpeTokenizer, ByteTokenizer, cached_bpe
from odc.experiments.data.sources import RawDocument
from odc.experiments.data.tokenizer import HfTokenizer, Tokenizer, load_tokenizer

pytest.importorskip("transformers", reason="needs the train extra")

CORPUS = [RawDocument("a", "def f(x):\n    return x + 1\n" * 30), RawDocument("b", "naïve café ☕ <|endoftext|>" * 20)]
CHAT = (
    {"role": "user", "content": "What is <|im_end|>?"},
    {"role": "assistant", "content": "A mark.\n"},
    {"role": "user", "content": "ü"},
    {"role": "assistant", "content": "def f"},
)
TEXT = "def g(y): # naïve ☕ <|endoftext|>\r\n\x00"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> BpeTokenizer:
    return cached_bpe(CORPUS, 300, tmp_path_factory.mktemp("cache"))


@pytest.fixture(params=["bytes", "bpe", "saved"])
def tokenizer(request: pytest.FixtureRequest, bpe: BpeTokenizer, tmp_path: Path) -> Tokenizer:
    if request.param == "saved":
        bpe.save(tmp_path)
        return load_tokenizer(tmp_path)
    return ByteTokenizer() if request.param == "bytes" else bpe


def test_protocol(tokenizer: Tokenizer):
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    assert 0 <= tokenizer.eos_id < tokenizer.vocab_size
    assert tokenizer.bos_id is None
    assert tokenizer.eos_id not in ids, "a document that spells a special token does not end there"
    many = tokenizer.encode_many([TEXT, "", "def"])
    np.testing.assert_array_equal(many[0], ids)
    assert [len(row) for row in many[1:]] == [0, len(tokenizer.encode("def"))]
    assert tokenizer.encode_many([]) == []


@given(st.text())
def test_bytes_are_the_text(text: str):
    ids = ByteTokenizer().encode(text)
    assert bytes(ids.astype(np.uint8)).decode() == text


def test_saved_tokenizers_load_as_the_same(tmp_path: Path, bpe: BpeTokenizer):
    for name, own in (("bytes", ByteTokenizer()), ("bpe", bpe)):
        own.save(tmp_path / name)
        loaded = load_tokenizer(tmp_path / name)
        assert loaded.vocab_size == own.vocab_size
        assert loaded.eos_id == own.eos_id
        assert loaded.ends == own.ends == [own.eos_id, own.eos_id + 2], "also the mark that ends an answer"
        np.testing.assert_array_equal(loaded.encode(TEXT), own.encode(TEXT))
        plain = tuple(m | {"content": m["content"].replace("<|im_end|>", "it").strip()} for m in CHAT)
        for mine, theirs in zip(own.encode_chat(plain), loaded.encode_chat(plain), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        loaded.save(tmp_path / name / "again")
        assert load_tokenizer(tmp_path / name / "again").fingerprint == loaded.fingerprint


@pytest.mark.parametrize("template", ["{{ messages[-1]['content'] }} ###", ""])
def test_a_template_that_ends_answers_by_words_or_is_missing_has_no_mark(
    tmp_path: Path, bpe: BpeTokenizer, template: str
):
    loaded = load_tokenizer_with(tmp_path, bpe, chat_template=template)
    assert loaded.ends == [loaded.eos_id]


def test_another_special_token_is_another_fingerprint(tmp_path: Path, bpe: BpeTokenizer):
    """It stands in neither the rules nor the template, but ends documents and is rendered."""
    before = load_tokenizer_with(tmp_path, bpe)
    after = load_tokenizer_with(tmp_path, bpe, eos_token="<|im_end|>")
    assert after.eos_id != before.eos_id and after.fingerprint != before.fingerprint


def load_tokenizer_with(folder: Path, bpe: BpeTokenizer, **fields: str) -> HfTokenizer:
    bpe.save(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return load_tokenizer(folder)


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gpt2"])
def test_saved_beside_a_model_they_give_the_same_ids(tmp_path: Path, bpe: BpeTokenizer, model_type: str):
    """Transformers replaces the rules of some models' tokenizers by its own."""
    from transformers import AutoTokenizer

    for name, own in (("bytes", ByteTokenizer()), ("bpe", bpe)):
        folder = tmp_path / name
        own.save(folder)
        (folder / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        text = TEXT + " it's 12345\n\n\t  x²"
        ids = own.encode(text).tolist()
        assert AutoTokenizer.from_pretrained(str(folder))(text, split_special_tokens=True)["input_ids"] == ids
        decomposed = text + "e\u0301"
        assert load_tokenizer(folder).encode(decomposed).tolist() == own.encode(decomposed).tolist()


def test_chat_trains_the_answers_only():
    tokens, trained = ByteTokenizer().encode_chat(CHAT)
    answers = [*b"A mark.\n", 258, *b"def f", 258]
    assert tokens[trained].tolist() == answers
    assert (tokens == 258).sum() == 4, "the mark that the user spelled is text"


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("ask", "AB"), ("def f(x):\n", "    return"), ("A: ", "return"), ("x\n", "\n x"), ("", "x"), ("☕", "é")],
)
def test_bytes_before_and_after_the_begin_of_a_completion_keep_their_tokens(
    tokenizer: Tokenizer, prompt: str, completion: str
):
    """As in generating, where the prompt's tokens are there already."""
    tokens, trained = tokenizer.encode_pair(prompt, completion)
    before, after = tokenizer.encode(prompt), tokenizer.encode(completion)
    assert tokens.tolist() == [*before, *after]
    assert trained.tolist() == [False] * len(before) + [True] * len(after)


def test_answers_that_begin_with_an_end_of_line(tmp_path: Path, bpe: BpeTokenizer):
    bpe.save(tmp_path)
    chat = [{"role": "user", "content": "f"}, {"role": "assistant", "content": "\n\n    return"}]
    for mine, theirs in zip(bpe.encode_chat(chat), load_tokenizer(tmp_path).encode_chat(chat), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def metaspace(folder: Path, scheme: str, *, rstrip: bool = False) -> HfTokenizer:
    """Characters and `▁y` are its tokens; a text, or with "always" what follows a mark, begins with `▁`."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Rules
    from transformers import PreTrainedTokenizerFast

    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    vocab = {
        token: number for number, token in enumerate(["</s>", "<|user|>", "<|assistant|>", "▁y", *"▁\n:abeinoqsy"])
    }
    rules = Rules(models.BPE(vocab, [("▁", "y")]))
    rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    marks = [AddedToken(name, special=True, rstrip=rstrip) for name in ("</s>", "<|user|>", "<|assistant|>")]
    special = {"eos_token": marks[0], "additional_special_tokens": marks[1:]}
    PreTrainedTokenizerFast(tokenizer_object=rules, chat_template=template, **special).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("rstrip", [False, True])
def test_a_conversation_has_the_tokens_of_its_template(tmp_path: Path, scheme: str, rstrip: bool):
    chat = [{"role": role, "content": text} for text in ("yes", "no y") for role in ("user", "assistant")]
    loaded = metaspace(tmp_path, scheme, rstrip=rstrip)
    whole = loaded._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    tokens, trained = loaded.encode_chat(chat)
    assert tokens.tolist() == whole[: len(whole) - whole[::-1].index(loaded.eos_id)]
    answers = "".join(loaded._tokenizer.convert_ids_to_tokens(tokens[trained])).replace("▁", " ")
    assert answers.replace("> ", ">").strip() == "yes</s>no y</s>"


def test_a_completion_goes_on_where_its_prompt_ends(tmp_path: Path):
    loaded = metaspace(tmp_path, "first")
    for prompt, completion in (("q:", " yes"), ("q\n", "yes"), ("q:", "yes")):
        tokens, trained = loaded.encode_pair(prompt, completion)
        assert tokens.tolist() == loaded.encode(prompt + completion).tolist()
        assert trained.tolist() == [False] * 3 + [True] * 3
    tokens, trained = loaded.encode_pair("q: ", "yes")
    assert tokens.tolist() == [*loaded.encode("q: "), *loaded.encode("yes")], "a token would straddle the begin"


def test_a_tokenizer_without_offsets(tmp_path: Path, bpe: BpeTokenizer, monkeypatch: pytest.MonkeyPatch):
    bpe.save(tmp_path / "bpe")
    plain, prefixing = load_tokenizer(tmp_path / "bpe"), metaspace(tmp_path / "metaspace", "first")
    fast = plain.encode_pair("def f(x):\n", "    return")
    monkeypatch.setattr(type(plain._tokenizer), "is_fast", False)
    for mine, theirs in zip(plain.encode_pair("def f(x):\n", "    return"), fast, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        prefixing.encode_pair("q\n", "yes")


def test_fingerprints_differ(bpe: BpeTokenizer, tmp_path: Path):
    other = cached_bpe(CORPUS, 280, tmp_path)
    bpe.save(tmp_path / "a")
    loaded = load_tokenizer(tmp_path / "a")
    assert len({bpe.fingerprint, other.fingerprint, ByteTokenizer().fingerprint, loaded.fingerprint}) == 4
    assert SMALLEST_VOCAB < other.vocab_size <= 280 < bpe.vocab_size <= 300


def test_begin_of_text_is_found(tmp_path: Path):
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    rules.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=rules, bos_token="<s>", eos_token="</s>").save_pretrained(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_id, loaded.eos_id) == (0, 1)
    assert loaded.encode("a").tolist() == [2]
    with pytest.raises(DataError, match="no chat template"):
        loaded.encode_chat(CHAT)


def test_bad_folders(tmp_path: Path):
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("nonsense")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_template_errors_are_data_errors(bpe: BpeTokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{% for message", "{{ raise_exception('no') }}{% for message"))
    with pytest.raises(DataError, match="refuses the conversation: no"):
        load_tokenizer(tmp_path).encode_chat(CHAT)
