"""Twin of odc/fsdp/last.py."""

from __future__ import annotations

from odc.fsdp.last import LastPushes


def backward(last: LastPushes, units: list[int], *, marked: bool) -> list[int]:
    """A forward and a backward that pushes these units; those whose last push it was."""
    last.forward()
    return [unit for unit in units if last.pushed(unit, marked)]


def test_only_a_marked_backward_has_last_pushes() -> None:
    last = LastPushes(3)
    for _ in range(2):
        last.begin()
        assert backward(last, [2, 1, 0], marked=False) == []
        assert backward(last, [2, 0], marked=True) == [2, 0]


def test_a_unit_that_pushes_twice_ends_with_the_second_push() -> None:
    last = LastPushes(2)
    last.begin()
    assert backward(last, [1, 0, 1], marked=True) == [1, 0], "it could not be known yet"
    for _ in range(2):
        last.begin()
        assert backward(last, [1, 0, 1], marked=True) == [0, 1]
    last.begin()
    assert backward(last, [1, 0], marked=True) == [0], "the end of the minibatch shows it of unit 1"
    assert last._trusted


def test_a_loop_without_a_forward_of_the_root_has_last_pushes_in_every_minibatch() -> None:
    """It runs units below the root only."""
    last = LastPushes(2)
    for _ in range(3):
        last.begin()
        assert [last.pushed(unit, True) for unit in (1, 0)] == [True, True]


def test_marks_that_proved_wrong_are_ignored() -> None:
    last = LastPushes(2)
    last.begin()
    assert backward(last, [1, 0], marked=True) == [1, 0]
    assert backward(last, [1, 0], marked=True) == []
    last.begin()
    assert backward(last, [1, 0], marked=True) == []
