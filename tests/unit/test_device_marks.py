"""Which of its marks a device has come to, on events of the test: tests/gpu/test_device_marks.py has real ones."""

import pytest
import torch

from trainer.parallel.ranks.progress import Progress
from trainer.parallel.ranks.watchdog import EVENT_COUNT, DeviceEvents


class Card:
    """A card that comes to what is recorded while it is free, and fails where the test says."""

    def __init__(self) -> None:
        self.device, self.is_free, self.fails, self.capturing = 1, True, False, False

    def event(self) -> "Event":
        return Event(self)

    def asked(self) -> bool:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.capturing


class Event:
    """As torch.cuda.Event."""

    def __init__(self, card: Card) -> None:
        self._card, self._is_there = card, False

    def record(self) -> None:
        self._is_there = self._card.is_free

    def query(self) -> bool:
        self._card.asked()
        return self._is_there


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: card.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", card.asked)
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    return card


def test_the_last_mark_that_was_reached_is_told(card: Card) -> None:
    marks = DeviceEvents()
    marks.record(0)
    assert marks.find_last_reached_event() is None, "before the first step a rank may be on another card"
    for _ in range(EVENT_COUNT + 3):
        marks.record(4)
    assert marks.find_last_reached_event() == EVENT_COUNT + 3
    card.is_free = False
    marks.record(5)
    marks.record(5)
    assert marks.find_last_reached_event() == EVENT_COUNT + 3
    for _ in range(EVENT_COUNT):
        marks.record(6)
    assert marks.find_last_reached_event() == 0, "of none that is left"


def test_what_a_card_refuses_ends_no_step(card: Card) -> None:
    marks = DeviceEvents()
    marks.record(1)
    card.device = 0
    marks.record(1)
    card.device, card.capturing = 1, True
    marks.record(1)
    assert marks.find_last_reached_event() == 1
    card.fails = True
    marks.record(1)
    assert marks.find_last_reached_event() is None


def test_phases_that_every_rank_has_are_marked() -> None:
    """Others, such as those of rank 0 alone, would make the numbers differ."""
    progress, noted = Progress(), list[int]()
    progress.record_device_event = noted.append
    progress.begin_step(3)
    for name in ("data", "backward", "reduce", "optimizer step", "save", "generate"):
        with progress.phase(name):
            pass
    assert noted == [3, 3, 3, 3]
