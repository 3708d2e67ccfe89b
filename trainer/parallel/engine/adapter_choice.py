"""Select one of several adapters, or assign the rows of a batch to adapters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

DEFAULT = "default"
"""PEFT's name for a run's only adapter; tensors in files always use this name."""
ATTRIBUTE = "adapter_choice"


@dataclass
class AdapterChoice:
    """The adapters of a model, and the selection for the current pass."""

    names: Sequence[str]
    selected: str | None = None
    """Adapter for all rows; only its tensors are listed. If None, all tensors are listed; see `row_groups`."""
    row_groups: Sequence[tuple[Sequence[str], int]] = ()
    """Groups of adapters that a common pass computes together, with the tokens per adapter, in row order."""
    layouts: dict[str, int] = field(default_factory=dict)
    """Index of each adapter's layout; adjacent adapters with equal layout and token count are computed together."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Factors [P, *shape] in the graph of the latest common pass, by the name of the first adapter's factor."""
    dropout_counts: dict[str, int] = field(default_factory=dict)
    """Number of dropout masks per pass, by adapter."""
    dropout_seeds: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Seeds for the dropout masks of the common pass, by adapter."""
    _random_states: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @contextmanager
    def select(self, name: str) -> Iterator[None]:
        """Within the block, select an adapter and its own random state, as if it were trained in a separate run."""
        previous, self.selected = self.selected, name
        outside = _read_random_states()
        if name in self._random_states:
            _set_random_states(self._random_states[name])
        try:
            yield
        finally:
            self._random_states[name], self.selected = _read_random_states(), previous
            _set_random_states(outside)

    def seed(self, name: str, seed: int) -> None:
        with self.select(name):
            torch.manual_seed(seed)

    @contextmanager
    def assign_rows(self, rows: Sequence[tuple[str, int]], device: torch.device) -> Iterator[None]:
        """Compute each row of the batch with its assigned adapter within the block.

        `rows` lists (adapter, tokens) in the order of the batch. The assignment stays set after the block, because
        gradient checkpointing recomputes the pass later.
        """
        previous, self.selected = self.selected, None
        groups = groupby(rows, lambda row: (row[1], self.layouts[row[0]]))
        self.row_groups = [([name for name, _ in group], tokens) for (tokens, _), group in groups]
        for name, _ in rows:
            if count := self.dropout_counts.get(name):
                with self.select(name):  # the number and order of draws match a separate run
                    self.dropout_seeds[name] = [torch.randint(0, 2**62, (1,), device=device) for _ in range(count)]
        try:
            yield
        finally:
            self.selected = previous

    def get_saved_name(self, name: str) -> str | None:
        """Return a factor's name in a single-adapter file; None if the factor's adapter is not selected."""
        if self.selected is None:
            return name
        end = f".{self.selected}.weight"
        return f"{name.removesuffix(end)}.{DEFAULT}.weight" if name.endswith(end) else None


def find_choice(model: Any) -> AdapterChoice | None:
    """Return the model's AdapterChoice; None if it has at most one adapter."""
    return getattr(model, ATTRIBUTE, None)


def _read_random_states() -> tuple[torch.Tensor, ...]:
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state()) if torch.cuda.is_available() else states


def _set_random_states(states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
