"""The import of odc.fsdp names whatever the installed torch lacks."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

from odc.fsdp import _torch_compat as compat

SOURCE = Path(compat.__file__)
Patch = pytest.MonkeyPatch


def import_again() -> None:
    """Run the file as a first import would, without touching the module that is in use."""
    spec = importlib.util.spec_from_file_location("compat_again", SOURCE)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def gone(owner: Any, *names: str) -> Callable[[Patch], None]:
    return lambda patch: [patch.delattr(owner, name) for name in names] and None


def renamed(name: str) -> Callable[[Patch], None]:
    """Attributes exist on instances alone: they are searched in what the constructor stores."""

    def rename(patch: Patch) -> None:
        init: Any = compat.FSDPParamGroup.__init__
        names = tuple("another" if known == name else known for known in init.__code__.co_names)
        assert names != init.__code__.co_names
        patch.setattr(init, "__code__", init.__code__.replace(co_names=names))

    return rename


def without_file(name: str) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(sys.modules, f"torch.distributed.fsdp._fully_shard.{name}", None)


def without_annotation(patch: Patch) -> None:
    patch.delitem(compat.FSDPParam.__annotations__, "padded_sharded_param_size")


def several(patch: Patch) -> None:
    gone(compat.FSDPParamGroup, "pre_backward")(patch)
    gone(compat.FSDPState, "_lazy_init")(patch)


LACKING: dict[str, Callable[[Patch], None]] = {
    "FSDPParamGroup.wait_for_unshard": gone(compat.FSDPParamGroup, "wait_for_unshard"),
    "FSDPParamGroup._to_sharded": gone(compat.FSDPParamGroup, "_to_sharded"),
    "FSDPModule._get_fsdp_state": gone(FSDPModule, "_get_fsdp_state"),
    "FSDPParamGroup.reduce_grads": renamed("reduce_grads"),
    "FSDPParamGroup.fsdp_params": renamed("fsdp_params"),
    "_get_default_store": gone(distributed_c10d, "_get_default_store"),
    **{name: without_file(name) for name in ("_fsdp_common", "_fsdp_param", "_fsdp_param_group", "_fsdp_state")},
    "FSDPParam.padded_sharded_param_size": without_annotation,
    "FSDPParamGroup.pre_backward, FSDPState._lazy_init": several,
}


@pytest.mark.parametrize("missing", LACKING)
def test_what_torch_lacks_is_named_at_import(missing: str, monkeypatch: Patch) -> None:
    import_again()
    LACKING[missing](monkeypatch)
    with pytest.raises(ImportError) as caught:
        import_again()
    for part in (missing, f"torch {torch.__version__}", "2.11 to 2.15"):
        assert part in str(caught.value)


def test_every_name_that_is_used_is_checked() -> None:
    """What the two files read of torch's objects is among the names that are checked at import."""
    text = SOURCE.read_text()
    of_param = SOURCE.with_name("_torch_param.py").read_text()
    checked = {name for names in compat._ON_CLASS.values() for name in names}
    checked |= {name for names in compat._STORED.values() for name in names}
    checked |= {"_fsdp_param_group", "_fsdp_param_groups", "_C"}
    checked |= {name for _, *names in compat._ELSEWHERE.values() for name in names}
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


@pytest.mark.parametrize(("change", "back"), [("unsharded", "sharded"), ("sharded", "unsharded")])
def test_a_change_of_a_unit_that_was_cut_short_is_undone_whole(change: str, back: str) -> None:
    """What a signal's handler raises: torch took the unit for one that is still what it was, and a parameter stayed
    with its module whose memory was freed.
    """

    class Param:
        def __init__(self) -> None:
            self.now, self.raises = back, False

        def to_unsharded(self) -> None:
            self._become("unsharded")

        def to_sharded(self) -> None:
            self._become("sharded")

        def _become(self, state: str) -> None:
            if self.raises:
                raise KeyboardInterrupt
            self.now = state

    group: Any = compat.UnorderedGroup.__new__(compat.UnorderedGroup)
    group._sharded_state, group.fsdp_params = None, [Param(), Param()]
    getattr(group, f"_to_{back}")()
    group.fsdp_params[1].raises = True
    with pytest.raises(KeyboardInterrupt):
        getattr(group, f"_to_{change}")()
    group.fsdp_params[1].raises = False
    assert not group.is_sharded and not group.is_unsharded
    getattr(group, f"_to_{back}")()
    assert [param.now for param in group.fsdp_params] == [back] * 2 and getattr(group, f"is_{back}")
