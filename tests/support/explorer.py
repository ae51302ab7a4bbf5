"""Runs a model of the protocol through every interleaving of its actors that can make a difference.

A model is a list of steps for each actor, over shared integers. Every state is searched once. In a state where some
actor's next step commutes with all that other actors can do before it, only that step is taken (a persistent set of
one): whether it does is found by letting all others run ahead, as far as their waits let them. The words of the protocol
rise, and each has one writer, so a store and a wait for it always commute; what branches is claims, tickets, deaths, and
a read that no word orders against a write, which is a fault of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Key = tuple[str | int, ...]
Actor = tuple[int, str]  # a rank, and one of its threads or lanes


class Step(NamedTuple):
    """One step of an actor; `verb` is the part of the protocol it belongs to.

    `do` is one of: store (key = value), wait (key >= value), equal (wait for key == other), write and read (data that no
    store may reorder; a read must find its value), add (atomic, to data), load (other = key) and put (key = other +
    value), an addition that is not atomic; ticket (other = key, key += 1), turn (wait for key >= other), pass (key += 1),
    claim (other = value if key < value, which it then is, else 0), die (this rank ends). With a `guard`, a key of
    this actor alone and its value, it is left out where the key has another value.
    """

    verb: str
    do: str
    key: Key
    value: int = 0
    other: Key = ()
    guard: tuple[Key, int] | None = None


Program = dict[Actor, list[Step]]
_SYNC = frozenset({"store", "pass"})  # commute with the waits that they end
_WAITS = frozenset({"wait", "turn"})
_WRITES = frozenset({"write", "put", "die"})
_TAKES = frozenset({"ticket", "claim"})  # read and write in one step
_LOST = -1  # where an actor stands that has seen ABORT


Judge = Callable[[Callable[[Key], int], set[Actor]], None]


class Violation(Exception):
    """A property of the protocol that does not hold, and the steps that led there."""


class State(NamedTuple):
    """Where every actor stands, and every shared integer."""

    at: tuple[int, ...]
    words: tuple[int, ...]


class Explorer:
    """One search. `final` judges a state in which no actor can take a step: it is given a function that reads a key, and
    the actors that have seen ABORT; it raises Violation. Actors whose names begin with one of `servers` may wait for
    ever.

    Attributes:
        states: how many were visited.
    """

    def __init__(self, program: Program, servers: Sequence[str], final: Judge) -> None:
        self.actors = list(program)
        self._steps = [program[actor] for actor in self.actors]
        self._servers, self._final = tuple(servers), final
        keys: dict[Key, int] = {}
        for steps in self._steps:
            for step in steps:
                for key in (step.key, step.other, step.guard[0] if step.guard else ()):
                    keys.setdefault(key, len(keys))
        for rank, _ in self.actors:
            keys.setdefault(("ABORT", rank), len(keys))
            keys.setdefault(("DEAD", rank), len(keys))
        self._index = keys
        self._abort = [keys["ABORT", rank] for rank, _ in self.actors]
        self._dead = [keys["DEAD", rank] for rank, _ in self.actors]
        every = [step for steps in self._steps for step in steps]
        self._mortal = {rank for (rank, _), steps in program.items() if any(step.do == "die" for step in steps)}
        self._aborts = bool(self._mortal)
        self._taken = {step.key for step in every if step.do in _TAKES or step.do in ("load", "equal")}
        self._taken |= {step.other for step in every if step.do == "equal"}
        self.states = 0

    def start(self) -> State:
        return State((0,) * len(self.actors), (0,) * len(self._index))

    def search(self) -> None:
        """Visit every state; raises Violation, with the steps that led to it, at the first that breaks a property."""
        seen, path = set[State](), list[tuple[State, Iterator[int]]]()
        trace: list[Step] = []
        state: State | None = self.start()
        try:
            while True:
                if state is not None and state not in seen:
                    seen.add(state)
                    path.append((state, iter(self._choices(state))))
                elif trace:
                    trace.pop()
                number = next(path[-1][1], None)
                while number is None:
                    path.pop()
                    if not path:
                        return
                    trace.pop()
                    number = next(path[-1][1], None)
                before = path[-1][0]
                trace.append(self._steps[number][before.at[number]])
                state = self.take(before, number)
        except Violation as error:
            raise Violation(f"{error}\n" + "\n".join(map(str, trace[-25:]))) from None
        finally:
            self.states = len(seen)

    def run(self, frozen: Mapping[Actor, int]) -> State:
        """Take steps in some order until none is left; an actor that is `frozen` stops before that step for ever."""
        state = self.start()
        while True:
            for number, actor in enumerate(self.actors):
                stops = state.at[number] == frozen.get(actor, -2)
                if not stops and self._enabled(state, number):
                    state = self.take(state, number)
                    break
            else:
                return state

    def take(self, state: State, number: int) -> State:
        """The state after the next step of one actor."""
        at, words = list(state.at), list(state.words)
        step = self._steps[number][at[number]]
        at[number] += 1
        if step.guard is not None and words[self._index[step.guard[0]]] != step.guard[1]:
            return State(tuple(at), state.words)
        if step.do in ("wait", "equal", "turn") and words[self._abort[number]]:
            at[number] = _LOST
            return State(tuple(at), state.words)
        key, other, do = self._index[step.key], self._index[step.other], step.do
        if do == "read":
            if words[key] != step.value:
                found = f"{step.verb} of {self.actors[number]} reads {step.key}: {words[key]}, not {step.value}"
                raise Violation(found)
        elif do in ("store", "write", "die"):
            words[key] = step.value
        elif do == "add":
            words[key] += step.value
        elif do == "load":
            words[other] = words[key]
        elif do == "put":
            words[key] = words[other] + step.value
        elif do == "pass":
            words[key] += 1
        elif do == "ticket":
            words[other], words[key] = words[key], words[key] + 1
        elif do == "claim":
            words[other] = step.value if words[key] < step.value else 0
            words[key] = max(words[key], step.value)
        return State(tuple(at), tuple(words))

    # which steps to take -----------------------------------------------------------------------------------------

    def _enabled(self, state: State, number: int) -> bool:
        at = state.at[number]
        if at == _LOST or at == len(self._steps[number]) or state.words[self._dead[number]]:
            return False
        step = self._steps[number][at]
        return bool(state.words[self._abort[number]]) or self._passes(step, state.words)

    def _passes(self, step: Step, words: Sequence[int]) -> bool:
        if step.guard is not None and words[self._index[step.guard[0]]] != step.guard[1]:
            return True
        found = words[self._index[step.key]]
        if step.do == "wait":
            return found >= step.value
        if step.do == "turn":
            return found >= words[self._index[step.other]]
        return step.do != "equal" or found == words[self._index[step.other]]

    def _choices(self, state: State) -> list[int]:
        enabled = [number for number in range(len(self.actors)) if self._enabled(state, number)]
        if not enabled:
            self._judge(state)
        for number in enabled:
            if self._commutes_at_once(state, number):
                return [number]
        for number in enabled:
            if self._commutes(state, number):
                return [number]
        return enabled

    def _judge(self, state: State) -> None:
        for number, (rank, name) in enumerate(self.actors):
            over = state.at[number] in (_LOST, len(self._steps[number])) or state.words[self._dead[number]]
            if not over and not name.startswith(self._servers):
                raise Violation(f"deadlock: {name} of rank {rank} at {self._steps[number][state.at[number]]}")
        lost = {actor for actor, at in zip(self.actors, state.at, strict=True) if at == _LOST}
        self._final(lambda key: state.words[self._index[key]], lost)

    def _commutes_at_once(self, state: State, number: int) -> bool:
        """As `_commutes`, without a look at the others."""
        step = self._steps[number][state.at[number]]
        if self.actors[number][0] in self._mortal:
            return False
        if step.do in _SYNC:
            return step.key not in self._taken and step.key[0] != "ABORT"
        if step.do == "load":
            return False
        return step.do in _WAITS and (not self._aborts or bool(state.words[self._abort[number]]))

    def _commutes(self, state: State, number: int) -> bool:
        """Whether the actor's next step commutes with every step that others can take before it."""
        rank = self.actors[number][0]
        step = self._steps[number][state.at[number]]
        for other, ahead in self._ahead(state, number):
            if ahead.do == "die" and self.actors[other][0] == rank or step.do == "die" and self.actors[other][0] == rank:
                return False
            if self._conflict(step, ahead, rank) or self._conflict(ahead, step, self.actors[other][0]):
                return False
        return True

    def _ahead(self, state: State, without: int) -> Iterator[tuple[int, Step]]:
        """Every step that other actors can take while one stands, and perhaps some that they cannot."""
        words, at = list(state.words), list(state.at)
        moved = True
        while moved:
            moved = False
            for number in range(len(self.actors)):
                if number == without or at[number] == _LOST or state.words[self._dead[number]]:
                    continue
                steps = self._steps[number]
                while at[number] < len(steps):
                    step = steps[at[number]]
                    least = state.words[self._index[step.other]] if step.do == "equal" else step.value
                    if step.do in ("wait", "equal") and words[self._index[step.key]] < least:
                        break
                    at[number] += 1
                    moved = True
                    yield number, step
                    if step.do in ("store", "die"):
                        key = self._index[step.key]
                        words[key] = max(words[key], step.value)

    def _conflict(self, step: Step, other: Step, rank: int) -> bool:
        """Whether `step`, of `rank`, may come to something else after `other`."""
        if step.do in ("wait", "equal", "turn") and other.key == ("ABORT", rank):
            return True
        touched = {step.key, step.other} if step.do == "equal" else {step.key}
        if other.key not in touched:
            return False
        if step.do in _WAITS or other.do in _WAITS:
            return False  # words rise
        if step.do == "add":
            return other.do != "add"
        return step.do != "read" or other.do != "read"
