"""Conversations with images: the losses of transformers and PEFT, the data, and what is refused."""

import base64
import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from tests.runs_in_process import train as train_run
from tests.saved_adapters import save_adapter
from tests.tiny import make_model
from tests.unit.test_multimodal import train
from tests.vision import (
    COLORS,
    NO_VISION,
    PROCESSORS,
    WITH_TORCHVISION,
    draw,
    make_vision_model,
    plain_vision_losses,
    processed,
    store_dequantised_vision,
    write_vision_chats,
)
from trainer.checkpoint.finished_run import find_run
from trainer.commands import evaluate, generate, inspect, merge
from trainer.commands.export.__main__ import export
from trainer.config import RunConfig, UserError, load_config
from trainer.data.image_features import FeatureFiles
from trainer.data.image_parts import IMAGE_MARKER, decode_image, read_stored_image
from trainer.data.samples import Samples, split_documents
from trainer.memory.decisions import Machine
from trainer.memory.planner import Planner
from trainer.memory.preflight import plan_memory
from trainer.model.base import load_base_model
from trainer.model.image_reader import SUPPORTED_MODEL_TYPES, cache_features
from trainer.parallel.ranks.group import Ranks
from trainer.patches.packed_attention import TOWER, VARLEN, enable_varlen, use_flash_in_towers
from trainer.patches.packing_probe import separate_documents
from trainer.setup.build import Builder
from trainer.setup.preflight import prepare
from trainer.setup.shown_data import show_text
from trainer.tasks.language import LanguageTask

CPU = torch.device("cpu")
ALL = [
    pytest.param(
        family, marks=pytest.mark.skipif(family in WITH_TORCHVISION and not find_spec("torchvision"), reason=NO_VISION)
    )
    for family in PROCESSORS
]
FEW = [
    each
    if each.values[0] in ("gemma3", "qwen2_5_vl")
    else pytest.param(*each.values, marks=[*each.marks, pytest.mark.slow])
    for each in ALL
]
"""A family of each kind of packing in the fast tests, the others in the slow ones."""
UNUSED_LAYERS = {"llava": [r".*vision_tower\.encoder\.layers\.1\..*"]}
"""LLaVA 1.5 reads the features before its tower's last layer."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vision")
    write_vision_chats(root, 16)
    for family in PROCESSORS:
        (root / family).mkdir()
        make_vision_model(root / family, family)
    return root


def run_config(root: Path, family: str, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "base_model": str(root / family),
        "output_dir": str(root / "out"),
        "lora": {"r": 4},
        "dataset": {"path": str(root / "chats.jsonl"), "max_length": 192, "cache_dir": str(root / "cache")},
        "training": {"max_steps": 3, "batch_size": 3, "learning_rate": 1e-2, "precision": "fp32"},
        "ops": {"backend": "reference"},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            settings.setdefault(section, {})[key] = value
        else:
            settings[section] = value
    (root / "run.yaml").write_text(yaml.safe_dump(settings))
    return load_config(root / "run.yaml", []).config


def test_every_supported_model_type_is_tested() -> None:
    assert {*PROCESSORS} - {"pixtral"} == {*SUPPORTED_MODEL_TYPES}, "Pixtral's model type is llava"


LAYOUTS: dict[str, dict[str, Any]] = {"rows": {}, "packs": {"dataset__packing": True}, "nf4": {"adapter": "qlora"}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ALL)
def test_losses_are_those_of_transformers_and_peft(family: str, layout: str, root: Path, tmp_path: Path) -> None:
    config = run_config(root, family, **LAYOUTS[layout])
    if (family, layout) == ("lfm2_vl", "nf4"):
        with pytest.raises(UserError, match=r"adapter=qlora: .*use adapter: lora"):
            train(config)
        return
    model, lines, losses = train(config)
    if layout == "nf4":  # the reference has the same values in 32 bits
        config = run_config(root, family, base_model=str(store_dequantised_vision(root / family, tmp_path / "base")))
    assert losses == pytest.approx(plain_vision_losses(config), rel=1e-5)
    assert len({round(loss, 4) for loss in losses}) == 3, "nothing was learned that could differ"
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert trained and not any(re.search("visual|vision|projector|connector", name) for name in trained)
    assert any("without adapter: " in line and "vis" in line for line in lines)


@pytest.mark.parametrize("train_images", ["projector", "lora"])
@pytest.mark.parametrize("family", FEW)
def test_tower_and_projector_train_as_in_peft(family: str, train_images: str, root: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    layers = {"lora__exclude_modules": UNUSED_LAYERS.get(family, []) if train_images == "lora" else []}
    config = run_config(root, family, vision__train=train_images, dataset__packing=True, **layers)
    model, lines, losses = train(config)
    assert losses == pytest.approx(plain_vision_losses(config), rel=1e-5)
    assert losses != pytest.approx(train(run_config(root, family, dataset__packing=True))[2], rel=1e-5)
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    of_images = [name for name in trained if re.search("visual|vision|projector|connector", name)]
    assert of_images and all("lora_" in name for name in of_images) == (train_images == "lora")
    assert any("without adapter" in line and "vis" in line for line in lines) == (train_images == "projector")
    save_adapter(model, tmp_path)
    base = AutoModelForMultimodalLM.from_pretrained(root / family, dtype=torch.float32)
    loaded = {name: each for name, each in PeftModel.from_pretrained(base, tmp_path).named_parameters()}
    assert all(torch.equal(loaded[name], each) for name, each in model.named_parameters() if name in of_images)


def recorded(folder: Path, name: str = "train/loss") -> list[float]:
    records = (json.loads(line) for line in (folder / "metrics.jsonl").open())
    return [record[name] for record in records if name in record]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FEW)
def test_losses_with_cached_features_are_those_with_the_tower(
    family: str, packing: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = list[int]()
    write, cache = FeatureFiles.write, tmp_path / "cache"
    monkeypatch.setattr(FeatureFiles, "write", lambda *given: (computed.append(1), write(*given)))
    changes = {"dataset__val_split": 4, "dataset__packing": packing, "dataset__cache_dir": str(cache)}
    losses, held_out, counts = {}, {}, []
    for name, cached in (("tower", False), ("first", True), ("again", True))[: 3 if family == "qwen3_vl" else 2]:
        run = run_config(root, family, output_dir=str(tmp_path / name), vision__cache=cached, **changes)
        (tmp_path / "base.yaml").write_text((root / "run.yaml").read_text())
        train_run(tmp_path, logging__report_to="none", logging__run_name=name)
        losses[name], held_out[name] = (recorded(Path(run.output_dir), each) for each in ("train/loss", "eval/loss"))
        counts.append(len(computed))
    files = list(cache.glob("features/*/*/*.safetensors"))
    assert counts == [0, len(files), len(files)][: len(counts)] and len(files) > 5, "each image once, in the first run"
    for found in (losses, held_out):
        assert found["first"] == pytest.approx(found["tower"], rel=1e-6)
        assert found.get("again", found["first"]) == found["first"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_flat_packs_with_cached_features_have_the_losses_of_masked_ones(family: str, root: Path) -> None:
    """On a GPU, packs have variable-length attention if no tower runs in the step."""
    config = run_config(root, family, dataset__packing=True, vision__cache=True)
    prepared, ranks = prepare(config), Ranks(0, 1, 0)
    decided = plan_memory(Planner, config, prepared, ranks, CPU, "fp32").decisions
    losses = {}
    for attention in ("sdpa", VARLEN):
        task = LanguageTask(config, prepared, ranks, CPU, "fp32", print)
        model, _ = Builder(config, decided, task, ranks, CPU, "fp32").build_model()
        if attention == VARLEN:
            enable_varlen(model.get_base_model())
        loss = task.build_loss(model, fused_head=decided.fused_head.value)
        task.flat_packs = separate_documents(loss, model, prepared.tokenizer.pad_token_id, CPU)
        assert task._images is not None and isinstance(prepared.data.train, Samples)
        cache = root / "cache"
        task._images = cache_features(task._images, model, prepared.data.train, cache, CPU, print)
        [batch], _ = task.build_batches().build_step_batches(0, 0)
        assert (batch.cu_seqlens is not None) == (attention == VARLEN) and batch.images
        losses[attention] = float(loss(model, batch, CPU).detach())
    assert losses[VARLEN] == pytest.approx(losses["sdpa"], rel=1e-6)


@pytest.mark.parametrize(("family", "has_windows"), [("qwen2_5_vl", True), ("qwen3_vl", True), ("gemma3", False)])
def test_only_towers_with_windows_get_flash_attention(
    family: str, has_windows: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/gpu/test_packed_attention.py computes with it."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(run_config(root, family).base_model)
    monkeypatch.setattr("trainer.patches.packed_attention.has_flash", lambda *_: True)
    use_flash_in_towers(model, CPU, torch.bfloat16)
    assert model.config.vision_config._attn_implementation == (TOWER if has_windows else "sdpa")
    assert model.config.get_text_config()._attn_implementation == model.config._attn_implementation == "sdpa"


def test_parts_that_learn_from_images_need_images_in_the_data(root: Path, tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", {"messages": turns("what?")})
    given: dict[str, Any] = {"train": "lora", "cache": True}
    for name, value in given.items():
        with pytest.raises(UserError, match=f"vision.{name}=.*: has no effect, because no record"):
            prepare(run_config(root, "gemma3", dataset__path=str(file), **{f"vision__{name}": value}))


def write_records(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def turns(question: Any, answer: Any = "red") -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def read(root: Path, path: Path, family: str = "qwen2_5_vl", **more: Any) -> Any:
    """The prepared data of a file."""
    return prepare(run_config(root, family, dataset__path=str(path), **more)).data


def picture(folder: Path, name: str = "red.png") -> Path:
    return draw(folder / name, (220, 20, 30))


def test_every_form_of_images_gives_the_same_document(root: Path, tmp_path: Path) -> None:
    file = picture(tmp_path)
    inline = base64.b64encode(file.read_bytes()).decode()
    text = {"type": "text", "text": "what?"}
    parts = [
        {"type": "image", "path": "red.png"},  # next to the records
        {"type": "image", "image": str(file)},
        {"type": "image", "url": f"file://{file}"},
        {"type": "image", "base64": inline},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{inline}"}},
    ]
    records: list[dict[str, Any]] = [{"messages": turns([part, text])} for part in parts]
    records += [
        {"messages": turns([{"type": "image"}, text]), "images": ["red.png"]},  # TRL
        {"messages": turns("<image>what?"), "images": ["red.png"]},  # LLaMA-Factory
        {"image": "red.png", "conversations": llava("<image>what?")},
        {"instruction": "<image>what?", "output": "red", "images": ["red.png"]},
    ]
    found = []
    for number, record in enumerate(records):
        data = read(root, write_records(tmp_path / f"{number}.jsonl", record))
        [sample] = data.train
        assert len(sample.images[0]) == 1
        found.append((sample.input_ids, decode_image(read_stored_image(sample.images[0][0])[0], "").tobytes()))
    assert all(each == found[0] for each in found)


def llava(question: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": "red"}]


def test_a_parquet_file_with_images_is_read(root: Path, tmp_path: Path) -> None:
    from datasets import Dataset, Features, Image, List, Value

    messages = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "red"}]
    turn = {"role": Value("string"), "content": Value("string")}
    features = Features({"messages": List(turn), "images": List(Image())})
    rows = {"messages": [messages], "images": [[str(picture(tmp_path))]]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    [sample] = read(root, tmp_path / "rows.parquet").train
    assert decode_image(read_stored_image(sample.images[0][0])[0], "").size == (40, 40)


def test_only_answers_are_trained_and_never_the_tokens_of_an_image(root: Path, tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", {"messages": turns("<image>what?"), "images": [str(picture(tmp_path))]})
    for trains in (["assistant"], ["all"]):
        prepared = prepare(run_config(root, "qwen2_5_vl", dataset__path=str(file), dataset__train_on=trains))
        assert prepared.images is not None
        [sample] = prepared.data.train
        trained = [token for token, weight in zip(sample.input_ids, sample.loss_weights, strict=True) if weight]
        places = [token in prepared.images.token_ids for token in sample.input_ids]
        assert any(places) and not any(token in prepared.images.token_ids for token in trained)
        assert prepared.tokenizer.decode(trained).endswith(
            "red<|im_end|>" if trains == ["assistant"] else "red<|im_end|>\n"
        )


ANSWERS = [turns("", "red")[1], turns("", "blue")[1]]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"messages": turns("<image>?"), "images": ["gone.png"]}, "record 1, image 1: no such file: gone.png"),
    "damaged": (
        {"messages": turns("<image>?"), "images": ["bad.png"]},
        "record 1, image 1 .*cannot be read as an image",
    ),
    "more marks": ({"messages": turns("<image><image>?"), "images": ["red.png"]}, "has 1 image, but 2 placeholders"),
    "more images": ({"messages": turns("<image>?"), "images": ["red.png"] * 2}, "has 2 images, but 1 placeholder"),
    "no mark": ({"messages": turns("?"), "images": ["red.png"]}, "has 1 image, but 0 placeholders"),
    "address": ({"messages": turns("<image>?"), "images": ["https://a.b/c.png"]}, "is a URL .*download the image"),
    "number": ({"messages": turns("<image>?"), "images": [3]}, "record 1, image 1: is a number"),
    "typed": ({"messages": turns("<|image_pad|>?")}, r"contains <\|image_pad\|> 1 times, but there are 0 images"),
    "pairs": (
        {
            "chosen": turns("?", "red"),
            "rejected": turns("?", [{"type": "image", "path": "red.png"}, {"type": "text", "text": "x"}]),
        },
        "an assistant turn has an image, but answers are text",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_one_line(name: str, root: Path, tmp_path: Path) -> None:
    record, problem = BAD[name]
    picture(tmp_path)
    (tmp_path / "bad.png").write_bytes(b"\x89PNG not an image")
    file = write_records(tmp_path / "a.jsonl", record)
    with pytest.raises(UserError, match=problem) as raised:
        read(root, file, **({"task": "preference"} if name == "pairs" else {}))
    assert "\n" not in str(raised.value)


def test_images_for_a_text_model_are_refused(root: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "text")
    file = write_records(tmp_path / "a.jsonl", {"messages": turns("<image>?"), "images": [str(picture(tmp_path))]})
    config = run_config(root, "gemma3", dataset__path=str(file), base_model=str(tmp_path / "text"))
    with pytest.raises(UserError, match="record 1: has images, but image input is not supported for this model"):
        prepare(config)
    write_records(tmp_path / "a.jsonl", {"messages": turns("<image>?"), "images": ["missing.png"]})
    with pytest.raises(UserError, match="record 1: has images, but image input is not supported for this model"):
        prepare(config)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"parallel__sequence": 2}, "parallel.sequence=2: not supported for data with images"),
        ({"model__attn_implementation": "eager"}, "model.attn_implementation=eager: not supported for data with"),
        ({"dataset__streaming": True}, "dataset.streaming=true: records with images cannot be streamed"),
    ],
)
def test_settings_that_do_not_work_with_images_are_refused(settings: dict[str, Any], problem: str, root: Path) -> None:
    with pytest.raises(UserError, match=problem):
        prepared = prepare(run_config(root, "qwen2_5_vl", **settings))
        next(iter(prepared.data.train.read(0)))


def test_records_whose_images_do_not_fit_are_left_out_and_others_cut(root: Path, tmp_path: Path) -> None:
    names = [str(picture(tmp_path))] * 2
    fits = {"messages": turns("<image>?", "red " * 30), "images": names[:1]}
    not_fits = {"messages": turns("what? " * 30 + "<image>"), "images": names[:1]}
    data = read(root, write_records(tmp_path / "a.jsonl", fits, not_fits), dataset__max_length=50)
    assert (len(data.train), data.stats.too_long, data.stats.truncated) == (1, 1, 1)
    assert len(data.train[0].input_ids) == 50 and len(data.train[0].images[0]) == 1


def test_a_changed_image_is_read_again_and_an_animated_one_reported(root: Path, tmp_path: Path) -> None:
    from PIL import Image

    file = write_records(tmp_path / "a.jsonl", {"messages": turns("<image>?"), "images": ["red.gif"]})
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "red.gif", save_all=True, append_images=frames[1:])
    first = read(root, file)
    assert any("1 of 1 records have an image with several frames" in note for note in first.stats.notes)
    Image.new("RGB", (90, 90), "red").save(tmp_path / "red.gif")
    again = read(root, file)
    assert len(again.train[0].input_ids) > len(first.train[0].input_ids)


TRAINED = {"qwen2_5_vl": "lora", "gemma3": "projector", "smolvlm": "lora"} | dict.fromkeys(
    ("llama4", "lfm2_vl", "pixtral"), "none"
)


@pytest.mark.parametrize("family", [each for each in ALL if each.values[0] in TRAINED])
def test_a_run_is_asked_about_an_image_evaluated_and_merged(
    family: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoImageProcessor, AutoModelForMultimodalLM

    more = {"vision__train": TRAINED[family], "output_dir": str(tmp_path / "run")}
    config = run_config(root, family, dataset__val_split=4, training__max_steps=2, **more)
    (tmp_path / "base.yaml").write_text((root / "run.yaml").read_text())
    train_run(tmp_path, logging__report_to="none")
    file = picture(tmp_path)
    capsys.readouterr()
    assert generate.main([str(tmp_path / "run"), "which colour", "--image", str(file), "--max-new-tokens", "8"]) == 0
    shown = capsys.readouterr().out.strip()
    assert evaluate.main([str(tmp_path / "run"), "--json", str(tmp_path / "eval.json")]) == 0
    [held_out] = [
        json.loads(line)["eval/loss"] for line in (tmp_path / "run/metrics.jsonl").open() if "eval/loss" in line
    ][-1:]
    assert json.loads((tmp_path / "eval.json").read_text())["adapter"]["loss"] == pytest.approx(held_out, rel=1e-5)
    assert merge.main([str(tmp_path / "run"), "--output", str(tmp_path / "merged")]) == 0
    merged = AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    AutoImageProcessor.from_pretrained(tmp_path / "merged")
    prepared = prepare(config, for_training=False)
    assert prepared.images is not None
    text = prepared.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which colour"}]}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    image = decode_image(file.read_bytes(), "")
    inputs = prepared.images._processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)
    answer = merged.generate(
        **inputs.to(torch.float32), max_new_tokens=8, do_sample=False, eos_token_id=[2], pad_token_id=0
    )
    [wanted] = prepared.tokenizer.batch_decode(answer[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert shown == wanted.strip()
    problem = {"lora": "vision.train=lora: servers apply", "projector": "lora.modules_to_save"}.get(TRAINED[family])
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        export(find_run(tmp_path / "run"), "vllm", tmp_path / "exported")


def write_pairs(folder: Path, count: int) -> Path:
    """Questions about one or two images, or none, with a right and a wrong answer."""
    files = {name: draw(folder / f"{name}.png", colour, 60, 30).name for name, colour in COLORS.items()}
    names, records = list(COLORS), []
    for number in range(count):
        right, wrong = names[number % 4], names[(number + 1) % 4]
        parts = [{"type": "image", "path": files[right]}] * (number % 3)
        prompt = turns([*parts, {"type": "text", "text": "which colour " * (1 + number % 2)}])[:1]
        records.append({"prompt": prompt, "chosen": turns("", right)[1:], "rejected": turns("", f"{wrong} it is")[1:]})
    return write_records(folder / "pairs.jsonl", *records)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_pairs_of_answers_about_images_are_compared_as_by_hand(family: str, root: Path, tmp_path: Path) -> None:
    """SimPO: -log sigmoid(beta (mean log p of the chosen answer - that of the rejected one) - gamma)."""
    file = write_pairs(tmp_path, 6)
    settings = {"loss": "simpo", "beta": 2.0, "gamma": 0.5}
    found = {}
    for name, changes in {"rows": {}, "packs": {"dataset__packing": True}, "cached": {"vision__cache": True}}.items():
        own: dict[str, Any] = {
            "training__batch_size": 6,
            "training__max_steps": 2,
            "training__logging_steps": 1,
            "dataset__shuffle": False,
            **changes,
        }
        own |= {"output_dir": str(tmp_path / name), "dataset__cache_dir": str(tmp_path / "cache")}
        config = run_config(
            root,
            family,
            task="preference",
            preference=settings,
            dataset__path=str(file),
            dataset__max_length=256,
            **own,
        )
        (tmp_path / "base.yaml").write_text((root / "run.yaml").read_text())
        train_run(tmp_path, logging__report_to="none", logging__run_name=name)
        found[name] = recorded(tmp_path / name)
    prepared = prepare(config, for_training=False)
    model = load_base_model(config.base_model, config.model, dtype=torch.float32, device=CPU, attention="sdpa")
    means = []
    for sample in prepared.data.train:
        for document in split_documents(sample):
            inputs = processed(prepared, document)
            with torch.no_grad():
                logs = model(**inputs, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            trained = torch.tensor(document.loss_weights[1:]) > 0
            means.append(logs.gather(1, inputs["input_ids"][0, 1:, None])[trained].mean())
    chosen, rejected = torch.stack(means[::2]), torch.stack(means[1::2])
    wanted = -torch.nn.functional.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()
    assert found["rows"][0] == pytest.approx(float(wanted), rel=1e-5)
    for name in ("packs", "cached"):
        assert found[name][0] == pytest.approx(found["rows"][0], rel=1e-5), name
    assert found["cached"] == pytest.approx(found["rows"], rel=1e-5)


def test_images_are_upright_and_transparent_ones_on_white(tmp_path: Path) -> None:
    from PIL import Image

    image = Image.new("RGB", (60, 40), "blue")
    image.paste((255, 0, 0), (0, 0, 60, 20))
    orientation = Image.Exif()
    orientation[0x0112] = 6  # the camera was turned: the first row is the right side
    image.save(tmp_path / "turned.png", exif=orientation)
    upright = decode_image((tmp_path / "turned.png").read_bytes(), "")
    assert upright.size == (40, 60) and upright.getpixel((35, 30)) == (255, 0, 0)
    assert upright.getpixel((5, 30)) == (0, 0, 255)
    for mode in ("RGBA", "LA"):
        Image.new("RGBA", (8, 8), (255, 0, 0, 0)).convert(mode).save(tmp_path / "clear.png")
        clear = decode_image((tmp_path / "clear.png").read_bytes(), "")
        assert clear.mode == "RGB" and clear.getpixel((4, 4)) == (255, 255, 255), mode


def test_inspect_draws_images_in_a_terminal(root: Path, tmp_path: Path) -> None:
    from rich.console import Console

    record = {"messages": turns("<image>what?"), "images": [str(draw(tmp_path / "red.png", (220, 20, 30)))]}
    config = run_config(root, "qwen2_5_vl", dataset__path=str(write_records(tmp_path / "a.jsonl", record)))
    shown = {}
    for colors in ("truecolor", None):
        with (tmp_path / "out.txt").open("w+") as file:
            console = Console(file=file, force_terminal=colors is not None, color_system=colors, width=120)
            show_text(config, console, examples=1, step=None, ranks=1)
            file.seek(0)
            shown[colors] = file.read()
    assert "38;2;220;20;30;48;2;220;20;30m▀" in shown["truecolor"] and "48;2;255;255;255m▀" in shown["truecolor"]
    assert "▀" not in shown[None] and "[image of 40 x 40 pixels" in shown[None]


def test_the_report_and_inspect_show_images(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_config(root, "qwen2_5_vl", training__max_steps=1, output_dir=str(tmp_path / "run"))
    (tmp_path / "base.yaml").write_text((root / "run.yaml").read_text())
    train_run(tmp_path, logging__report_to="none")
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<img src="data:image/jpeg;base64,' in page and "&lt;|image_pad|&gt; x " in page.replace("&#124;", "|")
    inspect.main([str(root / "run.yaml")])
    shown = capsys.readouterr().out
    assert "[image of " in shown and "-0.png]" in "".join(shown.split())


def test_the_estimate_counts_the_activations_of_the_tower(root: Path) -> None:
    found, images = {}, 1_000_000
    cases: dict[str, Any] = {"none": {}, "lora": {"vision__train": "lora"}, "cache": {"vision__cache": True}}
    for name, changes in cases.items():
        config = run_config(root, "gemma3", **changes)
        planner = Planner.from_run(Machine.assume_gpus(1, "bf16"), config, prepare(config))
        assert 4 <= planner.lengths.images <= 8, "one or two images of four tokens"
        found[name] = replace(planner, lengths=replace(planner.lengths, images=images)).estimate(config)
    assert found["none"].moment == "vision tower" and "activations of the tower" not in found["cache"].terms
    # 28 x 28 pixels in patches of 14 are 4 patches, and 4 tokens; q, k, v, out and two layers of the MLP, in bf16.
    layer = 4 * (32 + 32) + 2 * (32 + 48)
    assert found["none"].terms["activations of the tower"] == 3 * images * 2 * layer
    assert found["lora"].terms["activations"] > 2 * found["none"].terms["activations of the tower"]


def test_max_pixels_scales_images_down_where_the_processor_can(root: Path, tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", {"messages": turns("<image>?"), "images": ["red.png"]})
    draw(tmp_path / "red.png", (220, 20, 30), 112, 56)
    bounds: list[dict[str, Any]] = [{}, {"dataset__max_pixels": 28 * 28 * 2}]
    tokens = [read(root, file, **bound).stats.image_tokens for bound in bounds]
    assert tokens == [8, 2]
    assert read(root, file, dataset__min_pixels=28 * 28 * 10).stats.image_tokens >= 10
    for family, least in (("gemma3", {}), ("qwen2_5_vl", {"dataset__min_pixels": 1 << 20})):
        more: dict[str, Any] = {"dataset__max_pixels": 784, **least}
        with pytest.raises(
            UserError, match=r"dataset.m\w\w_pixels=\d+: (has no effect on images|exceeds dataset.max_)"
        ):
            read(root, file, family, **more)


def test_a_chat_shows_its_image_in_the_first_turn(root: Path, tmp_path: Path) -> None:
    from trainer.commands.chat import Conversation
    from trainer.commands.generate import Sampling
    from trainer.model.image_reader import load_image_reader, read_prompt_images

    config, file = run_config(root, "qwen2_5_vl"), picture(tmp_path)
    model, *_ = train(config)
    tokenizer = prepare(config).tokenizer
    reader = load_image_reader(config.base_model, config.model, config.dataset, tokenizer)
    images = read_prompt_images(reader, [str(file)])
    chat = Conversation(model, tokenizer, Sampling(4), config.dataset, None, images)
    chat.ask("which colour")
    chat.ask("sure")
    assert [turn["content"].count(IMAGE_MARKER) for turn in chat.turns] == [1, 0, 0, 0]


def test_a_tiny_model_learns_the_colour_of_images(root: Path, tmp_path: Path) -> None:
    """The question is always the same: without the image, no loss below the entropy of the answers is possible."""
    write_vision_chats(tmp_path, 160, text_only=0.0, one_question=True)
    (tmp_path / "qwen2_5_vl").mkdir()
    make_vision_model(tmp_path / "qwen2_5_vl", "qwen2_5_vl", initializer_range=0.2, num_hidden_layers=2)
    run_config(
        tmp_path, "qwen2_5_vl", dataset__val_split=32, lora__r=16, lora__alpha=32, training__max_steps=50,
        training__batch_size=8, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    (tmp_path / "run.yaml").rename(tmp_path / "base.yaml")
    train_run(tmp_path, logging__report_to="none")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    first, *_, last = [record["eval/loss"] for record in records if "eval/loss" in record]
    tokens = AutoTokenizer.from_pretrained(root / "qwen2_5_vl")(list(COLORS))["input_ids"]
    tokens_per_answer = 1 + max(map(len, tokens))
    assert last * tokens_per_answer < 0.3 * math.log(len(COLORS)) < first
