"""Speed and memory of preference training next to SFT on the same tokens, on one GPU.

python -m tests.gpu.preference_speed [--shape random:llama3.1-8b] [--cases dpo] [key=value ...]     a table comes last
Pairs of 2 x 1,024 tokens, 768 of them answers, in packs of 2,048; then prompts of 1,024 tokens with answers of 512.
Compare the latter by the time of a step: a shared prompt counts once in tokens per second.
"""

import argparse
import json
import random
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

PROMPT, ANSWER = 256, 767  # and the end-of-text token
LONG_PROMPT, SHORT_ANSWER = 1024, 511
CASES: dict[str, dict[str, object]] = {
    "sft": {},
    "dpo, reference in the step": {"task": "preference"},
    "dpo, cached reference": {"task": "preference", "preference.reference": "cached"},
    "simpo": {"task": "preference", "preference.loss": "simpo", "preference.beta": 2.0},
}
CASES |= {
    f"dpo, long prompts, share {share}": {
        "task": "preference", "preference.share_prompt": share,
        "dataset.max_length": 2 * (LONG_PROMPT + SHORT_ANSWER + 1),
    }
    for share in (False, True)
}  # fmt: skip


def text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=length))


def write_data(folder: Path, pairs: int) -> None:
    draw = random.Random(0)
    sizes = {"pairs.jsonl": (PROMPT, ANSWER), "long.jsonl": (LONG_PROMPT, SHORT_ANSWER)}
    with (folder / "texts.jsonl").open("w") as alone:
        for name, (start, rest) in sizes.items():
            with (folder / name).open("w") as both:
                for _ in range(pairs):
                    prompt, chosen, rejected = text(draw, start), text(draw, rest), text(draw, rest)
                    both.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
                    for answer in (chosen, rejected) if name == "pairs.jsonl" else ():
                        alone.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")


def measure(folder: Path, name: str, shape: str, changes: dict[str, object], more: list[str]) -> tuple[float, ...]:
    """Tokens per second, milliseconds per step and peak GiB after the warm-up."""
    run = folder / name.replace(" ", "-").replace(",", "")
    data = "long.jsonl" if "long" in name else "pairs.jsonl" if "task" in changes else "texts.jsonl"
    settings = {
        "base_model": shape, "output_dir": str(run), "dataset.path": str(folder / data), "dataset.packing": True,
        "dataset.max_length": 2048, "dataset.cache_dir": str(folder / "cache"), "training.batch_size": 1,
        "training.max_steps": 14, "training.save_steps": 0, "training.logging_steps": 1, "training.precision": "bf16",
        "training.learning_rate": 1e-5, "logging.report_to": "none", "lora.r": 16, **changes,
    }  # fmt: skip
    (folder / f"{run.name}.yaml").write_text("{}\n")
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "launcher.cli", "train", str(folder / f"{run.name}.yaml"), *given, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/tokens_per_second" in line][5:]
    print(name, [round(line["train/loss"], 4) for line in lines if "train/loss" in line][:3], flush=True)
    tokens, step_ms = (median(line[key] for line in steps) for key in ("perf/tokens_per_second", "perf/step_ms"))
    return tokens, step_ms, max(line["memory/peak_gib"] for line in steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="random:llama3.1-8b")
    parser.add_argument("--cases", default="", help="those after SFT with this in their names")
    arguments, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_data(folder, 40)
        cases = {name: changes for name, changes in CASES.items() if name == "sft" or arguments.cases in name}
        found = {name: measure(folder, name, arguments.shape, changes, more) for name, changes in cases.items()}
    rate, _, peak = found["sft"]
    for name, (tokens, step_ms, gib) in found.items():
        print(f"{name:30} {tokens:9,.0f} tokens/s  {tokens / rate:.3f} of SFT  {step_ms:7.1f} ms per step", end="")
        print(f"  {gib:6.2f} GiB  {gib / peak:.3f} of SFT")


if __name__ == "__main__":
    main()
