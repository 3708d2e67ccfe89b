"""The reference documents of a run with `scu.measure: kl`: how many a step takes, and the base's own samples.

The base's samples are drawn from it before the first step, from its first token on at temperature 1. On them, K is what
the adapter costs whoever codes the base's own text with it. They lie in the run's folder, so that a resumed run goes on
with the very same.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.markup import escape

from trainer.config import RunConfig, UserError
from trainer.data.prepared import Prepared
from trainer.data.samples import Sample, Samples
from trainer.parallel.engine.layer_gather.shards import layer_shards_of
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.patches.loss_head import TokenLoss, adapter_off
from trainer.scu.divergence import REFERENCE_FILE, BaseStates, Divergence, Reference
from trainer.scu.fit import FEWEST, keep_apart

SAMPLES, LENGTH, AT_A_TIME, SHORTEST = 512, 128, 64, 8
MOST_STATES = 2**30
AT_ONCE = 8
"""Texts kept apart that are measured together."""


@dataclass(frozen=True)
class SteeringInputs:
    """What a run has when its controller begins."""

    config: RunConfig
    prepared: Prepared
    ranks: Ranks
    engine: Engine
    token_loss: TokenLoss
    flat: bool
    """Packs are one row of all their documents."""
    packed: bool
    """The training text takes the reference texts into its pack."""
    total_steps: int
    """Optimizer steps of the whole run, so that one that goes on decides as it did at first."""
    step: int
    """Optimizer steps that have been taken."""
    say: Callable[[str], None]


def divergence_of(given: SteeringInputs) -> Divergence:
    """What measures K in this run, on texts of the user's or on the base's own samples; every rank must call it."""
    config, prepared, ranks, engine, say = given.config, given.prepared, given.ranks, given.engine, given.say
    training, scu = config.training, config.scu
    documents: Samples | list[Sample] | None = prepared.reference
    if documents is None:
        documents = base_samples(engine, prepared.tokenizer, config, resumes=given.step > 0, ranks=ranks)
    everything = [documents[index] for index in range(len(documents))]
    fits = scu.controller == "pi" and scu.scale_to_target
    texts, apart = keep_apart(everything) if fits else (everything, [])
    theirs = sum(len(text.input_ids) for text in texts) / len(texts)
    stats = prepared.data.stats
    ours = stats.tokens / len(prepared.data.train) if isinstance(prepared.data.train, Samples) else theirs
    wanted = scu.reference_share * training.batch_size * training.gradient_accumulation_steps
    made_of = partial(
        Reference,
        rows=min(max(1, round(wanted * ours / theirs)), max(1, len(texts) // ranks.world_size)),
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.seed,
        pad_token_id=prepared.tokenizer.pad_token_id,
        packed=config.dataset.packing,
        flat=given.flat,
    )
    reference = made_of(texts)
    whose = "the base's own samples" if prepared.reference is None else escape(str(scu.reference))
    say(f"scu: {reference.rows} of {len(texts):,} reference texts a rank and step, {whose}")
    if prepared.reference is None:
        say("scu: other texts may move further from the base than its samples do: name such in scu.reference")
    if fits and not apart:
        say(f"scu: too few reference texts to keep some apart, fewer than {FEWEST}: scu.scale_to_target does nothing")
    states, visits = None, given.total_steps * reference.rows
    if _pays(scu.reference_cache, size := _bytes_of_states(engine, texts), visits, len(texts)):
        states = BaseStates.compute(engine, given.token_loss, reference)
        kept = f"kept on the host, {size / 2**20:,.0f} MiB a rank: it makes no forward pass in a step"
        say(f"scu: the base's hidden states are {kept if states else 'not kept: this head needs whole logits'}")
    return Divergence(
        engine,
        given.token_loss,
        reference,
        drawn=everything if prepared.reference is None else (),
        base_states=states,
        packed=given.packed,
        kept=made_of(apart, rows=AT_ONCE) if apart else None,
    )


def _pays(wanted: Literal["auto"] | bool, size: int, visits: int, texts: int) -> bool:
    return size <= MOST_STATES and visits >= 2 * texts if wanted == "auto" else wanted


def _bytes_of_states(engine: Engine, texts: list[Sample]) -> int:
    base = engine.module.get_base_model()
    width: int = base.config.get_text_config().hidden_size
    return sum(len(text.input_ids) - 1 for text in texts) * width * base.dtype.itemsize


def base_samples(engine: Engine, tokenizer: Any, config: RunConfig, *, resumes: bool, ranks: Ranks) -> list[Sample]:
    """What the base says when nothing is asked: drawn on every rank, rank 0's kept; every rank must call it.

    Raises UserError if a run that goes on has lost them.
    """
    path = Path(config.output_dir) / REFERENCE_FILE
    found: list[Any] = [None]
    if resumes and ranks.is_main:
        # A run that goes on in another folder has them where the checkpoint's run has.
        beside = Path(str(config.training.resume_from_checkpoint)).parent / REFERENCE_FILE
        written = [each for each in (path, beside) if each.exists()]
        found = [json.loads(written[0].read_text(encoding="utf-8")) if written else None]
    if ranks.world_size > 1:
        dist.broadcast_object_list(found, src=0, device=engine.device)
    if found[0] is None:
        if resumes:
            raise UserError(f"{path}: missing, and the run cannot go on to the bit; set scu.reference, or start over")
        found = [_draw(engine, tokenizer, min(LENGTH, config.dataset.max_length), config.seed)]
        if ranks.world_size > 1:
            dist.broadcast_object_list(found, src=0, device=engine.device)
    return [Sample(ids, [True] * len(ids), [len(ids)]) for ids in found[0]]


@torch.no_grad()
def _draw(engine: Engine, tokenizer: Any, length: int, seed: int) -> list[list[int]]:
    model = engine.module
    first = next(token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if token is not None)
    devices = [engine.device] if engine.device.type == "cuda" else []
    was_training = model.training
    model.eval()
    drawn: list[list[int]] = []
    # The draws of training, dropout's say, are not to depend on these.
    with torch.random.fork_rng(devices), adapter_off(model):
        torch.manual_seed(seed)
        for _ in range(SAMPLES // AT_A_TIME):
            start = torch.full((AT_A_TIME, 1), first, device=engine.device)
            rows = model.generate(
                input_ids=start,
                attention_mask=torch.ones_like(start),
                max_new_tokens=length - 1,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                use_cache=True,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                # Under ZeRO-3 every forward pass gathers: no rank may stop generating before the others.
                synced_gpus=engine.zero_optimization_stage() == 3 or layer_shards_of(model) is not None,
            )
            drawn += [_until_its_end(row, tokenizer.eos_token_id) for row in rows.tolist()]
    model.train(was_training)
    long_enough = [ids for ids in drawn if len(ids) >= min(SHORTEST, length)]
    if not long_enough:
        raise UserError("scu.reference: the base says nothing when nothing is asked; name a file of texts")
    return long_enough


def _until_its_end(ids: list[int], end: int | None) -> list[int]:
    return ids[: ids.index(end, 1) + 1] if end is not None and end in ids[1:] else ids
