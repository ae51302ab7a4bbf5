"""What `Recovery` refuses, before any work starts. One rank, in this process."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import odc
from odc.errors import ConfigError, HeapMemoryError, PeerLostError, UnsupportedError
from odc.memory import FreeMemory
from odc.recovery import generations, process_group, slots
from odc.recovery.generations import GenerationOver
from odc.recovery.holdings import Holdings
from odc.recovery.process_group import GenerationGroup


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")  # put back at the end
    yield
    odc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def recovery(environment: None) -> Iterator[odc.Recovery]:
    made: Any = dist
    with odc.Recovery(made.HashStore(), rejoin_s=5.0) as found:
        yield found


def test_a_death_before_the_first_state_is_kept_is_named(recovery: odc.Recovery, monkeypatch: Any) -> None:
    """What a collective has brought since may be anything, and there is nothing to go back to."""

    def cut_short(self: GenerationGroup, tensors: object) -> None:
        raise GenerationOver

    monkeypatch.setattr(GenerationGroup, "settle", cut_short)
    with pytest.raises(PeerLostError, match="rank 0: a rank has ended before all had kept a first state"):
        recovery.protect(*trained())


def test_the_network_is_opened_by_the_settings_of_the_model(environment: None, monkeypatch: Any) -> None:
    made, seen, wanted = cast(Any, dist), list[object](), odc.Settings(lost_after_s=30.0)
    monkeypatch.setattr(process_group, "announce_rank", lambda timeout_s, settings: seen.append(settings))
    with odc.Recovery(made.HashStore(), rejoin_s=5.0, settings=wanted):
        assert seen == [wanted]


def trained(mesh: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    model = odc.fully_shard(nn.Linear(4, 4), mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_job_of_one_rank_trains(recovery: odc.Recovery) -> None:
    model, optimizer = trained()
    recovery.protect(model, optimizer, first=3)
    done = []
    for step in recovery.steps(6):
        with recovery.attempt():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            done.append(step)
    assert done == [3, 4, 5]
    assert (recovery.step, recovery.generation, recovery.recoveries) == (6, 0, 0)


def test_another_first_step_than_the_jobs_is_refused(environment: None) -> None:
    """All ranks were lost before they had kept a later one, and a newer checkpoint is there."""
    made: Any = dist
    store = made.HashStore()
    store.set(generations.PREFIX + "first", "3")
    with odc.Recovery(store, rejoin_s=5.0) as recovery:
        model, optimizer = trained()
        with pytest.raises(ConfigError, match="the job began at step 3 and has kept none since, .* gives first=5"):
            recovery.protect(model, optimizer, first=5)


def test_a_keeper_whose_number_is_another_users_process_is_let_be(environment: None, monkeypatch: Any) -> None:
    made: Any = dist
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    killed, opened = list[int](), os.open
    with odc.Recovery(made.HashStore(), rejoin_s=5.0) as recovery:
        recovery.protect(*trained())
        former = recovery._held._keeper
        assert former is not None
        former.kill()
        former.wait()

        def refuse(path: str, flags: int) -> int:
            if path.startswith(f"/proc/{former.pid}/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return opened(path, flags)

        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
        with recovery.attempt():
            raise GenerationOver
        monkeypatch.undo()
        assert recovery.recoveries == 1
        assert not killed
        recovery._held.end_keeper()


def test_an_uncaught_error_names_this_rank_once_in_any_generation(
    environment: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Any = dist
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(process_group, "_rank", None, raising=False)
    with odc.Recovery(made.HashStore(), rejoin_s=5.0) as recovery:
        recovery.protect(*trained())
        for _ in range(2):
            with recovery.attempt():
                raise GenerationOver
        error = ValueError("no generation\n\nnor another")
        sys.excepthook(ValueError, error, None)
    assert capsys.readouterr().err.endswith("[rank0]: ValueError: no generation\n\n[rank0]: nor another\n")


def test_a_step_that_fails_is_not_counted(recovery: odc.Recovery) -> None:
    recovery.protect(*trained())
    with pytest.raises(ZeroDivisionError), recovery.attempt():
        raise ZeroDivisionError
    assert recovery.step == 0


def test_an_attempt_without_a_minibatch_is_not_kept(recovery: odc.Recovery) -> None:
    """Another rank may be any number of such steps behind."""
    model, optimizer = trained()
    recovery.protect(model, optimizer)
    kept = []
    for step in recovery.steps(5):
        with recovery.attempt():
            if step in (2, 4):
                model(torch.ones(2, 4)).sum().backward()
        kept.append(recovery._held.own.steps())
    assert kept == [[0], [0], [0, 3], [0, 3], [3, 5]]
    assert recovery._generations._store.check(["past"])


def test_a_model_that_odc_has_not_sharded_is_kept_after_each_step(recovery: odc.Recovery) -> None:
    """Its program lets the ranks meet, by an all-reduce for instance."""
    model = nn.Linear(4, 4)
    recovery.protect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in recovery.steps(2):
        with recovery.attempt():
            pass
    assert recovery._held.own.steps() == [1, 2]


def test_a_buddy_of_a_model_that_odc_has_not_sharded_is_refused(recovery: odc.Recovery) -> None:
    """Nothing would keep the rank from hiding a state before its buddy has read it."""
    with pytest.raises(UnsupportedError, match="keep='buddy' is for models of fully_shard"):
        recovery._met.watch([nn.Linear(4, 4)], buddies=True)


def test_modes_of_before_the_loop_are_noted(recovery: odc.Recovery) -> None:
    model, optimizer = trained()
    model.eval()
    recovery.protect(model, optimizer)
    model.train()
    for step in recovery.steps(2):
        with recovery.attempt():
            assert model.training, f"step {step}"
            model(torch.ones(2, 4)).sum().backward()
            if step == 0 and not recovery.recoveries:
                model.eval()
                raise generations.GenerationOver


def test_a_process_that_begins_where_no_first_state_was_kept_warns(environment: None, caplog: Any) -> None:
    """A broadcast of weights before `protect` has no other rank any more."""
    made: Any = dist
    store = made.HashStore()
    store.set(generations.PREFIX + "generation", "1")
    with odc.Recovery(store, rejoin_s=5.0) as recovery:
        recovery.protect(*trained())
    assert "rank 0 begins in generation 1 with the weights that its program has built" in caplog.text


def test_a_process_that_begins_with_all_others_does_not_warn(recovery: odc.Recovery, caplog: Any) -> None:
    recovery.protect(*trained())
    assert "begins in generation" not in caplog.text


def abandoned(model: Any) -> None:
    with model.minibatch():
        model(torch.ones(2, 4))
        model.abandon_minibatch("a bad sample")


def test_a_minibatch_that_was_given_up_is_the_loops_own(recovery: odc.Recovery) -> None:
    model, optimizer = trained()
    recovery.protect(model, optimizer)
    with pytest.raises(odc.AbandonedMinibatchError), recovery.attempt():
        abandoned(model)
    assert (recovery.step, recovery.generation) == (0, 0)


def test_the_end_of_the_stores_host_cannot_be_survived(recovery: odc.Recovery) -> None:
    recovery.protect(*trained())
    with pytest.raises(PeerLostError), recovery.attempt():
        raise PeerLostError("the job's key-value store is gone")


def test_other_meshes_are_refused(recovery: odc.Recovery) -> None:
    model, optimizer = trained(init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(UnsupportedError, match="sharded over all ranks of the job, on a 1-D mesh"):
        recovery.protect(model, optimizer)


def test_protect_comes_once_and_first(recovery: odc.Recovery) -> None:
    with pytest.raises(ConfigError, match="protect"), recovery.attempt():
        pytest.fail("it began")
    model, optimizer = trained()
    recovery.protect(model, optimizer)
    with pytest.raises(ConfigError, match="once"):
        recovery.protect(model, optimizer)


def test_too_little_memory_is_an_error_before_the_training(
    recovery: odc.Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "free_memory", lambda: FreeMemory(100, "the cgroup"))
    with pytest.raises(HeapMemoryError, match="keeping a rank's state needs"):
        recovery.protect(*trained())


@pytest.mark.parametrize("what", [(os, "memfd_create"), (Holdings, "start_keeper")])
def test_what_this_process_cannot_open_is_not_taken_for_the_end_of_another(
    environment: None, monkeypatch: pytest.MonkeyPatch, what: tuple[Any, str]
) -> None:
    """As a death it would begin one generation after another, without end."""
    made: Any = dist
    tried = list[None]()

    def refuse(*unused: object) -> None:
        assert not tried, "tried again"
        tried.append(None)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(*what, refuse)
    with pytest.raises((HeapMemoryError, OSError), match="Too many open files"):
        odc.Recovery(made.HashStore(), rejoin_s=5.0)


def test_a_process_group_that_is_there_is_refused(recovery: odc.Recovery) -> None:
    made: Any = dist
    with pytest.raises(UnsupportedError, match="there is a process group already"):
        odc.Recovery(made.HashStore())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"rejoin_s": 0.0}, "rejoin_s=0"),
        ({"rejoin_s": float("nan")}, "rejoin_s=nan"),
        ({"rejoin_s": float("inf")}, "rejoin_s=inf"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        odc.Recovery(**options)


def test_a_store_that_a_rank_hosts_is_refused(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(UnsupportedError, match="rank 0 would host the job's store"):
        odc.Recovery()


def test_a_process_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE"):
        odc.Recovery()


@pytest.mark.parametrize("rank", ["1", "-1"])
def test_a_rank_outside_of_the_world_is_refused(environment: None, monkeypatch: Any, rank: str) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ConfigError, match=f"RANK={rank} must be from 0 to 0, since WORLD_SIZE=1"):
        odc.Recovery()


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_that_is_none_is_refused(environment: None, monkeypatch: Any, port: str) -> None:
    for name, text in {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port} must be from 1 to 65535"):
        odc.Recovery(rejoin_s=1.0)


class Averaged(torch.optim.SGD):
    """Keeps a plain tensor of the size of a shard."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = parameter.to_local().clone()


def test_a_job_begins_without_a_rank_that_does_not_come(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = dist
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(generations, "MEMBERS_LEAST_S", 0.2)
    with odc.Recovery(made.HashStore(), rejoin_s=0.2, fewest=1) as recovery:
        assert (recovery.rank, recovery.world) == (0, 1) == (dist.get_rank(), dist.get_world_size())
        model: Any = odc.fully_shard(nn.Linear(4, 4))
        optimizer = Averaged(model.parameters())
        recovery.protect(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UnsupportedError, match="Averaged keeps 'mean', a plain tensor"), recovery.attempt():
            optimizer.step()


@pytest.mark.parametrize("fewest", [0, 3])
def test_fewest_must_be_possible(environment: None, monkeypatch: pytest.MonkeyPatch, fewest: int) -> None:
    made: Any = dist
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=rf"fewest={fewest} must be from 1 to the 2 ranks of the job"):
        odc.Recovery(made.HashStore(), fewest=fewest)
