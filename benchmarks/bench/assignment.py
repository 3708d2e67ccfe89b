"""Input of `zerolora bench` for each peer: the cases, and the tokens to train on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """Settings of a case that are the same for every stack."""

    name: str
    base_model: str
    four_bit: bool
    recompute: bool
    rank: int
    alpha: float
    targets: list[str]
    stage: int
    bf16: bool
    batch_size: int
    length: int


@dataclass(frozen=True)
class Assignment:
    """The cases and their inputs."""

    cases: list[Case]
    texts: str
    """The .jsonl file that zerolora trains on."""
    warmup: int
    steps: int
    folder: str

    @classmethod
    def read(cls, path: Path) -> "Assignment":
        values = json.loads(path.read_text())
        return cls(**(values | {"cases": [Case(**case) for case in values["cases"]]}))

    def batches(self, case: Case) -> Any:
        """Return token ids [steps, batch, length], made from the texts by zerolora's own tokenizer."""
        import torch

        from trainer.model.random_weights import build_byte_tokenizer

        texts = [json.loads(line)["text"] for line in Path(self.texts).read_text().splitlines()]
        count = (self.warmup + self.steps) * case.batch_size
        chosen = [texts[number % len(texts)] for number in range(count)]
        ids = [row[: case.length] for row in build_byte_tokenizer()(chosen)["input_ids"]]
        return torch.tensor(ids).view(-1, case.batch_size, case.length)
