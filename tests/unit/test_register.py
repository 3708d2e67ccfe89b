"""The list of replaced library code: complete, printed, and current in docs/reference/workarounds.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts.workarounds import Replacement, collect, markdown
from trainer.config import TrainingSection
from trainer.contract.known_versions import TESTED_VERSIONS
from trainer.patches.fused_lora import fuse_layers
from trainer.patches.norm_mlp_rope import install_input_recomputation, replace_elementwise
from trainer.patches.recompute import enable_recomputation
from trainer.patches.replace import replace, undo

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def entries() -> list[Replacement]:
    return collect()


def test_every_entry_names_a_known_library_and_existing_tests(entries: list[Replacement]) -> None:
    for entry in entries:
        assert entry.library in TESTED_VERSIONS and entry.read_in in TESTED_VERSIONS[entry.library], entry.replaces
        for test in entry.test.replace("; ", ", ").split(", "):
            file, _, function = test.rpartition(": ") if ": " in test else ("", "", test)
            file = file or (test if test.endswith(".py") else "tests/unit/test_workarounds.py")
            assert (ROOT / file).exists(), test
            if function.startswith("test_"):
                assert f"def {function}(" in (ROOT / file).read_text(), test


def test_every_entry_has_its_decorator_and_every_decorator_its_entry(entries: list[Replacement]) -> None:
    """`ops` does not know the decorator of trainer; its functions exist."""
    marked, defined = set(), set()
    for path in [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "ops").rglob("*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name, decorators in _definitions(ast.parse(path.read_text()), ""):
            defined.add(f"{module}: {name}")
            calls = [each for each in decorators if isinstance(each, ast.Call) and ast.unparse(each.func) == "replaces"]
            marked |= {(ast.literal_eval(call.args[0]), f"{module}: {name}") for call in calls}
    listed = {(entry.replaces, entry.installed_by) for entry in entries}
    ours = {entry for entry in listed if entry[1].startswith("ops.")}
    assert listed - ours == marked and len(ours) == 3
    assert {place for _, place in listed} <= defined


def _definitions(node: ast.AST, above: str) -> Iterator[tuple[str, list[ast.expr]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield f"{above}{child.name}", child.decorator_list
            yield from _definitions(child, f"{above}{child.name}.")


def test_every_module_that_replaces_is_registered() -> None:
    importing = re.compile(r"^from trainer\.patches\.replace import .*\breplace\b", re.MULTILINE)
    files = {path: path.read_text() for path in (ROOT / "trainer").rglob("*.py")}
    users = {path for path, source in files.items() if importing.search(source)}
    assert len(users) > 5
    assert {path for path in users if "\n@replaces(" not in files[path]} == set()


def test_every_fault_with_a_test_is_listed(entries: list[Replacement]) -> None:
    tree = ast.parse((ROOT / "tests" / "unit" / "test_workarounds.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    listed = " ".join(entry.test for entry in entries)
    assert sorted(name for name in names if name not in listed) == []


def test_the_document_is_the_list() -> None:
    written = (ROOT / "docs" / "reference" / "workarounds.md").read_text()
    assert written == markdown(), "python -m scripts.workarounds"


def _calls(function: ast.FunctionDef, local: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Names of the functions that it calls, in the order of its lines, the local ones followed inwards."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name = ast.unparse(call.func)
        yield name
        if name in local:
            yield from _calls(local[name], local)


def test_each_entry_of_the_patches_is_installed_by_a_step_of_the_list(entries: list[Replacement]) -> None:
    """Except those of a single pass, which are undone at its end, and what a probe of the running engine asks for."""
    files = sorted((ROOT / "trainer" / "patches").glob("*.py"))
    local = {
        node.name: node
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    steps = ("install_on_base_model", "install_on_adapted_model", "install_on_engine")
    called = {name for step in steps for name in _calls(local[step], local)}
    installed_by = {entry.installed_by.removeprefix("trainer.patches.") for entry in entries}
    ours = {name for name in installed_by if not name.startswith(("trainer.", "ops."))}
    assert {name for name in ours if name.partition(": ")[2] not in called} == {
        "graphed_loss: replace_forward",
        "model_properties: describe_head_problem",
        "plain_head: replace_head",
        "loss_head: bypass_adapter",
        "loss_head: mask_balancing_loss",
        "packed_attention: pass_positions_to_masks",
        "per_document: install_per_document_forwards",
    }


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
    assert len(replace_elementwise(base, recompute="activations").functions) == 1
    assert modeling_llama.apply_rotary_pos_emb is not rotary
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    tokens = torch.arange(8)[None]
    plain = {name for name, module in model.named_modules() if "forward" in vars(module)}
    fuse_layers(model, "reference", forward=lambda: model(input_ids=tokens, use_cache=False))
    install_input_recomputation(model)
    enable_recomputation(model, TrainingSection(gradient_checkpointing="selective"))
    patched = model(input_ids=tokens, use_cache=False).logits
    assert {name for name, module in model.named_modules() if "forward" in vars(module)} > plain
    assert undo(model) > 0
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert modeling_llama.apply_rotary_pos_emb is rotary
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, patched)


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
