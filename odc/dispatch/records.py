"""What each example consists of: its subsequences, their modality and length, in order (OrchMLLM, section 6).

All ranks must list the same encoders in the same order, because records number them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from odc.dispatch.rearrangement import Ints
from odc.errors import PlanError

TEXT = "text"
_COLUMNS = 4


@dataclass(frozen=True, eq=False)
class Records:
    """The examples of one instance, p subsequences in all. Immutable.

    Subsequences of an example are listed in the order in which the LLM sees them.
    """

    examples: int
    example: Ints  # int64 [p] the slot of the example that a subsequence belongs to, never falling
    phase: Ints  # int64 [p] 0 for text, else 1 + the encoder's place in the list of encoders
    length: Ints  # int64 [p] tokens that enter the encoder; of text its tokens
    tokens: Ints  # int64 [p] tokens that enter the LLM: length after the connector's downsampling; of text its tokens

    @classmethod
    def of(
        cls, examples: Sequence[Sequence[tuple[str, int] | tuple[str, int, int]]], encoders: Sequence[str]
    ) -> Records:
        """Records of examples given as lists of (TEXT, tokens) and (encoder, length, tokens), in order.

        Raises PlanError for an encoder that is not listed.
        """
        place = {TEXT: 0, **{name: 1 + k for k, name in enumerate(encoders)}}
        rows = []
        for slot, parts in enumerate(examples):
            for name, length, *tokens in parts:
                if name not in place:
                    raise PlanError(f"example {slot} has a part {name!r}; the phases are {', '.join(place)}")
                rows.append((slot, place[name], length, tokens[0] if tokens else length))
        table = np.array(rows).reshape(-1, _COLUMNS)
        return cls(len(examples), *table.T)

    @classmethod
    def joined(cls, records: Sequence[Records]) -> Records:
        """Records of all instances as one table, examples counted through."""
        starts = np.cumsum([0, *(record.examples for record in records)])
        example = np.concatenate([record.example + at for record, at in zip(records, starts, strict=False)])
        columns = [np.concatenate([getattr(r, name) for r in records]) for name in ("phase", "length", "tokens")]
        return cls(int(starts[-1]), example, *columns)

    def check(self, instance: int, longest: Sequence[int | None]) -> Records:
        """The same as int64; raises PlanError, naming the instance and the example, for what no plan may hold.

        `longest` caps the LLM's whole sequence, then each encoder's subsequences.
        """
        columns = [np.asarray(column) for column in (self.example, self.phase, self.length, self.tokens)]
        self._check_shape(instance, columns, len(longest))
        _, phase, length, tokens = columns
        for values, what, least in ((length, "length", 1), (tokens, "number of tokens", 0)):
            whole = np.isfinite(values) & (values == np.floor(values)) if values.dtype.kind == "f" else np.True_
            self._refuse(instance, ~(whole & (values >= least)), values, f"{what}; it is a whole number >= {least}")
        for k, cap in enumerate(longest[1:], 1):
            if cap is not None:
                self._refuse(instance, (phase == k) & (length > cap), length, f"length, more than the cap of {cap}")
        if (tokens != length)[phase == 0].any():
            raise PlanError(f"instance {instance}: the length of text is its number of tokens")
        known = Records(self.examples, *(column.astype(np.int64) for column in columns))
        whole_lengths = known.sequence_lengths()
        cap = longest[0]
        for slot in np.flatnonzero((whole_lengths < 1) | (whole_lengths > (cap or np.iinfo(np.int64).max))).tolist():
            wrong = f"more than the cap of {cap}" if whole_lengths[slot] else "every example needs at least one"
            raise PlanError(f"instance {instance}: example {slot} has {whole_lengths[slot]} tokens; {wrong}")
        return known

    def _check_shape(self, instance: int, columns: list[np.ndarray], phases: int) -> None:
        if len({column.shape for column in columns}) > 1 or columns[0].ndim != 1:
            raise PlanError(f"instance {instance}: the columns of its records differ in length")
        if any(column.size and column.dtype.kind not in "iuf" for column in columns):
            raise PlanError(f"instance {instance}: records hold numbers, got {[str(c.dtype) for c in columns]}")
        example, phase = columns[:2]
        if not len(example):
            if self.examples:
                raise PlanError(f"instance {instance}: example 0 has no tokens at all")
            return
        if (np.diff(example) < 0).any() or not (example[0] >= 0 and example[-1] < self.examples):
            raise PlanError(f"instance {instance}: the examples of its records must rise from 0 to {self.examples - 1}")
        if not np.isin(phase, np.arange(phases)).all():
            raise PlanError(f"instance {instance}: a phase of its records is none of 0 to {phases - 1}")

    def _refuse(self, instance: int, bad: np.ndarray, values: np.ndarray, why: str) -> None:
        for i in np.flatnonzero(bad).tolist():
            raise PlanError(
                f"instance {instance}: part {i}, of example {int(self.example[i])}, has {values[i].item()} as its {why}"
            )

    def sequence_lengths(self) -> Ints:
        """[examples] tokens of each interleaved sequence: what the LLM phase is balanced on."""
        return self._by_example(self.tokens)

    def text_tokens(self) -> Ints:
        """[examples] text tokens of each."""
        return self._by_example(np.where(self.phase == 0, self.tokens, 0))

    def _by_example(self, values: Ints) -> Ints:
        return np.bincount(self.example, weights=values, minlength=self.examples).astype(np.int64)

    def to_array(self) -> Ints:
        """int64 [1 + 4 p]: what is gathered, of records that `check` gave; `from_array` gives them back."""
        return np.concatenate([[self.examples], self.example, self.phase, self.length, self.tokens])

    @classmethod
    def from_array(cls, values: ArrayLike) -> Records:
        """Records from `to_array`."""
        known = np.asarray(values, np.int64)
        return cls(int(known[0]), *known[1:].reshape(_COLUMNS, -1))
