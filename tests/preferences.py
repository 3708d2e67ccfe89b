"""Pairs of answers, and the plain way to train on them: PEFT, one answer at a time, losses as the papers have them."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, logsigmoid

from tests.plain_peft import with_adapter
from tests.tiny import WORDS
from trainer.config import RunConfig
from trainer.data import Batches, Sample, Samples
from trainer.data.samples import split_documents
from trainer.model.base import load_base_model
from trainer.parallel.engine.optimizer import build_schedule
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare

Formula = Callable[[Any, Any, Any, Any, int, int, float], torch.Tensor]
"""log p and log p_ref of the chosen and the rejected answer, their numbers of tokens, beta."""


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
    """Write ragged labelled answers; `good` of three are good."""
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
    """Loss per pair at each step of `config`, and the trained factors by name."""
    training, formula, beta = config.training, FORMULAS[name], config.preference.beta
    prepared = prepare(config)
    device = torch.device("cpu")
    model = load_base_model(config.base_model, config.model, dtype=torch.float32, device=device, attention="sdpa")
    set_seed(config.seed)
    model = with_adapter(model, config, None, [])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=training.learning_rate, weight_decay=training.weight_decay)
    assert training.max_steps is not None and isinstance(prepared.data.train, Samples)
    schedule = build_schedule(optimizer, training, training.max_steps)
    batches = Batches(
        prepared.data.train, batch_size=training.batch_size, accumulation=training.gradient_accumulation_steps * ranks,
        rank=0, world_size=1, seed=config.seed, shuffle=config.dataset.shuffle, pad_token_id=0, flat=False,
    )  # fmt: skip
    losses, epoch, offset = [], 0, 0
    for _ in range(training.max_steps):
        indices = batches.order(epoch)[offset : offset + batches.global_batch_size].tolist()
        documents = [document for index in indices for document in split_documents(prepared.data.train[index])]
        pairs = list(zip(documents[::2], documents[1::2], strict=True))
        total = 0.0
        for chosen, rejected in pairs:
            (c, n), (r, m) = log_p(model, chosen), log_p(model, rejected)
            with torch.no_grad(), model.disable_adapter():
                (reference_c, _), (reference_r, _) = log_p(model, chosen), log_p(model, rejected)
            loss = formula(c, r, reference_c, reference_r, n, m, beta)
            (loss / len(pairs)).backward()
            total += loss.item()
        losses.append(total / len(pairs))
        torch.nn.utils.clip_grad_norm_(trained, training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        offset += len(indices)
        if offset >= len(prepared.data.train):
            epoch, offset = epoch + 1, 0
    return losses, {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}


def log_p(model: Any, document: Sample) -> tuple[torch.Tensor, int]:
    """log p of the trained tokens of one document, and their number."""
    ids = torch.tensor([document.input_ids])
    wanted = torch.where(torch.tensor([document.trained]) > 0, ids, -100)[:, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return -cross_entropy(logits[0].float(), wanted[0], ignore_index=-100, reduction="sum"), int((wanted != -100).sum())


LN_2 = math.log(2)
