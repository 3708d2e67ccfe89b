"""Compute the common prompt of a pair only once.

A pair becomes two documents in a flat batch, (prompt, chosen answer) and (last prompt token, rejected answer).
The second document's positions continue the prompt's, and its tokens also attend to the prompt's keys and values.
The last token of the prompt is repeated because it predicts the first token of both answers.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from trainer.data.samples import Sample, Samples, split_documents

MIN_SAVINGS = 0.1
"""Minimum fraction of tokens that sharing must save with `share_prompt: auto`. Below it, sharing may cost more than it
saves, because it copies keys and values, and attention must process documents of uneven lengths."""
_MEASURED_SAMPLES = 1000


def count_shared_tokens(chosen: Sample, rejected: Sample) -> int:
    answer = next((at for at, weight in enumerate(rejected.loss_weights) if weight), len(rejected.loss_weights))
    shortest = max(0, min(answer - 1, len(chosen.input_ids)))
    equal = np.asarray(chosen.input_ids[:shortest]) == np.asarray(rejected.input_ids[:shortest])
    return shortest if equal.all() else int(equal.argmin())


def share_prompts(documents: Sequence[Sample]) -> tuple[list[Sample], list[int]]:
    """Remove shared prefixes from rejected documents; return all documents and the lengths of the removed prefixes."""
    shortened, shared_lengths = [], []
    for chosen, rejected in zip(documents[::2], documents[1::2], strict=True):
        at = count_shared_tokens(chosen, rejected)
        remainder = Sample(rejected.input_ids[at:], rejected.loss_weights[at:], [len(rejected.input_ids) - at])
        shortened += [chosen, remainder]
        shared_lengths += [0, at]
    return shortened, shared_lengths


def build_shared_key_arguments(lengths: Sequence[int], shared_lengths: Sequence[int]) -> dict[str, Any]:
    """Return the arguments to `varlen_attention` for shared keys; empty if nothing is shared.

    Document i, with `lengths[i]` tokens, also attends to the first `shared_lengths[i]` keys of document i - 1.
    """
    if not any(shared_lengths):
        return {}
    starts = [0, *accumulate(lengths)]
    parts = []
    for number, (length, common) in enumerate(zip(lengths, shared_lengths, strict=True)):
        previous, start = starts[max(0, number - 1)], starts[number]
        parts += [np.arange(previous, previous + common), np.arange(start, start + length)]
    counts = [length + common for length, common in zip(lengths, shared_lengths, strict=True)]
    return {
        "key_index": torch.from_numpy(np.concatenate(parts)),
        "key_seqlens": torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        "max_seqlen": max(counts),
    }


def measure_savings(samples: Samples | Sequence[Sample]) -> float:
    """Return the fraction of the pairs' tokens saved by sharing, measured on up to 1,000 evenly spaced samples."""
    saved = total = 0
    for index in np.unique(np.linspace(0, len(samples) - 1, _MEASURED_SAMPLES, dtype=int)).tolist():
        saved += sum(share_prompts(list(split_documents(samples[index])))[1])
        total += len(samples[index].input_ids)
    return saved / max(total, 1)
