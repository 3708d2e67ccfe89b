"""Which adapter the code around a model with several adapters means: one of them, or each of them for its own rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

DEFAULT = "default"
"""PEFT's name of the adapter of a run alone, under which all files have their tensors."""
ATTRIBUTE = "adapter_choice"


@dataclass
class AdapterChoice:
    """The adapters of a model, and those of the current pass."""

    names: Sequence[str]
    selected: str | None = None
    """The adapter of all rows, and the only one with listed tensors; None: those of `bundles`, and of all."""
    bundles: Sequence[tuple[Sequence[str], int]] = ()
    """Adapters of a common pass that are computed together, and the tokens of each, in the order of their rows."""
    kinds: dict[str, int] = field(default_factory=dict)
    """By adapter, all but the values of its factors; equal adapters with equal rows are computed together."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Factors [P, *shape] of the latest common pass, in its graph, by the name of the first adapter's of a bundle."""
    draws: dict[str, int] = field(default_factory=dict)
    """Dropout masks that a pass needs, by adapter."""
    seeds: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Seeds of the masks of the common pass, by adapter."""
    _random: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """Select an adapter within the block, which also has the random numbers of a run alone."""
        before, self.selected = self.selected, name
        outside = _random_states()
        if name in self._random:
            _set_random_states(self._random[name])
        try:
            yield
        finally:
            self._random[name], self.selected = _random_states(), before
            _set_random_states(outside)

    def seed(self, name: str, seed: int) -> None:
        """Give an adapter the random numbers of `seed` from now on."""
        with self.only(name):
            torch.manual_seed(seed)

    @contextmanager
    def common(self, rows: Sequence[tuple[str, int]], device: torch.device) -> Iterator[None]:
        """Compute each adapter's rows with it within the block, and recompute them so in the backward pass.

        `rows` are the (adapter, tokens) of the batch in their order.
        """
        before, self.selected = self.selected, None
        groups = groupby(rows, lambda row: (row[1], self.kinds[row[0]]))
        self.bundles = [([name for name, _ in group], tokens) for (tokens, _), group in groups]
        for name, _ in rows:
            if self.draws.get(name):
                with self.only(name):  # as many and in the order of a run alone
                    self.seeds[name] = [torch.randint(0, 2**62, (1,), device=device) for _ in range(self.draws[name])]
        try:
            yield
        finally:
            self.selected = before

    def in_file(self, name: str) -> str | None:
        """Return a factor's name as that of a run alone; None if another adapter than this one is selected."""
        if self.selected is None:
            return name
        end = f".{self.selected}.weight"
        return f"{name.removesuffix(end)}.{DEFAULT}.weight" if name.endswith(end) else None


def find_choice(model: Any) -> AdapterChoice | None:
    """Return the choice among a model's adapters; None if it has one or none."""
    return getattr(model, ATTRIBUTE, None)


def _random_states() -> tuple[torch.Tensor, ...]:
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state()) if torch.cuda.is_available() else states


def _set_random_states(states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
