"""Tasks of lm-eval from local files: multiple choice, generation and perplexity of the words of tests/tiny.py."""

import json
import random
from pathlib import Path

import yaml

from tests.tiny import WORDS

TASKS: dict[str, dict[str, object]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "num_fewshot": 1,
        "fewshot_split": "train",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 12},
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True},
            {"metric": "chrf", "aggregation": "chrf", "higher_is_better": True},
        ],
    },
    "roll": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


def write_tasks(folder: Path, count: int = 7) -> list[str]:
    """Write the tasks and their data, and return the paths of their YAML files."""
    draw, records = random.Random(3), []
    for _ in range(count + 3):
        words = [draw.choice(WORDS) for _ in range(draw.randint(2, 6))]
        answer = " " + " ".join(reversed(words))
        # Two choices of one token share their context, which lm-eval computes once.
        choices = [answer, " red", " blue", " " + " ".join(words)]
        records.append({"question": " ".join(words), "answer": answer, "choices": choices, "label": draw.randrange(4)})
    files = {"train": folder / "task-train.jsonl", "test": folder / "task-test.jsonl"}
    for split, part in (("train", records[:3]), ("test", records[3:])):
        files[split].write_text("".join(json.dumps(record) + "\n" for record in part))
    paths = []
    for name, task in TASKS.items():
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
        }
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump({"task": name, "test_split": "test", **data, **task}))
    return list(map(str, paths))
