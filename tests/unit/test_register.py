"""The list of what is replaced in libraries: complete, true, printed, and written as docs/reference/workarounds.md."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.config import TrainingSection
from trainer.contract.known_versions import KNOWN, installed
from trainer.patches import register
from trainer.patches.entries import PATCHES
from trainer.patches.fused_lora import fuse
from trainer.patches.installation import INSTALLATIONS
from trainer.patches.norm_mlp_rope import forget_inputs, replace_elementwise
from trainer.patches.packed_attention import copy_shared_heads, sdpa_with_own_heads, share_heads_again
from trainer.patches.recompute import enable_recomputation
from trainer.patches.replace import replace, undo

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for room in ("trainer", "ops", "launcher", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py")
)
REGISTRATIONS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_step_pre_hook",
    "register_full_backward_hook",
)

# Values, not code, that libraries offer for setting, and what Python offers: `path: attribute`.
VALUES = {
    "benchmarks/compare/__main__.py: lambdas": "argparse's options",
    "benchmarks/compare/__main__.py: ramps": "argparse's options",
    "launcher/entry.py: stdout": "Python's",
    "ops/seeds.py: draw": "of a thread, ours",
    "ops/groups.py: register_forward_pre_hook": "removed in the same function",
    "trainer/checkpoint/checkpoint.py: global_steps": "counters of DeepSpeed's engine, from a checkpoint",
    "trainer/checkpoint/checkpoint.py: setattr": "the loss scale, from a checkpoint",
    "trainer/checkpoint/checkpoint.py: skipped_steps": "counters of DeepSpeed's engine, from a checkpoint",
    "trainer/commands/merge.py: all_tied_weights_keys": "a model that is written out",
    "trainer/commands/merge.py: tie_word_embeddings": "a model that is written out",
    "trainer/commands/merge.py: use_cache": "a model that is written out",
    "trainer/commands/integers.py: quantization_config": "a model that is written out",
    "trainer/commands/requantized.py: quantization_config": "a model that is written out",
    "trainer/parallel/engine/optimizer.py: _last_lr": "a schedule, from a checkpoint",
    "trainer/parallel/engine/optimizer.py: last_epoch": "a schedule, from a checkpoint",
    "trainer/patches/update_guard.py: grad": "of a scratch tensor",
    "trainer/monitor/display.py: bar_width": "of rich's progress bar, to the terminal's width",
    "trainer/checkpoint/weights.py: init_lora_weights": "a PEFT configuration around a save",
    "trainer/model/base.py: use_cache": "public",
    "trainer/model/saved_adapter.py: _custom_modules": "a PEFT configuration that is saved",
    "trainer/model/saved_adapter.py: inference_mode": "a PEFT configuration that is loaded",
    "trainer/model/random_weights.py: decoder": "public",
    "trainer/model/random_weights.py: pre_tokenizer": "public",
    "launcher/entry.py: stderr": "Python's",
    "trainer/entry/prestart.py: stderr": "Python's",
    "trainer/entry/prestart.py: stdout": "Python's",
    "trainer/monitor/console.py: excepthook": "Python's",
    "trainer/monitor/console.py: stderr": "Python's",
    "trainer/monitor/console.py: stdout": "Python's",
    "trainer/patches/norm_mlp_rope.py: setattr": "a mark on a result",
    "trainer/patches/norm_mlp_rope.py: vars()[]": "a copy for a test",
    "trainer/patches/replace.py: setattr": "by which the others replace",
    "trainer/contract/known_versions.py: setattr": "by which others replace for a while",
    "trainer/parallel/ranks/group.py: environ": "Python's: rank variables",
    "trainer/tasks/images/model.py: vars()[]": "diffusers' own mark of a model in 4 bits",
    "trainer/parallel/ranks/torch_settings.py: benchmark": "public",
}  # fmt: skip
OTHERS = (
    "benchmarks/bench/",  # builds models of others, to measure them
    "trainer/commands/export/llama_cpp.py",  # fills in the settings of llama.cpp's own object
)


def own_fields() -> set[str]:
    """Names of attributes of our own classes; a Protocol names those of others."""
    names: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
                names |= {part.target.id for part in node.body if _declares(part)}  # type: ignore[attr-defined]
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                names.add(node.attr)
    return names


def _declares(part: ast.stmt) -> bool:
    return isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "ctx")


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        for one, its_value in zip(target.elts, values, strict=False):
            yield from _pairs(one, its_value)
    else:
        yield target, value


def _is_code(value: ast.expr | None, functions: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in ("partial", "MethodType")
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


def replacements(path: Path, ours: set[str]) -> set[str]:
    """Assignments and registrations on objects that are none of ours, as `path: attribute`."""
    tree = ast.parse(path.read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target, value in (pair for one in targets for pair in _pairs(one, node.value)):
                if isinstance(target, ast.Attribute) and not _is_self(target.value):
                    if target.attr not in ours or _is_code(value, functions):
                        found.add(target.attr)
                elif isinstance(target, ast.Subscript):
                    found |= _table(target.value, imported)
        elif isinstance(node, ast.Call):
            found |= _by_call(node)
    return {f"{path.relative_to(ROOT)}: {name}" for name in found}


def _table(owner: ast.expr, imported: set[str]) -> set[str]:
    if isinstance(owner, ast.Attribute) and owner.attr == "__dict__":
        return {"__dict__[]"}
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name):
        return {f"{owner.func.id}()[]"}
    return {f"{owner.id}[]"} if isinstance(owner, ast.Name) and owner.id in imported else set()


def _by_call(node: ast.Call) -> set[str]:
    name = ast.unparse(node.func)
    if (name, len(node.args)) in (("replace", 3), ("replaced", 4)):
        return {str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ast.unparse(node.args[1])}
    if name in ("setattr", "delattr") and not _is_self(node.args[0]):
        return {"setattr"}
    if name.endswith("Interface.register"):
        return {name}
    return {name.rpartition(".")[2]} & set(REGISTRATIONS)


def test_nothing_is_replaced_that_is_not_listed_and_nothing_is_listed_that_is_not_replaced() -> None:
    ours = own_fields()
    found = {place for path in SOURCES for place in replacements(path, ours)}
    found = {place for place in found if not place.startswith(OTHERS)}
    listed = {place for patch in PATCHES for place in patch.places}
    assert sorted(found - listed - set(VALUES)) == [], "replaced, but not in trainer/patches/entries.py"
    assert sorted(listed - found) == [], "in trainer/patches/entries.py, but replaced nowhere"
    assert sorted(set(VALUES) - found) == []


@pytest.mark.parametrize(
    "line",
    [
        "layer.forward = lambda x: x",
        "engine.step, engine.other = fast, 1",
        "setattr(module, name, fast)",
        "replace(module, 'forward', fast)",
        "with replaced(module, 'forward', fast, 'torch'): pass",
        "transformers.loss.compute = fast",
        "ALL_OPS['x'] = 1",
        "AttentionInterface.register('sdpa', fast)",
        "model.register_forward_hook(fast)",
        "module.__dict__['weight'] = 1",
    ],
)
def test_the_search_finds_every_way_to_replace(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "patch.py"
    file.write_text(f"from deepspeed import ALL_OPS\ndef fast(): ...\n{line}\n")
    assert replacements(file, {"step"}) != set()


def test_every_entry_points_at_what_is_there() -> None:
    for patch in PATCHES:
        assert patch.library in KNOWN and patch.read_in in KNOWN[patch.library].tested, patch.replaces
        path, _, name = patch.installed_by.partition(": ")
        source = (ROOT / path).read_text()
        assert all(f"def {part}" in source or f"class {part}" in source for part in name.split(".") if part), patch
        for test in patch.test.replace("; ", ", ").split(", "):
            file, _, function = test.rpartition(": ") if ": " in test else ("", "", test)
            file = file or (test if test.endswith(".py") else "tests/unit/test_workarounds.py")
            assert (ROOT / file).exists(), test
            if function.startswith("test_"):
                assert f"def {function}(" in (ROOT / file).read_text(), test


def test_every_fault_with_a_test_is_listed() -> None:
    tree = ast.parse((ROOT / "tests" / "unit" / "test_workarounds.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    listed = " ".join(patch.test for patch in PATCHES)
    assert sorted(name for name in names if name not in listed) == []


def test_the_document_is_the_list() -> None:
    written = (ROOT / "docs" / "reference" / "workarounds.md").read_text()
    assert written == register.markdown(), "trainer.patches.register --markdown"


def _calls(function: ast.FunctionDef, local: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Names of the functions that it calls, in the order of its lines, the local ones followed inwards."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name = ast.unparse(call.func)
        yield name
        if name in local:
            yield from _calls(local[name], local)


def test_each_entry_of_the_patches_is_installed_by_a_step_of_the_list() -> None:
    """But those of one pass alone, which are undone at its end."""
    files = sorted((ROOT / "trainer" / "patches").glob("*.py"))
    local = {
        node.name: node
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    entries = {patch.replaces: patch for patch in PATCHES}
    for step in INSTALLATIONS:
        called = {*_calls(local[step.install.__name__], local), "LayerShards.attach"}
        for name in step.replaces:
            assert entries[name].installed_by.partition(": ")[2] in called, name
    listed = {name for step in INSTALLATIONS for name in step.replaces}
    apart = [patch for patch in PATCHES if patch.replaces not in listed]
    of_one_pass = {
        "trainer/patches/graphed_loss.py: forward_replaced",
        "trainer/patches/model_facts.py: why_head_apart",
        "trainer/patches/plain_head.py: head_replaced",
        "trainer/patches/loss_head.py: adapter_off",
    }
    assert {patch.installed_by for patch in apart if "trainer/patches/" in patch.installed_by} == of_one_pass


def test_the_command_prints_every_entry_with_the_installed_version_and_without_torch() -> None:
    code = "import sys; from trainer.patches.register import main; main([]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("      why: ") == len(PATCHES)
    assert f"[deepspeed {installed('deepspeed')}" in done.stdout


def test_doctor_prints_it() -> None:
    words = [sys.executable, "-m", "launcher.cli", "doctor", "--patches", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = json.loads(done.stdout)
    assert [entry["replaces"] for entry in listed] == [patch.replaces for patch in PATCHES]
    assert listed[0]["installed"] == installed("deepspeed")


def test_a_patched_model_is_as_it_came_when_all_is_undone() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    undo(base)  # what an earlier test of this process has left in the modeling file
    rotary = modeling_llama.apply_rotary_pos_emb
    assert replace_elementwise(base, recompute=True).rotary == 1
    assert modeling_llama.apply_rotary_pos_emb is not rotary
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    tokens = torch.arange(8)[None]
    plain = {name for name, module in model.named_modules() if "forward" in vars(module)}
    fuse(model, "reference", forward=lambda: model(input_ids=tokens, use_cache=False))
    forget_inputs(model)
    enable_recomputation(model, TrainingSection(gradient_checkpointing="selective"))
    patched = model(input_ids=tokens, use_cache=False).logits
    assert {name for name, module in model.named_modules() if "forward" in vars(module)} > plain
    assert undo(model) > 0
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert modeling_llama.apply_rotary_pos_emb is rotary
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, patched)


def test_sdpa_is_transformers_own_again() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    copy_shared_heads()
    assert AttentionInterface()["sdpa"] is sdpa_with_own_heads
    share_heads_again()
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward


def test_what_was_replaced_is_put_back_last_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    before = model(x)
    replace(model[0], "forward", lambda x: x * 2)
    first = model[0].forward
    replace(model[0], "forward", lambda x: first(x) + 1)
    assert torch.equal(model(x), torch.full((1, 2), 3.0))
    assert undo(model) == 2 and undo(model) == 0
    assert torch.equal(model(x), before) and "forward" not in vars(model[0])
