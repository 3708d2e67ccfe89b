"""Held-out losses of tests/bench/qat_experiment.sh: `python -m tests.bench.qat_quality RUNS [--documents N]`.

RUNS holds KIND-SEED, run folders of `plain`, `int8` and `int4` (what training.qat was), each with merged models in it:
`merged` and `merged-int8`, `merged-int4`. A line for each form that is served: the held-out loss of the plain run
rounded afterwards and of the run trained for it, and their difference with a 95 % interval by Student's t over
the seeds. transformers loads every model from its folder, as a server does.
"""

import argparse
import statistics
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.bench.eight_bit_quality import interval
from trainer.checkpoint.finished_run import choose_default_device, find_run, load_saved_tokenizer, silence_libraries
from trainer.commands.evaluate import compute_row_losses, load_held_out_samples
from trainer.data.batches import collate_samples
from trainer.data.samples import split_documents


def held_out_loss(run_dir: Path, folder: str, documents: int) -> float:
    """Nats per target token of a merged model on what its run held out."""
    run = find_run(run_dir)
    tokenizer = load_saved_tokenizer(run)
    samples, _ = load_held_out_samples(run, tokenizer, None, None)
    held_out = [document for sample in samples for document in split_documents(sample)][:documents]
    model = AutoModelForCausalLM.from_pretrained(run_dir / folder, dtype="auto").to(choose_default_device()).eval()
    total, targets = 0.0, 0
    for document in held_out:
        batch = collate_samples([document], tokenizer.pad_token_id, packed=False, flat=False)
        total += float(compute_row_losses(model, batch).sum())
        targets += batch.target_count
    return total / targets


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--documents", type=int, default=10**6)
    arguments = parser.parse_args()
    silence_libraries()
    torch.set_grad_enabled(False)
    plain = {folder.name.partition("-")[2]: folder for folder in sorted(arguments.runs.glob("plain-*/"))}
    unrounded = {seed: held_out_loss(folder, "merged", arguments.documents) for seed, folder in plain.items()}
    print(f"plain, 16 or 32 bits: {statistics.mean(unrounded.values()):.4f} ({len(unrounded)} seeds)", flush=True)
    print(f"{'served':6} {'rounded afterwards':>18} {'trained for it':>14}   difference, nats")
    for kind in ("int8", "int4"):
        trained = {seed: arguments.runs / f"{kind}-{seed}" for seed in plain}
        seeds = [seed for seed, folder in trained.items() if folder.is_dir()]
        if not seeds:
            continue
        after = [held_out_loss(plain[seed], f"merged-{kind}", arguments.documents) for seed in seeds]
        with_it = [held_out_loss(trained[seed], f"merged-{kind}", arguments.documents) for seed in seeds]
        difference = interval([b - a for a, b in zip(after, with_it, strict=True)])
        print(f"{kind:6} {statistics.mean(after):18.4f} {statistics.mean(with_it):14.4f}   {difference}", flush=True)


if __name__ == "__main__":
    main()
