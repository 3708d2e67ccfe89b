"""The same inputs in TRL, transformers' Trainer and PEFT, and in zerolora: docs/lab/what-breaks-elsewhere.md.

    python -m venv PEER && PEER/bin/pip install trl==1.16.0 peft==0.21.2 deepspeed==0.19.8 bitsandbytes==0.50.2
    python -m tests.bench.peer_faults FOLDER PEER/bin/python [CASE ...]

Runs on a CPU. The peer's side is tests/bench/peer_cases.py, in the peer's environment. What both did is written to
docs/lab/data/peer_faults.json with the versions; other cases in that file stay as they are.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "lab" / "data" / "peer_faults.json"
PAGE = ROOT / "docs" / "lab" / "what-breaks-elsewhere.md"
MARKS = ("<!-- peers -->", "<!-- /peers -->")
CASES: dict[str, tuple[int, ...]] = {
    "other_base": (1,), "stages": (1,), "checkpointing": (2,), "four_bit": (2,), "other_ranks": (2, 1),
    "checkpoint_size": (1,), "merged_nf4": (1,), "packing": (1,), "hybrid_packing": (1,), "experts": (1,),
    "masks": (1,), "resume": (1,), "masked_packs": (1,), "unmatched_target": (1,), "resume_other_data": (1,),
}  # fmt: skip
"""Numbers of ranks of each case, one after the other in the same folder."""
COMPLAINTS: dict[str, tuple[int, str]] = {
    "other_base": (1, "an adapter of four layers on a base of two"),
    "merged_nf4": (2, "merge a QLoRA adapter; logits as in training"),
    "experts": (4, "`all-linear` on Mixtral"),
    "unmatched_target": (4, "`target_modules: [q_proj, qkv_proj]` on Llama"),
    "four_bit": (6, "NF4 base, ZeRO-3, two ranks"),
    "checkpointing": (7, "ZeRO-3 with gradient checkpointing, two ranks"),
    "stages": (8, "ZeRO-1 to 3 with DeepSpeed's WarmupLR"),
    "checkpoint_size": (11, "size of a checkpoint"),
    "resume": (12, "resume after step 2 of 4"),
    "resume_other_data": (12, "resume after records were removed"),
    "other_ranks": (13, "save on two ranks, resume on one"),
    "masks": (14, "answers only, ChatML template without generation marks"),
    "masked_packs": (14, "packs of 16 tokens, prompts of 30: no answer is left"),
    "packing": (16, "packed Llama, without flash-attn"),
    "hybrid_packing": (16, "packed Qwen3-Next, without compiled kernels"),
}
"""The complaint of the page that a case belongs to, and its input."""
DISTRIBUTED = ("stages", "checkpointing", "four_bit", "other_ranks", "checkpoint_size")
TIMEOUT_S = 900.0
PACKAGES = ("trl", "peft", "transformers", "deepspeed", "bitsandbytes", "torch")
Found = dict[str, Any]


def make_inputs(folder: Path) -> None:
    """Save tiny random models of two and four layers, a MoE model, a hybrid one, and conversations."""
    from tests.families import save_family
    from tests.mixtures import make_mixture
    from tests.runs_in_process import make_ground
    from tests.tiny import WORDS, make_model, make_tokenizer

    make_ground(folder)
    make_model(folder / "deep", layers=4)
    make_mixture(folder / "mixture", "mixtral")
    make_tokenizer(folder / "mixture")
    save_family(folder / "hybrid", "qwen3_next")
    prompt = " ".join(WORDS * 2)
    rows = [{"prompt": f"{word} {prompt}", "completion": f" {word}"} for word in WORDS * 2]
    (folder / "long_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_peer(folder: Path, python: str, case: str, ranks: int) -> Found:
    """Return what the peer's rank 0 found."""
    usual = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    started = []
    port = str(29600 + os.getpid() % 300)
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
        environment = os.environ | usual | (place if case in DISTRIBUTED else {})
        command = [python, str(ROOT / "tests" / "bench" / "peer_cases.py"), case, str(folder)]
        with (folder / f"{case}-{rank}.err").open("w") as errors:
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True))
    try:
        output = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    except subprocess.TimeoutExpired:
        for process in started:
            process.kill()
        return {"ok": False, "result": f"no result after {TIMEOUT_S:.0f} s"}
    lines = [line for line in output[0].splitlines() if line.startswith("FOUND ")]
    if not lines:
        return {"ok": False, "result": f"exit code {started[0].returncode}"}
    found: Found = json.loads(lines[-1].removeprefix("FOUND "))
    return found | {"result": found["result"].replace(f"{folder}/", "")}


def run_zerolora(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of zerolora."""
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "launcher.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


def train(folder: Path, name: str, *settings: str, ranks: int = 1) -> list[float]:
    """Train into the folder `name` and return the losses. Raises RuntimeError with the last line of a failed run."""
    base = [f"output_dir={folder / name}", "output.overwrite=delete", "training.batch_size=1", "zero.stage=2"]
    ended = run_zerolora(folder, "train", str(folder / "base.yaml"), "--num-gpus", str(ranks), *base,
                         f"training.gradient_accumulation_steps={4 // ranks}", *settings)  # fmt: skip
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("error")] or [ended.stderr[-200:]]
        raise RuntimeError(f"exit code {ended.returncode}: {lines[0]}")
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]


def other_base(folder: Path) -> Found:
    return refused(folder, "other-base", f"lora.adapter_path={folder / 'deep-adapter'}")


def stages(folder: Path) -> Found:
    for stage in (1, 2, 3):
        train(folder, f"our-stage-{stage}", f"zero.stage={stage}", "training.warmup_steps=1")
    return {"ok": True, "result": "trained at stages 1, 2 and 3"}


def other_ranks(folder: Path) -> Found:
    whole = train(folder, "our-ranks", ranks=2)
    start = f"training.resume_from_checkpoint={folder / 'our-ranks' / 'checkpoint-2'}"
    apart = max(abs(one - two) / two for one, two in zip(train(folder, "our-one", start)[-2:], whole[-2:], strict=True))
    return {"ok": apart < 1e-6, "result": f"one rank resumed; losses of steps 3 and 4 are within {apart:.1e}"}


def merged_nf4(folder: Path) -> Found:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.mixtures import store_dequantised

    merged = folder / "our-merged"
    ended = run_zerolora(folder, "merge", str(folder / "qlora"), "--output", str(merged))
    if ended.returncode:
        return {"ok": False, "result": ended.stderr[-200:]}
    plain = store_dequantised(folder / "model", folder / "dequantised", four_bit=True)
    tokens = torch.arange(3, 67)[None]

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.eval()(input_ids=tokens).logits
        return found

    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    base, after = logits(load(plain)), logits(load(merged))
    before = logits(PeftModel.from_pretrained(load(plain), str(folder / "qlora")))
    apart, moved = float((after - before).norm()), float((before - base).norm())
    return {"ok": apart < 1e-3 * moved, "result": f"logits move by {apart / moved:.1%} of what the adapter does"}


def refused(folder: Path, name: str, *settings: str) -> Found:
    """Return the error message of a run that must not start."""
    try:
        found = train(folder, name, *settings)
    except RuntimeError as error:
        return {"ok": "exit code 2" in str(error), "result": str(error).replace(f"{folder}/", "")}
    return {"ok": False, "result": f"trained {len(found)} steps"}


def masked_packs(folder: Path) -> Found:
    path = f"dataset.path={folder / 'long_prompts.jsonl'}"
    return refused(folder, "our-masked", path, "dataset.max_length=16", "dataset.packing=true")


def unmatched_target(folder: Path) -> Found:
    return refused(folder, "our-target", "lora.target_modules=[q_proj, qkv_proj]")


def resume_other_data(folder: Path) -> Found:
    shorter = folder / "shorter.jsonl"
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    shorter.write_text("".join(lines))
    train(folder, "our-grown", f"dataset.path={shorter}")
    shorter.write_text("".join(lines[:20]))
    start = f"training.resume_from_checkpoint={folder / 'our-grown' / 'checkpoint-2'}"
    return refused(folder, "our-again", f"dataset.path={shorter}", start)


def hybrid_packing(folder: Path) -> Found:
    from tests import family_cells

    work = partial(family_cells.measure, folder / "hybrid-cell", "qwen3_next", ("packed",))
    (folder / "hybrid-cell").mkdir(exist_ok=True)
    cell = family_cells.run_forked(work, TIMEOUT_S)["packed"]
    return {"ok": cell.startswith("equal"), "result": f"losses and factors, packed and alone: {cell}"}


def masks(folder: Path) -> Found:
    ended = run_zerolora(folder, "inspect", str(folder / "base.yaml"))
    line = next(line for line in ended.stdout.splitlines() if line.startswith("train:"))
    fraction = float(line.rpartition("(")[2].rstrip("%)"))
    return {"ok": 0 < fraction < 80, "result": f"{fraction:.0f}% of the tokens are trained, the answers alone"}


OURS = {
    function.__name__: function
    for function in (
        other_base, stages, other_ranks, merged_nf4, hybrid_packing, masks, masked_packs, unmatched_target,
        resume_other_data,
    )
}  # fmt: skip
"""Cases in which at least one peer fails; for the others the page names the tests."""
LIMITS = ("merged_nf4",)
"""Cases that do not hold in zerolora either, which the page says."""


def read_versions(python: str) -> dict[str, str]:
    code = f"from importlib.metadata import version; print(*map(version, {PACKAGES!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(PACKAGES, found, strict=True))


def table(cases: dict[str, Found]) -> str:
    """Return the page's table, the results where the peer or zerolora fails, and the peer's versions."""
    lines = ["| complaint | input | peer | zerolora |", "|---|---|---|---|"]
    details = []
    for name in sorted(cases, key=lambda name: COMPLAINTS[name]):
        number, shown = COMPLAINTS[name]
        peer, ours = cases[name]["peer"], cases[name]["zerolora"]
        cells = ["by tests" if found is None else "holds" if found["ok"] else "fails" for found in (peer, ours)]
        lines.append("| " + " | ".join([str(number), shown, *cells]) + " |")
        if ours is not None:
            details += ["", f"**{number}, {shown}.** Peer: `{clean(peer)}`. zerolora: `{clean(ours)}`."]
    versions = {f"{package} {number}" for case in cases.values() for package, number in case["versions"].items()}
    used = f"Versions: {', '.join(sorted(versions))}; zerolora on the same libraries."
    return "\n".join([*lines, "", used, *details])


def clean(found: Found) -> str:
    """Return a result as text between backticks."""
    text: str = found["result"]
    return text.replace("`", "").rstrip(".")


def write_page() -> None:
    """Put the table into the page, between its two marks."""
    begin, rest = PAGE.read_text().split(MARKS[0])
    end = rest.split(MARKS[1])[1]
    PAGE.write_text(f"{begin}{MARKS[0]}\n{table(json.loads(DATA.read_text()))}\n{MARKS[1]}{end}")


def write(cases: dict[str, Found]) -> None:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(cases[name], ensure_ascii=False)}" for name in sorted(cases))
    DATA.write_text(f"{{\n{lines}\n}}\n")


def main() -> None:
    folder, python, *names = sys.argv[1:]
    ground = Path(folder).resolve()
    if not (ground / "base.yaml").exists():
        ground.mkdir(parents=True, exist_ok=True)
        make_inputs(ground)
    for name in names or CASES:
        if name == "merged_nf4":
            train(ground, "qlora", "adapter=qlora", "training.learning_rate=3e-2", "training.max_steps=30")
        peer: Found = {}
        for ranks in CASES[name]:
            peer = run_peer(ground, python, name, ranks)
            print(name, ranks, peer, flush=True)
        ours = OURS[name](ground) if name in OURS else None
        print(name, "zerolora", ours, flush=True)
        known = json.loads(DATA.read_text()) if DATA.exists() else {}
        write(known | {name: {"peer": peer, "zerolora": ours, "versions": read_versions(python)}})
        write_page()


if __name__ == "__main__":
    main()
