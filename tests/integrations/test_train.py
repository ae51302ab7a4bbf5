"""`odc train` with what only extras bring: adapters by peft, and Parquet by pyarrow."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.command import odc
from support.word_model import completions, model_folder, transformers_loss

from odc.errors import DataError
from odc.experiments.data.sources import read_source

pytestmark = [
    pytest.mark.skipif(
        find_spec("peft") is None or find_spec("pyarrow") is None,
        reason="needs peft and pyarrow: make test-integrations",
    ),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]


def write_parquet(path: Path, rows: list[Any]) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """Of a job on a folder of two Parquet files."""
    (tmp_path / "train").mkdir()
    write_parquet(tmp_path / "train" / "a.parquet", completions(12)[:5])
    write_parquet(tmp_path / "train" / "b.parquet", completions(12)[5:])
    write_parquet(tmp_path / "valid.parquet", completions(4))
    options = ["--model", model_folder(tmp_path / "model"), "--data", tmp_path / "train", "--lr", 1e-2]
    options += ["--minibatch-size", 12, "--max-tokens", 64, "--steps", 4, "--cache", tmp_path / "cache"]
    return [*options, "--valid", tmp_path / "valid.parquet"]


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("more", "rel"),
    [
        ([], 1e-5),
        (["--merge", "--plan", "dynamic"], 1e-5),
        (["--arm", "fsdp2", "--lora-targets", "q_proj,down_proj"], 1e-5),
        (["--precision", "bf16", "--lora-dropout", 0.1, "--activation-checkpointing"], 1e-2),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_an_exported_adapter_has_the_loss_that_was_shown(
    more: list[object], rel: float, options: list[object], tmp_path: Path
) -> None:
    output, export = tmp_path / "out", tmp_path / "export"
    assert odc("train", *options, "--lora", 4, *more, "--output", output, "--export", export) == 0
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = "--merge" in more
    after = (AutoModelForCausalLM if merged else AutoPeftModelForCausalLM).from_pretrained(export)
    first, *_, last = steps_of(output)
    expected = transformers_loss(before, tmp_path / "model", completions(12))
    assert first["loss"] == pytest.approx(expected, rel=2 * rel), "adapters begin as nothing"
    assert last["loss"] < first["loss"]
    assert last["valid_loss"] == pytest.approx(transformers_loss(after, export, completions(4)), rel=rel)
    if not merged:
        assert sorted(file.name for file in export.glob("adapter*")) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        frozen = dict(before.named_parameters())
        for name, value in after.get_base_model().named_parameters():
            if ".lora_" not in name:
                assert value.equal(frozen[name.replace(".base_layer", "")]), name


def test_adapters_go_on_where_they_stopped(options: list[object], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert odc("train", *options, "--lora", 4, "--output", whole, "--save-every", 2) == 0
    first = whole / "checkpoints" / "step-00000002"
    assert odc("train", *options, "--lora", 4, "--output", parts, "--resume", first) == 0
    assert [step["step"] for step in steps_of(parts)] == [3, 4]
    resumed, straight = ([step["loss"] for step in steps_of(folder)] for folder in (parts, whole))
    assert resumed == pytest.approx(straight[2:], rel=1e-5)


def test_an_unknown_module_is_named(options: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert odc("train", *options, "--lora", 4, "--lora-targets", "nothing") == 1
    assert "ConfigError: lora_targets: " in capfd.readouterr().err


def test_parquet_that_is_none_is_named(
    options: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train" / "c.parquet").write_text("no")
    assert odc("train", *options) == 2
    assert "c.parquet cannot be read as Parquet" in capfd.readouterr().err


def test_conversations_are_read_beside_other_columns(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "no"}]
    write_parquet(tmp_path / "a.parquet", [{"image": b"png", "messages": chat, "tools": None}] * 3)
    assert [document.content for document in read_source(tmp_path / "a.parquet")] == [tuple(chat)] * 3
    write_parquet(tmp_path / "a.parquet", [{"messages": chat, "tools": [{"name": "f"}]}])
    with pytest.raises(DataError, match="row 0 has 'tools'"):
        read_source(tmp_path / "a.parquet")
    write_parquet(tmp_path / "a.parquet", [{"image": b"png"}])
    with pytest.raises(DataError, match=r"a\.parquet has neither 'messages'"):
        read_source(tmp_path / "a.parquet")
