"""Pairs that share their prompt have the losses and gradients of pairs that compute it twice."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ops.head import LOSS
from tests.preferences import LN_2, write_pairs
from tests.runs_in_process import make_ground, train
from tests.unit.test_packing_probe import CPU, EXPERTS, LLAMA, model_of
from trainer.commands.inspect import main as inspect
from trainer.config import UserError, load_config
from trainer.data.batches import PairBatch, collate_samples
from trainer.data.samples import Sample, join_samples
from trainer.data.shared_prompts import build_shared_key_arguments, count_shared_tokens, measure_savings
from trainer.patches.loss_head import TokenLoss
from trainer.patches.packed_attention import VARLEN
from trainer.patches.packing_probe import share_prompt_keys

GEMMA: dict[str, Any] = {
    "intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", LLAMA),
    ("mistral", LLAMA | {"sliding_window": 6}),
    ("gemma3_text", GEMMA),
    ("mixtral", EXPERTS),
]


def pair(draw: random.Random, prompt: int, chosen: int, rejected: int) -> Sample:
    """A pair of random tokens, with these numbers of tokens."""
    start = [draw.randrange(1, 64) for _ in range(prompt)]
    answers = [[draw.randrange(1, 64) for _ in range(count)] for count in (chosen, rejected)]
    documents = [
        Sample(start + answer, [False] * prompt + [True] * len(answer), [prompt + len(answer)]) for answer in answers
    ]
    return join_samples(documents)


@pytest.fixture
def pairs() -> list[Sample]:
    """Ragged pairs, packs of them, a prompt of one token, and answers shorter than a window."""
    draw = random.Random(0)
    sizes = [(9, 4, 7), (1, 3, 2), (14, 1, 1), (2, 12, 9)]
    first, *others = [pair(draw, *each) for each in sizes]
    return [join_samples([first, others[0]]), *others[1:]]


def losses_and_gradients(model: Any, samples: list[Sample], *, shared: bool) -> tuple[torch.Tensor, ...]:
    batch = collate_samples(samples, 0, packed=True, flat=False, pairs=True, shared=shared)
    found = TokenLoss(model).measure_by_token(model, batch, CPU)[LOSS]
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (found * weights).sum().backward()
    return found.detach(), *(parameter.grad.clone() for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(("name", "settings"), MODELS)
def test_losses_and_gradients_are_equal(
    name: str, settings: dict[str, Any], reentrant: bool | None, pairs: list[Sample]
) -> None:
    model = model_of(name, **settings).train()
    for parameter in model.parameters():  # so that attention matters
        parameter.data *= 4.0 if parameter.dim() > 1 else 1.0
    alone = losses_and_gradients(model, pairs, shared=False)
    assert share_prompt_keys(TokenLoss(model), model, 0, CPU) is None
    assert model.config._attn_implementation == VARLEN
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    together = losses_and_gradients(model, pairs, shared=True)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt_oss", EXPERTS | {"head_dim": 8}),
        ("gemma2", LLAMA | {"head_dim": 8}),
        ("nemotron", {"intermediate_size": 48, "num_key_value_heads": 2}),
        ("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2}),
        ("bloom", {}),
        (
            "llama4_text",
            LLAMA | {"attention_chunk_size": 16, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
        ),
    ],
)
def test_other_models_are_left_as_they_are(name: str, settings: dict[str, Any]) -> None:
    """Sinks, a soft cap, dropped bounds, a recurrent state, distances instead of positions, chunks."""
    model = model_of(name, **settings)
    before = model.config._attn_implementation
    assert share_prompt_keys(TokenLoss(model), model, 0, CPU)
    assert model.config._attn_implementation == before


def test_only_equal_untrained_tokens_are_shared() -> None:
    def document(ids: list[int], trained: list[int]) -> Sample:
        return Sample(ids, trained, [len(ids)])

    answer = document([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    assert count_shared_tokens(answer, answer) == 2  # the token before the answer is computed for both
    assert count_shared_tokens(answer, document([1, 9, 3, 4], [0, 0, 0, 1])) == 1
    assert count_shared_tokens(answer, document([1, 2, 3, 4], [1, 1, 1, 1])) == 0
    assert count_shared_tokens(document([1, 2], [0, 1]), document([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])) == 2
    assert measure_savings([join_samples([answer, answer])]) == 2 / 10
    assert build_shared_key_arguments([5, 3], [0, 0]) == {}


def test_fewer_tokens_are_counted(pairs: list[Sample]) -> None:
    shared = collate_samples(pairs, 0, packed=True, flat=False, pairs=True, shared=True)
    whole = collate_samples(pairs, 0, packed=True, flat=True, pairs=True)
    assert isinstance(shared, PairBatch)
    assert shared.tokens == shared.input_ids.numel() == whole.tokens - (8 + 0 + 13 + 1)
    assert shared.target_count == whole.target_count == 4
    empty = collate_samples([], 0, packed=True, flat=False, pairs=True, shared=True)
    assert empty.target_count == empty.tokens == 0


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_ground(tmp_path_factory.mktemp("shared"))
    write_pairs(folder / "train.jsonl", 24)
    write_pairs(folder / "held_out.jsonl", 6, seed=1)
    yield folder


def run(ground: Path, name: str, **changes: Any) -> tuple[str, list[dict[str, float]], dict[str, torch.Tensor]]:
    """Console, metrics and adapter of three steps with an evaluation."""
    common = {
        "task": "preference", "dataset__max_length": 192, "training__max_steps": 3, "training__batch_size": 2,
        "training__learning_rate": 3e-3, "training__eval_steps": 3, "output_dir": str(ground / name),
        "dataset__evaluation": {"path": str(ground / "held_out.jsonl")},
    }  # fmt: skip
    console = train(ground, **(common | changes))
    lines = [json.loads(line) for line in (ground / name / "metrics.jsonl").read_text().splitlines()]
    return console, lines, load_file(ground / name / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset__packing": True},
        {"dataset__packing": False, "preference__reference": "cached"},
        {"dataset__packing": True, "training__gradient_checkpointing": "non_reentrant", "ops__backend": "reference"},
        {"dataset__packing": True, "scu__enabled": True, "scu__measure": "kl", "scu__reference": "texts"},
    ],
    ids=["packed", "rows, cached reference", "recomputed, fused", "scu"],
)
def test_a_run_is_the_same(ground: Path, changes: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if "scu__reference" in changes:
        texts = ground / "texts.jsonl"
        texts.write_text("".join(json.dumps({"text": f"the red cat sat {count}"}) + "\n" for count in range(8)))
        changes = changes | {"scu__reference": str(texts), "scu__target": 0.05}
    name = request.node.callspec.id
    found = {}
    for shared in (True, False):
        console, lines, adapter = run(ground, f"{name} {shared}", preference__share_prompt=shared, **changes)
        assert ("prompts: shared by pairs, which saves" in console) == shared
        kept = [line for line in lines if "train/loss" in line or "eval/loss" in line]
        found[shared] = kept, adapter, max(line.get("train/tokens", 0.0) for line in lines)
    for ours, theirs in zip(found[True][0], found[False][0], strict=True):
        for key in ours:
            if key.startswith(("train/loss", "eval/loss", "train/logps", "eval/rewards", "train/grad_norm", "scu/")):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    first = next(line["train/loss"] for line in found[True][0] if "train/loss" in line)
    assert first == pytest.approx(LN_2, abs=1e-6)
    for key, value in found[False][1].items():
        torch.testing.assert_close(found[True][1][key], value, atol=1e-6, rtol=1e-5)
    assert 0 < found[True][2] < found[False][2]


def test_auto_shares_prompts_where_it_saves_a_tenth(ground: Path) -> None:
    console, *_ = run(ground, "default")
    assert "prompts:" not in console
    console, *_ = run(ground, "auto", preference__share_prompt="auto")
    assert "prompts: shared by pairs, which saves" in console
    short = [{"prompt": "red", "chosen": "cat " * 9, "rejected": "blue dog"} for _ in range(12)]
    (ground / "short.jsonl").write_text("".join(json.dumps(record) + "\n" for record in short))
    console, *_ = run(ground, "short", preference__share_prompt="auto", dataset__path=str(ground / "short.jsonl"))
    assert "prompts:" not in console


@pytest.mark.parametrize(
    ("setting", "value"), [("training.torch_compile", "true"), ("model.attn_implementation", "eager")]
)
def test_settings_that_prevent_it_are_named(ground: Path, setting: str, value: str) -> None:
    given = ["task=preference", "preference.share_prompt=true", f"{setting}={value}"]
    with pytest.raises(UserError, match=f"{setting}={value}: not supported with preference.share_prompt"):
        load_config(ground / "base.yaml", given)


@pytest.mark.parametrize("asked", ["true", "auto"])
def test_labeled_answers_share_nothing(ground: Path, asked: str) -> None:
    given = [
        "task=preference",
        "preference.loss=kto",
        f"preference.share_prompt={asked}",
        "training.torch_compile=true",
    ]
    with pytest.raises(UserError) as refused:
        load_config(ground / "base.yaml", given)
    assert str(refused.value) == (
        f"preference.share_prompt={asked}: kto learns from single answers, which share no prompt; "
        "set preference.share_prompt: false (command line)"
    )


def test_a_run_resumes_with_shared_prompts(ground: Path) -> None:
    """The setting changes no loss, so a resumed run may change it; the change is reported."""
    changes = {"dataset__packing": True, "training__save_steps": 2}
    _, whole, adapter = run(ground, "whole", **changes)
    checkpoint = str(ground / "whole" / "checkpoint-2")
    again = {"preference__share_prompt": True, "training__resume_from_checkpoint": checkpoint}
    console, lines, resumed = run(ground, "again", **changes, **again)
    assert "changed since checkpoint-2: preference.share_prompt false -> true" in " ".join(console.split())
    last, expected = ([line["train/loss"] for line in each if "train/loss" in line][-1] for each in (lines, whole))
    assert last == pytest.approx(expected, rel=1e-5)
    for key, value in adapter.items():
        torch.testing.assert_close(resumed[key], value, atol=1e-6, rtol=1e-5)


def test_the_savings_are_shown(ground: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [
        str(ground / "base.yaml"),
        "task=preference",
        f"dataset.cache_dir={ground / 'cache'}",
        "dataset.packing=true",
    ]
    assert inspect([*common, "preference.share_prompt=true"]) == 0
    shown = re.search(r"shared prompts save ([0-9.]+)% of the tokens", capsys.readouterr().out)
    assert shown and 5 < float(shown[1]) < 50
    assert inspect(common) == 0
    assert "shared prompts" not in capsys.readouterr().out
