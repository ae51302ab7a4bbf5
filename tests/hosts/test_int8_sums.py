"""Sums that cross as int8: what one epoch's rounding takes off a sum arrives with the sums of later epochs.

Members of two hosts in one process; member 0 owns what member 2 sums up on the other host.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.deferred import DeferredMover, late_heaps
from support.linked import HOSTS
from support.members import BF16, F32, HeapGroup
from support.spread import Spread

from odc.errors import UnsupportedError
from odc.protocol import Gradient, Word
from odc.protocol.reduction import RoundedSum
from odc.protocol.rounding import coarse_parameters
from odc.settings import Settings

WIDE = 300  # elements of a shard: two blocks, and a part of one
LAYOUT = [[("w", WIDE, F32), ("norm", 6, F32), ("v", WIDE, F32)], [("u", WIDE, F32)], [("embedding", 64, F32)]]
COARSE = ("w", "v", "u")
OWNER, SOURCE, OTHER = 0, 2, 3  # of the sums that are looked at; two ranks of the other host add to them


class Sums:
    """The sums of the other host for member 0 over many epochs: what was pushed, and what has arrived."""

    def __init__(self, **options: object) -> None:
        self.spread = Spread(layout=LAYOUT, coarse=COARSE, sums_dtype="int8", **options)  # type: ignore[arg-type]
        self.units, self.epoch = self.spread.group.units, 0
        self.pushed = [torch.zeros(unit.numel) for unit in self.units]
        self.arrived = [torch.zeros(unit.numel) for unit in self.units]
        self._now = [torch.zeros(unit.numel) for unit in self.units]
        self._used = set[tuple[int, int]]()
        self._dirty = [False] * len(self.units)

    def begin(self) -> None:
        shards = [[torch.zeros(param.numel) for param in unit.params] for unit in self.units]
        for member in self.spread.group.members:
            member.shards.publish(shards, self._dirty)
        self.spread.mirror(Word.PUBLISHED)
        self.epoch += 1
        self._now = [torch.zeros(unit.numel) for unit in self.units]
        self._used = set()

    def push(self, unit: int, values: dict[int, torch.Tensor], me: int = SOURCE, *, last: bool = False) -> None:
        """`values`: by parameter, of the shard of member 0; the other members' shards get ones."""
        spec = self.units[unit]
        gradients = []
        for param, one in values.items():
            size = spec.params[param].numel
            gradients.append(Gradient(param, torch.cat([one, torch.ones(3 * size)])))
            at = spec.params[param].accumulator_offset
            self._now[unit][at : at + size] += one
            self._used.add((unit, param))
        self.spread.group.members[me].pusher.push(spec, gradients)
        if last:
            self.spread.group.members[me].pusher.end([spec])

    def announce(self) -> None:
        """What daemons do: announce what is complete, and read it."""
        for sums in self.spread.sums:
            sums.announce()
        for member, epoch, counts in self.spread.summed:
            if member in self.spread.group.layouts[OWNER].grid.partners and epoch == self.epoch:
                self.spread.readers[OWNER].note_summed(member, epoch, counts)

    def end(self, *, abandoned: bool = False) -> list[torch.Tensor]:
        """End the epoch as `odc.fsdp.collect` does; returns by unit what has arrived."""
        used = [any(unit == one for one, _ in self._used) for unit in range(len(self.units))]
        self.spread.finish(used)
        by_param = [(unit.index, i) in self._used for unit in self.units for i in range(len(unit.params))]
        self._dirty = [True] * len(used) if abandoned else used
        if abandoned:
            for reader in self.spread.readers:
                reader.skip()
            return []
        for layout in self.spread.group.layouts:
            layout.keep_residuals(by_param)
        self.spread.readers[OWNER].gather(used)
        found = []
        for unit in self.units:
            came = torch.zeros(unit.numel)
            if used[unit.index]:
                _, part = self.spread.group.members[OWNER].reduction.parts(unit)
                assert isinstance(part, RoundedSum)
                part.add_to(came, came)
                self.spread.group.layouts[OWNER].heap.lanes.settle()
            for i, spec in enumerate(unit.params):  # what the owner reads
                if (unit.index, i) not in self._used:
                    came[spec.accumulator_offset : spec.accumulator_offset + spec.numel] = 0
            self.arrived[unit.index] += came
            self.pushed[unit.index] += self._now[unit.index]
            found.append(came)
        return found

    def behind(self, unit: int) -> torch.Tensor:
        """By element, how far what has arrived is from what was pushed in epochs that were not abandoned."""
        return (self.arrived[unit] - self.pushed[unit]).abs()


@pytest.fixture(params=["in CPU memory", "on a device"])
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sums]:
    """On a device everything is done late, and is the same."""
    if request.param == "on a device":
        late_heaps(monkeypatch, atomic=True)
    made = Sums()
    yield made
    made.spread.close()


def draw(seed: int, size: int = WIDE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_a_small_gradient_beside_a_large_one_arrives_in_the_mean(sums: Sums) -> None:
    """The step of its block is 1/127, and 0.001 is a seventh of one: rounded by itself it would never arrive."""
    gradient = torch.full((WIDE,), 0.001)
    gradient[5] = 1.0
    for epoch in range(1, 201):
        sums.begin()
        sums.push(1, {0: gradient})
        came = sums.end()[1]
        if epoch == 1:
            assert not came[6:100].any(), "or this shows nothing"
    assert (sums.behind(1) <= 0.51 / 127).all()
    assert sums.arrived[1][50] / 200 == pytest.approx(0.001, rel=0.03)


def test_a_sum_is_that_of_all_pushes_but_for_half_a_step(sums: Sums) -> None:
    for epoch in range(30):
        sums.begin()
        parts = [draw(10 * epoch + i) for i in range(4)]
        sums.push(0, {0: parts[0], 1: draw(epoch, 6), 2: parts[1]}, SOURCE)
        sums.push(0, {0: parts[2], 2: parts[3]}, OTHER)
        sums.end()
        step = 4 * 4.0 / 127
        assert (sums.behind(0) <= step / 2).all(), epoch
    assert sums.behind(0)[:WIDE].max() > 0.001, "nothing was rounded"


def test_norms_and_embeddings_cross_in_bf16(sums: Sums) -> None:
    sums.begin()
    norm, embedding = draw(1, 6), draw(2, 64)
    sums.push(0, {0: draw(3), 1: norm, 2: draw(4)})
    sums.push(2, {0: embedding})
    came = sums.end()
    assert torch.equal(came[0][WIDE : WIDE + 6], norm.to(BF16).float())
    assert torch.equal(came[2], embedding.to(BF16).float())
    assert not torch.equal(came[0][:WIDE], draw(3).to(BF16).float())
    for _ in range(20):
        sums.begin()
        sums.push(2, {0: embedding})
        sums.end()
    assert (sums.behind(2) <= embedding.abs().max() * 2.0**-7).all(), "what bf16 has taken off comes as well"


def test_few_bytes_cross(sums: Sums) -> None:
    sums.begin()
    sums.push(1, {0: draw(0)})
    sums.end()
    assert sums.spread.engines[OWNER].nbytes <= 1.05 * WIDE + 64, "a read is of whole lines"


def test_what_is_abandoned_neither_arrives_nor_takes_anything_along(sums: Sums) -> None:
    """A minibatch is given up before, during and after its sums are read."""
    gradient = torch.full((WIDE,), 0.002)
    gradient[0] = 1.0
    for epoch in range(60):
        sums.begin()
        given_up = epoch % 3 == 1
        for me in (SOURCE, OTHER):
            sums.push(1, {0: torch.full((WIDE,), 100.0) if given_up else gradient}, me, last=epoch % 2 == 0)
        sums.announce()
        sums.end(abandoned=given_up)
        assert (sums.behind(1) <= 0.51 * 2 / 127).all(), epoch
    assert sums.pushed[1][9] == pytest.approx(40 * 0.004)


def test_what_is_pushed_after_the_last_push_arrives_once(sums: Sums) -> None:
    """The sum was rounded and read already: it is rounded and read anew, with the same residual in it."""
    for epoch in range(12):
        sums.begin()
        for me in (SOURCE, OTHER):
            sums.push(1, {0: draw(epoch)}, me, last=True)
        sums.announce()
        sums.push(1, {0: draw(100 + epoch)}, OTHER)
        sums.end()
        assert (sums.behind(1) <= 3 * 4.0 / 127 / 2).all(), epoch


def test_a_unit_or_a_parameter_without_a_gradient_keeps_its_residual(sums: Sums) -> None:
    """The owner reads nothing of a parameter that no rank has pushed, even if its unit crosses."""
    sums.begin()
    sums.push(0, {0: draw(0), 2: draw(1)})
    sums.push(1, {0: draw(2)})
    sums.end()
    before = [sums.behind(unit) for unit in (0, 1)]
    assert all(one.max() > 0.001 for one in before), "or this shows nothing"
    for _ in range(3):
        sums.begin()
        sums.push(0, {2: torch.zeros(WIDE)})
        sums.end()
    assert torch.equal(sums.behind(0)[:WIDE], before[0][:WIDE])
    assert torch.equal(sums.behind(1), before[1])
    for _ in range(8):  # its steps are smaller every time
        sums.begin()
        sums.push(0, {0: torch.zeros(WIDE)})
        sums.push(1, {0: torch.zeros(WIDE)})
        sums.end()
    assert sums.behind(0)[:WIDE].max() < 1e-5 and sums.behind(1).max() < 1e-5


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_an_epoch_that_overflows_does_not_spoil_those_after_it(sums: Sums, odd: float) -> None:
    """As under a GradScaler, whose step is left out then."""
    sums.begin()
    sums.push(0, {0: draw(0), 1: draw(1, 6), 2: draw(2)})
    sums.end()
    before, arrived, pushed = sums.behind(0), sums.arrived[0].clone(), sums.pushed[0].clone()
    sums.begin()
    wrong, norm = draw(3), draw(4, 6)
    wrong[2] = norm[1] = odd
    sums.push(0, {0: wrong, 1: norm, 2: draw(2)})
    came = sums.end()[0]
    assert not came[2].isfinite() and not came[WIDE + 1].isfinite(), "the owner must see it"
    finite = came.isfinite()
    sums.arrived[0], sums.pushed[0] = arrived + came.where(finite, 0), pushed + sums._now[0].where(finite, 0)
    assert torch.equal(sums.behind(0)[~finite], before[~finite])
    for _ in range(8):
        sums.begin()
        sums.push(0, {i: torch.zeros(param.numel) for i, param in enumerate(sums.units[0].params)})
        sums.end()
    assert sums.behind(0).max() < 1e-5


def test_which_parameters_cross_as_int8() -> None:
    """Matrices, and stacks of them, but neither embeddings nor a head, tied or not."""
    found = {
        "tokens": ((1000, 64), True),
        "positions": ((128, 64), True),
        "q": ((64, 64), False),
        "as many rows as positions": ((128, 64), False),
        "experts": ((8, 64, 32), False),
        "bias": ((64,), False),
        "scale": ((), False),
        "head": ((1000, 64), False),
    }
    coarse = [name for name, may in zip(found, coarse_parameters(list(found.values())), strict=True) if may]
    assert coarse == ["q", "as many rows as positions", "experts"]
    assert coarse_parameters([((4, 4), False), ((4,), False)]) == [True, False], "of a model without embeddings"


def test_where_sums_do_not_cross_nothing_is_kept() -> None:
    settings = Settings(sums_dtype="int8")
    with HeapGroup(LAYOUT, 4, settings=settings, coarse=COARSE) as one, HeapGroup(LAYOUT, 4) as plain:
        assert one.layouts[0].ledger() == plain.layouts[0].ledger()
        assert not any(name.startswith("residual") for name, _ in one.layouts[0].requests())


def test_the_ledger_shows_what_residuals_take() -> None:
    whole, rounded = Settings(), Settings(sums_dtype="int8")
    for hosts in (HOSTS, (0, 1, 2, 3)):
        with (
            HeapGroup(LAYOUT, 4, hosts=hosts, settings=whole) as plain,
            HeapGroup(LAYOUT, 4, hosts=hosts, settings=rounded, coarse=COARSE) as made,
        ):
            elements, others = sum(unit.numel for unit in made.units), len(set(hosts)) - 1
            sums = made.layouts[0].ledger()["sums"]
            # The sum and its residual in fp32; what leaves and what arrives in a byte or two an element.
            assert others * (8 + 2 * 1.03) * elements <= sums <= others * ((8 + 2 * 1.15) * elements + 6 * 64)
            assert plain.layouts[0].ledger()["sums"] <= others * (8 * elements + 6 * 64)
            regions = made.layouts[0].heap.bytes_by_name()
            assert regions["residual/0"] == regions["sums/0"]
            assert sum(made.layouts[0].ledger().values()) == sum(
                nbytes for name, nbytes in regions.items() if name != "heap/layout"
            )


def test_what_cannot_be_sent_as_int8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="sums_dtype='int8' would round the sums that reproducible=True"):
        Settings(sums_dtype="int8", reproducible=True)
    settings = Settings(sums_dtype="int8")
    with pytest.raises(UnsupportedError, match="'int8'.* is for a mesh whose shards lie on several hosts"):
        HeapGroup(LAYOUT, 2, replicas=2, hosts=HOSTS, settings=settings)
    late_heaps(monkeypatch, atomic=True)
    monkeypatch.setattr(DeferredMover, "packs", False)
    with pytest.raises(UnsupportedError, match="rank 10: .*'int8'.* by odc's kernels, and torch's copies are used"):
        HeapGroup(LAYOUT, 4, hosts=HOSTS, settings=settings)
