from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

from odc.fsdp import _torch_compat as compat

SOURCE = Path(compat.__file__)


def import_again() -> None:
    """Run the file as a first import would, without touching the module that everybody uses."""
    spec = importlib.util.spec_from_file_location("compat_again", SOURCE)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def assert_names(error: ImportError, missing: str) -> None:
    text = str(error)
    assert missing in text
    assert f"torch {torch.__version__}" in text
    assert "2.11 to 2.15" in text


def test_the_installed_torch_has_every_name() -> None:
    import_again()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (compat.FSDPParamGroup, "wait_for_unshard"),
        (compat.FSDPParamGroup, "_to_sharded"),
        (compat.FSDPState, "_lazy_init"),
        (FSDPModule, "_get_fsdp_state"),
    ],
)
def test_a_method_that_is_gone_is_named_at_import(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError) as caught:
        import_again()
    assert_names(caught.value, f"{owner.__name__}.{name}")


@pytest.mark.parametrize(("name", "renamed"), [("reduce_grads", "reduce_gradients"), ("fsdp_params", "params")])
def test_an_attribute_that_is_gone_is_named_at_import(name: str, renamed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes exist on instances alone: they are looked for in what the constructor stores."""
    init: Any = compat.FSDPParamGroup.__init__
    names = tuple(renamed if known == name else known for known in init.__code__.co_names)
    assert names != init.__code__.co_names
    monkeypatch.setattr(init, "__code__", init.__code__.replace(co_names=names))
    with pytest.raises(ImportError) as caught:
        import_again()
    assert_names(caught.value, f"FSDPParamGroup.{name}")


def test_a_function_that_is_gone_is_named_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    with pytest.raises(ImportError) as caught:
        import_again()
    assert_names(caught.value, "_get_default_store")


@pytest.mark.parametrize("file", ["_fsdp_common", "_fsdp_param", "_fsdp_param_group", "_fsdp_state"])
def test_a_file_that_is_gone_is_named_at_import(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"torch.distributed.fsdp._fully_shard.{file}", None)
    with pytest.raises(ImportError) as caught:
        import_again()
    assert_names(caught.value, file)


def test_everything_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(compat.FSDPParamGroup, "pre_backward")
    monkeypatch.delattr(compat.FSDPState, "_lazy_init")
    with pytest.raises(ImportError) as caught:
        import_again()
    assert_names(caught.value, "FSDPParamGroup.pre_backward, FSDPState._lazy_init")


def test_annotated_attributes_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    param = compat.FSDPParam
    monkeypatch.delitem(param.__annotations__, "padded_sharded_param_size")
    with pytest.raises(ImportError) as caught:
        import_again()
    assert_names(caught.value, "FSDPParam.padded_sharded_param_size")


def test_every_name_that_is_used_is_checked() -> None:
    """What the two files read of torch's objects is among the names that are checked at import."""
    text = SOURCE.read_text()
    of_param = SOURCE.with_name("_torch_param.py").read_text()
    checked = {name for names in compat._ON_CLASS.values() for name in names}
    checked |= {name for names in compat._STORED.values() for name in names}
    checked |= {"_fsdp_param_group", "_fsdp_param_groups", "_C"} | {name for _, name in compat._ELSEWHERE.values()}
    checked |= {*compat._OF_ACCUMULATION, *compat._OF_GRADIENT_DTYPE}
    body = text[text.index("def state_of(") :] + "\n" + of_param[of_param.index("class ShardedParam") :]
    used = {node.attr for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Attribute)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    ours = {"_param", "_group", "_kept_in", "_summed_in", "_root"}  # of ShardedParam and Iteration
    public_of_dtensor = {"_local_tensor", "_post_accumulate_grad_hooks"}  # long-lived names of torch's own tensors
    assert private - checked - ours - public_of_dtensor == set()
    of_params = set(re.findall(r"(?:self\._param|\bparam)\.(\w+)", of_param))
    assert of_params - checked == set()


def test_a_unit_of_several_modules_is_one_group() -> None:
    """In torch 2.11 the state is listed once for each of its modules."""
    one, other, none = (SimpleNamespace(_fsdp_param_groups=groups) for groups in (["one"], ["other"], []))
    root: Any = SimpleNamespace(_state_ctx=SimpleNamespace(all_states=[one, none, one, other, one]))
    assert compat.groups_of_root(root) == ["one", "other"]
