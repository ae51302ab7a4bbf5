"""Kernels on the emulated device: late, in their stream's turn, and launched again as triton's compiled ones are."""

from __future__ import annotations

import ctypes

import pytest
import torch
import triton
import triton.language as tl

from odc.kernels import GatherPlan, fixed_rows, pointer_table, publish
from odc.kernels.launch import PreparedLaunch

SLEEP = 3_000_000_000  # cycles: 3 s
N = 1000


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_launch_returns_at_once_and_its_kernel_comes_in_its_turn() -> None:
    source, target = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    source.add_(1.0)
    publish([target], [source])
    assert not torch.cuda.current_stream().query()
    source.add_(1.0)
    assert target.cpu().unique().tolist() == [1.0]


def test_another_stream_that_does_not_wait_reads_too_early() -> None:
    source, target = torch.ones(N, device="cuda"), torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP)
        publish([target], [source])
    assert target.cpu().unique().tolist() == [0.0]
    torch.cuda.synchronize()
    assert target.cpu().unique().tolist() == [1.0]


def test_a_launch_keeps_no_tensor_alive() -> None:
    """What is given out again in the same stream is written after the kernel; a kernel sees what lies there then."""
    target = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    source = torch.ones(N, device="cuda")
    address = source.data_ptr()
    publish([target], [source])
    del source
    again = torch.full((N,), 2.0, device="cuda")
    assert again.data_ptr() == address
    assert target.cpu().unique().tolist() == [1.0]


def test_a_wait_that_holds_pythons_lock_ends() -> None:
    source, target = torch.ones(N, device="cuda"), torch.zeros(N, device="cuda")
    torch.cuda._sleep(SLEEP)
    publish([target], [source])
    cuda = ctypes.PyDLL("libcuda.so.1")  # its calls keep the lock
    assert cuda.cudaStreamSynchronize(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)) == 0
    assert target.cpu().unique().tolist() == [1.0]


def test_a_prepared_launch_is_launched_again_over_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, out = [torch.full((N,), value, device="cuda") for value in (1.0, 2.0, 3.0)], torch.zeros(N, device="cuda")
    plan = GatherPlan([out], [0], 1, device(), make_rows=fixed_rows)
    for i, source in enumerate(sources):
        plan.run([out.data_ptr()], pointer_table([source.data_ptr()], device()), 0, 1)
        assert torch.equal(out.cpu(), source.cpu())
        if i == 0:  # from now on nothing binds arguments
            monkeypatch.setattr("odc.kernels.launch.launch", None)


@triton.jit(do_not_specialize=["target"])
def store_number(target: tl.tensor, number: tl.int32, TIMES: tl.constexpr) -> None:
    tl.store(target, number * TIMES)


def test_what_triton_would_have_compiled_in_is_refused() -> None:
    """`number` is specialized, so what is compiled for 1 must not be launched for 2."""
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    launch = PreparedLaunch(store_number, device(), TIMES=3)
    launch(1, target, 1)
    assert int(target) == 3
    with pytest.raises(TypeError, match="store_number is compiled for what number"):
        launch(1, target, 2)


def test_memory_of_the_host_is_no_kernels() -> None:
    with pytest.raises(ValueError, match="cannot reach a tensor on cpu"):
        PreparedLaunch(store_number, device(), TIMES=3)(1, torch.zeros(1, dtype=torch.int32), 1)
