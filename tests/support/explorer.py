"""Runs a model of the protocol through every interleaving of its actors that can make a difference.

A model is a list of steps for each actor, over shared integers. Every state is searched once. In a state where some
actor's next step commutes with all that other actors can do before it, only that step is taken (a persistent set of
one): whether it does is found by letting all others run ahead, as far as their waits let them. The words of the
protocol rise, and each has one writer, so a store and a wait for it always commute. What branches is claims, tickets,
deaths, and a read that no word orders against a write, which is a fault of the protocol.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Key = tuple[str | int, ...]
Actor = tuple[int, str]  # a rank, and one of its threads or lanes


class Step(NamedTuple):
    """One step of an actor; `verb` is the part of the protocol it belongs to.

    `do` is one of: store (key = value), wait (key >= value), equal (wait for key == other), write and read (of data; a
    read must find its value), add (atomic, to data), load (other = key) and put (key = other + value), an addition that
    is not atomic; ticket (other = key, key += 1), turn (wait for key >= other), pass (key += 1), claim (other = value
    if key < value, which it then is, else 0), die (this rank ends). With a `guard`, a key of this actor alone and its
    value, it is left out where the key has another value.
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
_NEVER = -2
_LOST = -1  # where an actor stands that has seen ABORT, or has died
_CLIENTS = frozenset({"main", "sender", "fetcher"})  # actors that an error ends


Judge = Callable[[Callable[[Key], int], set[Actor]], None]


class Violation(Exception):
    """A property of the protocol that does not hold, and the steps that led there."""


class State(NamedTuple):
    """Where every actor stands, and every shared integer."""

    at: tuple[int, ...]
    words: tuple[int, ...]


class Explorer:
    """One search. `final` judges a state in which no actor can take a step: it is given a function that reads a key,
    and the actors that have seen ABORT; it raises Violation. Actors whose names begin with one of `servers` may wait
    for ever.

    Attributes:
        states: how many were reached.
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
        users: dict[Key, set[int]] = {}
        for (rank, _), steps in program.items():
            for step in steps:
                for key in (step.key, step.other):
                    users.setdefault(key, set()).add(rank)
        self._private = {  # by rank: words that no other rank loads or stores
            rank: frozenset(key for key, ranks in users.items() if ranks == {rank} and key[0] not in ("ABORT", "DEAD"))
            for rank, _ in self.actors
        }
        self.states = 0

    def start(self) -> State:
        return State((0,) * len(self.actors), (0,) * len(self._index))

    def search(self) -> None:
        """Reach every state; raises Violation, with the steps that led to it, at the first that breaks a property."""
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

    def run(
        self, order: random.Random, frozen: Mapping[Actor, int] | None = None, late: Sequence[Actor] = ()
    ) -> Callable[[Key], int]:
        """Take steps in a random order until none is left; returns what reads a key then.

        An actor that is `frozen` stops before that step for ever; those that are `late` wait until no other can go on.
        """
        state = self.start()
        while True:
            stops = [at == (frozen or {}).get(actor, _NEVER) for actor, at in zip(self.actors, state.at, strict=True)]
            ready = [number for number, stop in enumerate(stops) if not stop and self._enabled(state, number)]
            if not ready:
                return lambda key: state.words[self._index[key]]
            early = [number for number in ready if self.actors[number] not in late]
            state = self.take(state, order.choice(early or ready))

    def take(self, state: State, number: int) -> State:
        """The state after the next step of one actor."""
        at, words = list(state.at), list(state.words)
        step = self._steps[number][at[number]]
        at[number] += 1
        if step.guard is not None and words[self._index[step.guard[0]]] != step.guard[1]:
            return State(tuple(at), state.words)
        if step.do in ("wait", "equal", "turn") and words[self._abort[number]]:
            at[number] = _LOST
            return self._forgotten(at, words, self.actors[number][0])
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
        if do == "die":
            rank = self.actors[number][0]
            at = [_LOST if actor[0] == rank else one for actor, one in zip(self.actors, at, strict=True)]
            return self._forgotten(at, words, rank)
        return State(tuple(at), tuple(words))

    def _forgotten(self, at: list[int], words: list[int], rank: int) -> State:
        """A state in which an actor is lost. Once all of its rank are, nothing loads the words of that rank alone."""
        actors = zip(self.actors, at, strict=True)
        if all(one == _LOST for (owner, name), one in actors if owner == rank and name in _CLIENTS):
            for key in self._private[rank]:
                words[self._index[key]] = 0
        return State(tuple(at), tuple(words))

    # which steps to take -----------------------------------------------------------------------------------------

    def _enabled(self, state: State, number: int) -> bool:
        at = state.at[number]
        if at in (_LOST, len(self._steps[number])):
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
            if self._commute(state, [number]):
                return [number]
        for rank in sorted({self.actors[number][0] for number in enabled}):
            group = [number for number in enabled if self.actors[number][0] == rank]
            if self._commute(state, group):
                return group
        return enabled

    def _judge(self, state: State) -> None:
        for number, (rank, name) in enumerate(self.actors):
            if state.at[number] not in (_LOST, len(self._steps[number])) and not name.startswith(self._servers):
                raise Violation(f"deadlock: {name} of rank {rank} at {self._steps[number][state.at[number]]}")
        at_end = zip(self.actors, state.at, self._dead, strict=True)
        lost = {actor for actor, at, dead in at_end if at == _LOST and not state.words[dead]}
        self._final(lambda key: state.words[self._index[key]], lost)

    def _commutes_at_once(self, state: State, number: int) -> bool:
        """As `_commute`, without a look at the others."""
        step, rank = self._steps[number][state.at[number]], self.actors[number][0]
        if step.key in self._private[rank] and step.do in _SYNC and step.key not in self._taken:
            return True
        if step.do in _SYNC:
            return rank not in self._mortal and step.key not in self._taken and step.key[0] != "ABORT"
        return step.do in _WAITS and (not self._aborts or bool(state.words[self._abort[number]]))

    def _commute(self, state: State, group: list[int]) -> bool:
        """Whether the next steps of a group commute with every step that others can take before one of them."""
        for other, ahead in self._ahead(state, group):
            for number in group:
                step, rank = self._steps[number][state.at[number]], self.actors[number][0]
                if self._conflict(step, ahead, rank) or self._conflict(ahead, step, self.actors[other][0]):
                    return False
                if self.actors[other][0] == rank and (self._ends(step, ahead) or self._ends(ahead, step)):
                    return False
        return True

    def _ends(self, step: Step, other: Step) -> bool:
        """Whether `step` is the death that keeps its rank from `other`, which another rank would see."""
        if step.do != "die" or other.do in _WAITS or other.do in ("equal", "read", "load"):
            return False
        return other.key not in self._private[int(step.key[1])]

    def _ahead(self, state: State, without: list[int]) -> Iterator[tuple[int, Step]]:
        """Every step that other actors can take while those stand, and perhaps some that they cannot."""
        words, at = list(state.words), list(state.at)
        moved = True
        while moved:
            moved = False
            for number, steps in enumerate(self._steps):
                if number in without or at[number] == _LOST:
                    continue
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
