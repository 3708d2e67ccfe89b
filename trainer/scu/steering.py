"""Start the Shannon Control Unit of a run, with the reference documents of `scu.measure: kl`.

These are the user's texts, or samples from the base model, drawn before the first step, unconditionally and at
temperature 1. On them, K is the extra cost of coding the base's own text with the adapter. They are kept in the run's
folder for resumed runs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from trainer.config import RunConfig, UserError
from trainer.data.prepared import Prepared
from trainer.data.samples import Sample, Samples
from trainer.model.adapter import count_parameters
from trainer.parallel.engine.layer_gather.shards import find_layer_shards
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, gather_objects, run_on_main
from trainer.patches.loss_head import TokenLoss, bypass_adapter
from trainer.scu.controller import Steering
from trainer.scu.divergence import REFERENCE_FILE, BaseStates, Divergence, Reference

SAMPLES, LENGTH, SAMPLE_BATCH, MIN_LENGTH = 512, 128, 64, 8
MAX_AUTO_CACHE_BYTES = 2**30


@dataclass(frozen=True)
class SteeringInputs:
    """Inputs for building the controller of a run."""

    config: RunConfig
    prepared: Prepared
    ranks: Ranks
    engine: Engine
    token_loss: TokenLoss
    flat: bool
    """Whether packs are a single row of all their documents."""
    total_steps: int
    """Optimizer steps of the whole run, so that a resumed run makes the same choices."""
    step: int
    """Optimizer steps already taken."""
    say: Callable[[str], None]


def start_steering(
    inputs: SteeringInputs, restored: dict[str, Any] | None, run_dir: Path
) -> tuple[Steering, list[str]]:
    """Build the controller after optimizer step `inputs.step`; return it with warnings. A collective call.

    `restored` is its state in the checkpoint, `run_dir` holds its records of earlier steps. Raises UserError for
    settings that cannot work.
    """
    scu, step = inputs.config.scu, inputs.step
    steering = Steering(
        scu,
        inputs.engine.module,
        target_tokens=inputs.prepared.data.stats.target_tokens,
        total_steps=inputs.total_steps,
        base_parameters=count_parameters(inputs.engine.module)[1],
        divergence=build_divergence(inputs) if scu.measure == "kl" else None,
    )
    if restored:
        return steering, steering.load_state_dict(restored, step=step, run_dir=run_dir)
    if step:
        return steering, ["scu.enabled=true: the checkpoint has no controller; it starts over"]
    return steering, []


def build_divergence(inputs: SteeringInputs) -> Divergence:
    """Build the measurement of K on the user's texts or the base's samples; a collective call."""
    config, prepared, ranks, engine, say = inputs.config, inputs.prepared, inputs.ranks, inputs.engine, inputs.say
    training, scu = config.training, config.scu
    documents: Samples | list[Sample] | None = prepared.reference
    if documents is None:
        documents = base_samples(engine, prepared.tokenizer, config, resumes=inputs.step > 0, ranks=ranks)
    texts = [documents[index] for index in range(len(documents))]
    reference_length = sum(len(text.input_ids) for text in texts) / len(texts)
    length, stats = reference_length, prepared.data.stats
    if isinstance(prepared.data.train, Samples):
        length = stats.tokens / len(prepared.data.train)
    wanted = scu.reference_share * training.batch_size * training.gradient_accumulation_steps
    reference = Reference(
        texts,
        rows=min(max(1, round(wanted * length / reference_length)), max(1, len(texts) // ranks.world_size)),
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.seed,
        pad_token_id=prepared.tokenizer.pad_token_id,
        packed=config.dataset.packing,
        flat=inputs.flat,
    )
    source = "the base's own samples" if prepared.reference is None else escape(str(scu.reference))
    say(f"scu: {reference.rows} of {len(texts):,} reference texts per rank and step, {source}")
    if prepared.reference is None:
        say("scu: other texts may diverge more from the base than its own samples: set scu.reference to such texts")
    states, visits = None, inputs.total_steps * reference.rows
    base = engine.module.get_base_model()
    width = base.config.get_text_config().hidden_size * base.dtype.itemsize
    size = width * sum(len(text.input_ids) - 1 for text in texts)
    pays = size <= MAX_AUTO_CACHE_BYTES and visits >= 2 * len(texts)
    if pays if scu.reference_cache == "auto" else scu.reference_cache:
        states = BaseStates.compute(engine, inputs.token_loss, reference)
        kept = f"cached on the host, {size / 2**20:,.0f} MiB per rank: no forward pass of the base in a step"
        say(f"scu: the base's hidden states are {kept if states else 'not cached: this head needs full logits'}")
    return Divergence(
        engine,
        inputs.token_loss,
        reference,
        drawn=texts if prepared.reference is None else (),
        base_states=states,
    )


def base_samples(engine: Engine, tokenizer: Any, config: RunConfig, *, resumes: bool, ranks: Ranks) -> list[Sample]:
    """Return the base's unconditional samples: drawn on every rank, those of rank 0 used; a collective call.

    Raises UserError if a resumed run has lost them.
    """
    path = Path(config.output_dir) / REFERENCE_FILE

    def read() -> list[list[int]]:
        # A run resumed in another folder reads them from the folder of the checkpoint's run.
        earlier = Path(str(config.training.resume_from_checkpoint)).parent / REFERENCE_FILE
        written = [each for each in (path, earlier) if each.exists()]
        if not written:
            raise UserError(f"{path}: missing, so the run cannot resume exactly; set scu.reference, or start over")
        found: list[list[int]] = json.loads(written[0].read_text(encoding="utf-8"))
        return found

    if resumes:
        found = run_on_main(ranks, read)
    else:
        found = gather_objects(_sample_base(engine, tokenizer, min(LENGTH, config.dataset.max_length), config.seed))[0]
    return [Sample(ids, [True] * len(ids), [len(ids)]) for ids in found]


@torch.no_grad()
def _sample_base(engine: Engine, tokenizer: Any, length: int, seed: int) -> list[list[int]]:
    model = engine.module
    first = next(token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if token is not None)
    devices = [engine.device] if engine.device.type == "cuda" else []
    was_training = model.training
    model.eval()
    drawn: list[list[int]] = []
    # The RNG states of training (of dropout) must not depend on these samples.
    with torch.random.fork_rng(devices), bypass_adapter(model):
        torch.manual_seed(seed)
        for _ in range(SAMPLES // SAMPLE_BATCH):
            start = torch.full((SAMPLE_BATCH, 1), first, device=engine.device)
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
                # Under ZeRO-3 forward passes are collective: no rank may stop generating before the others.
                synced_gpus=engine.zero_optimization_stage() == 3 or find_layer_shards(model) is not None,
            )
            drawn += [_truncate_after(row, tokenizer.eos_token_id) for row in rows.tolist()]
    model.train(was_training)
    long_enough = [ids for ids in drawn if len(ids) >= min(MIN_LENGTH, length)]
    if not long_enough:
        raise UserError("scu.reference: the base model generates no text from an empty prompt; set it to a text file")
    return long_enough


def _truncate_after(ids: list[int], end: int | None) -> list[int]:
    return ids[: ids.index(end, 1) + 1] if end is not None and end in ids[1:] else ids
