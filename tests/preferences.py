"""Pairs of answers, and the plain way to train on them: PEFT, one answer at a time, losses as the papers have them."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, logsigmoid

from tests.plain_peft import train_steps, with_adapter
from tests.runs_in_process import make_ground
from tests.tiny import WORDS
from trainer.config import RunConfig
from trainer.data.samples import Sample, split_documents
from trainer.model.base import load_base_model
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare

Formula = Callable[[Any, Any, Any, Any, int, int, float], torch.Tensor]
"""log p and log p_ref of the chosen and the rejected answer, their numbers of tokens, beta."""


def make_pairs_ground(folder: Path, count: int, held_out: int) -> Path:
    """`make_ground` with ragged pairs for training and held-out ones."""
    make_ground(folder)
    write_pairs(folder / "train.jsonl", count)
    write_pairs(folder / "held_out.jsonl", held_out, seed=1)
    return folder


def read_metric(folder: Path, name: str) -> list[float]:
    """Values of a metric of a run, step by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def write_pairs(path: Path, count: int, *, seed: int = 0) -> Path:
    """Ragged pairs: the chosen answer has the question's words in reverse, the rejected one any words."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            words = [draw.choice(WORDS) for _ in range(draw.randint(2, 8))]
            ask = {"role": "user", "content": " ".join(words)}
            others = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 9)))
            answers = {"chosen": " ".join(reversed(words)), "rejected": others + " never"}
            turns = {side: [ask, {"role": "assistant", "content": text}] for side, text in answers.items()}
            file.write(json.dumps(turns) + "\n")
    return path


def write_answers(path: Path, count: int, *, good: int = 1, seed: int = 3) -> Path:
    """Write ragged labeled answers; `good` of three are good."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            prompt, completion = (" ".join(draw.choices(WORDS, k=draw.randint(2, 8))) for _ in range(2))
            file.write(json.dumps({"prompt": prompt, "completion": completion, "label": number % 3 < good}) + "\n")
    return path


def _odds(log_p: torch.Tensor) -> torch.Tensor:
    p = log_p.double().exp()
    return torch.log(p / (1 - p))


FORMULAS: dict[str, Formula] = {
    "dpo": lambda c, r, rc, rr, n, m, b: -logsigmoid(b * ((c - rc) - (r - rr))),
    "hinge": lambda c, r, rc, rr, n, m, b: (1 - b * ((c - rc) - (r - rr))).clamp(min=0),
    "ipo": lambda c, r, rc, rr, n, m, b: ((c - rc) / n - (r - rr) / m - 1 / (2 * b)) ** 2,
    "nca_pair": lambda c, r, rc, rr, n, m, b: (
        -logsigmoid(b * (c - rc)) - logsigmoid(b * (rc - c)) / 2 - logsigmoid(b * (rr - r)) / 2
    ),
    "bco_pair": lambda c, r, rc, rr, n, m, b: -logsigmoid(b * (c - rc)) - logsigmoid(b * (rr - r)),
    "sppo_hard": lambda c, r, rc, rr, n, m, b: (c - rc - 1 / (2 * b)) ** 2 + (r - rr + 1 / (2 * b)) ** 2,
    "apo_zero": lambda c, r, rc, rr, n, m, b: 1 - torch.sigmoid(b * (c - rc)) + torch.sigmoid(b * (r - rr)),
    "apo_down": lambda c, r, rc, rr, n, m, b: (
        torch.sigmoid(b * (c - rc)) + 1 - torch.sigmoid(b * ((c - rc) - (r - rr)))
    ),
    "cpo": lambda c, r, rc, rr, n, m, b: -logsigmoid(b * (c - r)) - c / n,
    "simpo": lambda c, r, rc, rr, n, m, b: -logsigmoid(b * (c / n - r / m) - 0.5),
    "orpo": lambda c, r, rc, rr, n, m, b: -c / n - b * logsigmoid(_odds(c / n) - _odds(r / m)),
    "sft": lambda c, r, rc, rr, n, m, b: -c / n,
}


def plain_preference_losses(config: RunConfig, name: str, *, ranks: int = 1) -> tuple[list[float], dict[str, Any]]:
    """Loss per pair at each step of `config`, and the trained factors by name; `wpo` is DPO with WPO's weights."""
    formula, beta = FORMULAS[name.replace("wpo", "dpo")], config.preference.beta
    prepared = prepare(config)
    device = torch.device("cpu")
    model = load_base_model(config.base_model, config.model, dtype=torch.float32, device=device, attention="sdpa")
    set_seed(config.seed)
    model = with_adapter(model, config, None, [])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = []
    for samples in train_steps(trained, config, prepared, ranks=ranks):
        documents = [document for sample in samples for document in split_documents(sample)]
        pairs = list(zip(documents[::2], documents[1::2], strict=True))
        total = 0.0
        for chosen, rejected in pairs:
            (c, n), (r, m) = log_p(model, chosen), log_p(model, rejected)
            with torch.no_grad(), model.disable_adapter():
                (reference_c, _), (reference_r, _) = log_p(model, chosen), log_p(model, rejected)
            loss = formula(c, r, reference_c, reference_r, n, m, beta)
            if name == "wpo":
                loss = loss * wpo_weight(model, chosen) * wpo_weight(model, rejected)
            (loss / len(pairs)).backward()
            total += loss.item()
        losses.append(total / len(pairs))
    return losses, {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}


def log_p(model: Any, document: Sample) -> tuple[torch.Tensor, int]:
    """log p of the trained tokens of one document, and their number."""
    logits, wanted = answer_logits(model, document)
    return -cross_entropy(logits, wanted, reduction="sum"), len(wanted)


def answer_logits(model: Any, document: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [K, V] and ids [K] of the trained tokens of one document."""
    ids = torch.tensor([document.input_ids])
    trained = torch.tensor(document.loss_weights[1:]) > 0
    return model(input_ids=ids, use_cache=False).logits[0, :-1][trained].float(), ids[0, 1:][trained]


@torch.no_grad()
def wpo_weight(model: Any, document: Sample) -> torch.Tensor:
    """Equation 2 of Zhou et al. 2024 for one answer, per token."""
    logits, wanted = answer_logits(model, document)
    p = logits.softmax(1)
    aligned: torch.Tensor = p.gather(1, wanted[:, None])[:, 0] / p.square().sum(1)
    return aligned.log().mean().exp()


LN_2 = math.log(2)
