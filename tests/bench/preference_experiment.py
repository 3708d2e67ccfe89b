"""The experiment of docs/lab/preference.md: preferences that a program can check, trained on SmolLM2's real weights.

python -m tests.bench.preference_experiment FOLDER MODEL [--seeds 1,2,3] [--parallel 8] [--steps 150]
A prompt names two to four facts. Chosen is their shortest JSON, rejected is the same JSON on indented lines, alone or
after a sentence. Each seed trains dpo and sft together (RPO) with five betas, which only measure the divergence K,
and with the default beta under the Shannon Control Unit with two targets of K. All measure K on one reference text.
An answer wins if it is JSON with exactly the facts asked for, and the base's answer is longer or is not such JSON.
Answers are greedy, by transformers and PEFT. Runs that are in FOLDER already are kept.
"""

import argparse
import copy
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FACTS: dict[str, tuple[object, ...]] = {
    "name": ("Ann", "Bruno", "Chen", "Dora", "Emil", "Fatima", "Goro", "Hana", "Ivan", "Jola", "Karim", "Lena"),
    "city": ("Rome", "Lagos", "Lima", "Oslo", "Kyoto", "Quito", "Delhi", "Porto", "Cairo", "Turin", "Perth", "Dakar"),
    "age": tuple(range(18, 80)),
    "color": ("red", "blue", "green", "black", "white", "orange", "violet", "grey"),
    "score": tuple(range(100, 1000)),
    "animal": ("cat", "dog", "owl", "fox", "horse", "otter", "goose", "hare"),
}
LEADS = ("", "Here is the JSON:\n\n", "Sure! This is the JSON that you asked for:\n\n")
BETAS = (0.03, 0.1, 0.3, 1.0, 3.0)
TARGETS = (0.02, 0.05)


def pair(draw: random.Random) -> dict[str, object]:
    facts = {name: draw.choice(FACTS[name]) for name in draw.sample(sorted(FACTS), draw.randint(2, 4))}
    asked = "Write as JSON: " + ", ".join(f"{name} is {value}" for name, value in facts.items()) + "."
    rejected = draw.choice(LEADS) + json.dumps(facts, indent=2)
    answers = {"chosen": json.dumps(facts, separators=(",", ":")), "rejected": rejected}
    turns = {key: [{"role": "assistant", "content": text}] for key, text in answers.items()}
    return {"prompt": [{"role": "user", "content": asked}], **turns}


def write_pairs(folder: Path) -> None:
    draw, seen = random.Random(0), set()
    rows: list[str] = []
    while len(rows) < 640:
        row = json.dumps(pair(draw))
        asked = row[: row.index('"chosen"')]
        if asked not in seen:
            seen.add(asked)
            rows.append(row + "\n")
    (folder / "train.jsonl").write_text("".join(rows[:512]))
    (folder / "eval.jsonl").write_text("".join(rows[512:]))


def plan(folder: Path, model: str, seed: int, steps: int) -> dict[str, dict[str, Any]]:
    """The settings of every run of a seed, by the run's name."""
    usual = {
        "base_model": model, "task": "preference", "preference.loss": {"dpo": 1.0, "sft": 1.0}, "seed": seed,
        "lora.r": 16, "lora.alpha": 32,
        "lora.target_modules": "all-linear", "dataset.path": str(folder / "train.jsonl"),
        "dataset.evaluation.path": str(folder / "eval.jsonl"), "dataset.max_length": 512,
        "dataset.cache_dir": str(folder / "cache"), "training.batch_size": 16, "training.eval_batch_size": 64,
        "training.max_steps": steps, "training.learning_rate": 1e-4, "training.lr_scheduler": "cosine",
        "training.warmup_ratio": 0.1, "training.eval_steps": steps, "training.save_steps": 0,
        "training.logging_steps": 1, "logging.report_to": "none", "scu.enabled": True, "scu.measure": "kl",
        "scu.reference": str(folder / "texts" / "prose" / "reference.jsonl"),
    }  # fmt: skip
    runs = {f"beta-{beta:g}": {"preference.beta": beta, "scu.controller": "none"} for beta in BETAS}
    runs |= {f"scu-{target:g}": {"preference.beta": 0.1, "scu.target": target} for target in TARGETS}
    return {f"{name}-{seed}": usual | changes for name, changes in runs.items()}


def train(folder: Path, runs: dict[str, dict[str, Any]], parallel: int) -> None:
    """Run what is not finished, `parallel` at a time. Raises SystemExit if one fails."""
    waiting = [name for name in runs if not (folder / name / "adapter_model.safetensors").exists()]
    going: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or going:
        while waiting and len(going) < parallel:
            name = waiting.pop(0)
            (folder / f"{name}.yaml").write_text("{}\n")
            given = [f"{key}={json.dumps(value)}" for key, value in runs[name].items()]
            command = [sys.executable, "-m", "launcher.cli", "train", str(folder / f"{name}.yaml"), *given,
                       f"output_dir={folder / name}", "output.overwrite=delete"]  # fmt: skip
            with (folder / f"{name}.log").open("w") as log:
                going[name] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        time.sleep(0.5)
        for name in [name for name, process in going.items() if process.poll() is not None]:
            if going.pop(name).returncode:
                sys.exit(f"{name} failed:\n" + (folder / f"{name}.log").read_text()[-2000:])


def answers(model: Any, tokenizer: Any, asked: list[str], batch: int = 128) -> list[str]:
    """The greedy answer to each prompt."""
    found: list[str] = []
    for begin in range(0, len(asked), batch):
        given = tokenizer(asked[begin : begin + batch], return_tensors="pt", padding=True, add_special_tokens=False)
        made = model.generate(**given.to(model.device), max_new_tokens=96, do_sample=False)
        found += tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def is_right(answer: str, wanted: object) -> bool:
    try:
        return json.loads(answer) == wanted
    except ValueError:
        return False


def win_rates(folder: Path, location: str, names: list[str]) -> dict[str, float]:
    """Return the fraction of answers that win, for every run, and as `base` how often the base is right."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(location, padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(location, dtype=torch.bfloat16).to(device).eval()
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    asked = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    wanted = [json.loads(row["chosen"][0]["content"]) for row in rows]
    before = answers(base, tokenizer, asked)
    found = {"base": statistics.mean(is_right(text, facts) for text, facts in zip(before, wanted, strict=True))}
    for name in names:
        model = PeftModel.from_pretrained(copy.deepcopy(base), str(folder / name)).merge_and_unload()
        after = answers(model, tokenizer, asked)
        won = [
            is_right(new, facts) and (not is_right(old, facts) or len(new) < len(old))
            for new, old, facts in zip(after, before, wanted, strict=True)
        ]
        found[name] = statistics.mean(won)
        (folder / name / "answers.json").write_text(json.dumps(after, indent=1))
    return found


def figures(run: Path, beta: float) -> dict[str, float]:
    """Held-out accuracy and margin in nats without beta, and K in bits a token: the mean of the last 20 steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "eval/rewards/margins" in line)
    bits = [line["scu/kl_bits"] for line in lines if "scu/kl_bits" in line][-20:]
    margin = last["eval/rewards/margins"] / beta
    return {"accuracy": last["eval/rewards/accuracies"], "margin": margin, "kl_bits": statistics.mean(bits)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--no-answers", action="store_true")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_pairs(folder)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = dict(itertools.chain.from_iterable(plan(folder, options.model, s, options.steps).items() for s in seeds))
    train(folder, runs, options.parallel)
    found = {name: figures(folder / name, float(runs[name]["preference.beta"])) for name in runs}
    (folder / "figures.json").write_text(json.dumps({"runs": found}, indent=1))
    won = {} if options.no_answers else win_rates(folder, options.model, list(runs))
    for name, values in found.items():
        values["win_rate"] = won.get(name, float("nan"))
    (folder / "figures.json").write_text(json.dumps({"base_right": won.get("base"), "runs": found}, indent=1))
    print(f"base: right JSON in {won.get('base')} of the held-out prompts")
    for kind in dict.fromkeys(name.rpartition("-")[0] for name in found):
        rows = [found[f"{kind}-{seed}"] for seed in seeds]
        shown = (f"{key} " + " ".join(f"{row[key]:.4g}" for row in rows) for key in rows[0])
        print(f"{kind:10} " + " | ".join(shown))


if __name__ == "__main__":
    main()
