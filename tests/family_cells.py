"""One family of models against plain PEFT: trained, packed, in NF4, at stage 3 on two ranks, merged, exported."""

import json
import os
import shutil
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console

import trainer.memory.observed
import trainer.memory.planner
from tests.families import save_family, tiny_config
from tests.mixtures import store_dequantised
from tests.plain_peft import plain_training
from tests.runs_in_process import as_one_of_many, make_ground, train
from tests.served import serve
from tests.tiny import make_tokenizer
from trainer.checkpoint.finished_run import find_run
from trainer.commands.export.__main__ import export
from trainer.commands.merged_model import merge
from trainer.config import ModelSection, UserError, load_config
from trainer.model.base import build_empty_model, load_base_model, load_model_config
from trainer.model.model_kind import check_kind, get_auto_class
from trainer.parallel.engine.deepspeed_engine import DTYPES
from trainer.parallel.ranks.group import Ranks, skip_shm_build
from trainer.parallel.ranks.signals import StopRequest
from trainer.run import Run
from trainer.setup.preflight import prepare

CPU = torch.device("cpu")
CELLS = ("lora", "packed", "nf4", "stage3", "merged", "vllm")
RELATIVE = 1e-6
IN_64_BITS = 1e-9
LOGITS = 1e-4
"""Largest difference of the logits of a merged model from the adapted one's, which sums in another order."""
ROUNDING = 1e-3
"""A larger difference is not taken for rounding."""
NO_RESULT = "failed: no result after"
LARGEST = 20_000_000
RANKS = 2
ROWS = 4
# Adam divides by the size of a gradient; with an epsilon as large as this, one that is only rounding stays small.
COMMON: dict[str, Any] = {
    "training__max_steps": 3,
    "training__save_steps": 3,
    "training__learning_rate": 0.5,
    "training__adam_epsilon": 1.0,
    "ops__backend": "reference",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "packed": {"dataset__packing": True},
    "nf4": {"adapter": "qlora"},
    "stage3": {"zero__stage": 3, "training__batch_size": 2},
}
Cell = str
"""`equal`, `refused: ...`, `differs: ...`, `failed: ...`, or `not built: ...`."""


@contextmanager
def one_estimate() -> Iterator[None]:
    """Estimate the memory of all runs by the layers of the first one; each estimate takes half of a run's time."""
    observe = trainer.memory.observed.observe_layers
    known: list[Any] = []

    def observe_once(*arguments: Any) -> Any:
        if not known:
            known.append(observe(*arguments))
        return known[0]

    with patch.object(trainer.memory.planner, "observe_layers", observe_once):
        yield


@contextmanager
def in_64_bits() -> Iterator[None]:
    """Compute in 64 bits what is otherwise computed in 32. Differences that are only rounding disappear."""
    with ExitStack() as changes:
        changes.enter_context(patch.object(torch, "float32", torch.float64))
        changes.enter_context(patch.object(torch, "float", torch.float64))
        changes.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        changes.enter_context(
            patch.object(torch.nn.functional, "grouped_mm", multiply_groups)
        )  # torch's is for 32 bits
        changes.enter_context(patch.dict(DTYPES, fp32=torch.float64))
        changes.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        yield


def multiply_groups(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Return rows [T, I] @ weights [E, I, O], where rows offs[e - 1] to offs[e] - 1 belong to weight e."""
    ends = offs.tolist()
    parts = [rows[start:end] @ weight for start, end, weight in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])


class Family:
    """The cells of one family, in a folder of its own."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir(exist_ok=True)
        self.ground, self.kind = make_ground(folder), kind
        self._save(kind)
        self._plain: dict[tuple[str, int], tuple[list[float], Any]] = {}

    def _save(self, kind: str) -> None:
        """Save the model; a configuration without a model is enough to be refused."""
        model = self.ground / "model"
        try:
            shutil.rmtree(model)
            check_size(kind)
            save_family(model, kind)
        except Exception as error:  # raised again below, unless the product refuses the kind or its configuration first
            tiny_config(kind).save_pretrained(model)
            make_tokenizer(model)
            config = load_config(self.ground / "base.yaml").config
            model_config = load_model_config(config.base_model, config.model)
            check_kind("MODEL", model_config)
            build_empty_model(model_config, config.model)
            raise error

    def cell(self, name: str) -> Cell:
        """Return what one cell of the table holds."""
        try:
            worst = self._finished(name) if name in ("merged", "vllm") else self._trained(name)
            if RELATIVE < worst < ROUNDING and name in SETTINGS and self._trained_in_64_bits(name) <= IN_64_BITS:
                return "equal: in 64 bits"
        except UserError as error:
            return f"refused: {error}"
        except Exception as error:  # the table is to show it
            return f"failed: {describe(error)}"
        return "equal" if worst <= RELATIVE else f"differs: {worst:.1e}"

    def _trained(self, name: str) -> float:
        """Return how far losses and factors are from plain PEFT's."""
        run, settings = self.ground / name, COMMON | SETTINGS[name] | {"output_dir": str(self.ground / name)}
        (train_on_ranks if name == "stage3" else train)(self.ground, **settings)
        losses, model = self._reference(name, ROWS // RANKS if name == "stage3" else ROWS)
        ours = read_losses(run)
        assert len(ours) == len(losses), "steps are missing"
        return max(compare_losses(ours, losses), compare_adapters(self._load(run), model))

    def _trained_in_64_bits(self, name: str) -> float:
        """Return the same in 64 bits. NF4 has none: it must equal LoRA on the dequantized weights, and LoRA counts."""
        if name == "nf4":
            run = self.ground / "lora-dequantised"
            train(self.ground, **COMMON, base_model=str(self.ground / "dequantised"), output_dir=str(run))
            losses, ours = read_losses(self.ground / name), self._load(self.ground / name)
            if max(compare_losses(losses, read_losses(run)), compare_adapters(ours, self._load(run))) > RELATIVE:
                return ROUNDING
        with in_64_bits():  # also the model's file
            family = Family(self.ground / f"{name}-in-64-bits", self.kind)
            return family._trained("lora" if name == "nf4" else name)

    def _reference(self, name: str, rows: int) -> tuple[list[float], Any]:
        """Return plain PEFT's losses and model, trained on global batches of `ROWS` in micro-batches of `rows`."""
        kind = "lora" if name == "stage3" else name
        if (kind, rows) not in self._plain:
            settings = COMMON | {"output_dir": str(self.ground / f"plain-{kind}"), "ops__backend": "peft"}
            if kind == "nf4":
                model = store_dequantised(self.ground / "model", self.ground / "dequantised", four_bit=True)
                settings["base_model"] = str(model)
            settings |= {"dataset__packing": kind == "packed", "training__batch_size": rows}
            settings["training__gradient_accumulation_steps"] = ROWS // rows
            listed = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
            config = load_config(self.ground / "base.yaml", listed).config
            self._plain[kind, rows] = plain_training(config, device=CPU)
        return self._plain[kind, rows]

    def _load(self, run: Path) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(self._base(self.ground / "model"), str(run))

    def _base(self, folder: Path) -> Any:
        return load_base_model(str(folder), ModelSection(), dtype=torch.float32, device=CPU, attention=None)

    def _finished(self, name: str) -> float:
        """Compare all weights of the merged model, or of the base with the exported adapter, with PEFT's own merge."""
        if not (self.ground / "lora" / "adapter_model.safetensors").exists():
            train(self.ground, **COMMON, output_dir=str(self.ground / "lora"))
        run, output = find_run(self.ground / "lora"), self.ground / f"{name}-model"
        if name == "merged":
            found = self._base(merge(run, output))
        else:
            export(run, "vllm", output)
            found = serve(self._base(self.ground / "model"), "vllm", output)
        adapted = self._load(self.ground / "lora")
        apart = difference(logits(found), logits(adapted))
        assert apart <= LOGITS, f"its logits are those of another model: {apart:.1e}"
        expected = adapted.merge_and_unload().state_dict()
        values = found.state_dict()
        assert values.keys() == expected.keys(), "other weights"
        return max(difference(values[key], value) for key, value in expected.items())


def check_size(kind: str) -> None:
    """Raise ValueError if the family's tiny configuration is not tiny."""
    with torch.device("meta"):
        config = tiny_config(kind)
        model = get_auto_class(config).from_config(config)
    if (count := sum(parameter.numel() for parameter in model.parameters())) > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} million parameters with the sizes of tests/families.py")


def read_losses(run: Path) -> list[float]:
    """Return the training losses of a run's steps."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["train/loss"] for record in records if "train/loss" in record]


def compare_losses(ours: list[float], plain: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))


def compare_adapters(ours: Any, plain: Any) -> float:
    """Return the largest difference of a factor as a fraction of the largest such factor."""
    found, expected = (
        {name: value for name, value in model.named_parameters() if "lora_" in name} for model in (ours, plain)
    )
    assert found.keys() == expected.keys(), "other layers are adapted"
    worst = 0.0
    for side in ("lora_A", "lora_B"):
        names = [name for name in expected if side in name]
        size = max(float(expected[name].detach().abs().max()) for name in names)
        worst = max(worst, *(float((found[name] - expected[name]).detach().abs().max()) / size for name in names))
    return worst


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return the logits of some tokens."""
    found: torch.Tensor = model.eval()(input_ids=torch.arange(3, 27)[None], use_cache=False).logits
    return found


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a fraction of the largest value."""
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found.double() - expected.double()).abs().max()) / size if size else float(found.abs().sum())


def train_on_ranks(ground: Path, **overrides: Any) -> None:
    """Run on `RANKS` forks of this process, which must not have trained yet. Raises what rank 0 raised."""
    settings = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in overrides.items()]
    with TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        folder, ranks, port = Path(name), [], free.getsockname()[1]
        free.close()
        for rank in range(RANKS):
            if not (process := os.fork()):
                try:
                    with _joined(folder, rank, port):
                        loaded = load_config(ground / "base.yaml", settings)
                        with (folder / f"console-{rank}").open("w") as file, as_one_of_many():
                            console = Console(file=file, width=200)
                            Run(
                                loaded, prepare(loaded.config), Ranks(rank, RANKS, rank), console, StopRequest()
                            ).train()
                except BaseException as error:
                    kind = "UserError" if isinstance(error, UserError) else "Error"
                    text = str(error) if kind == "UserError" else describe(error)
                    (folder / f"{kind}-{rank}").write_text(text)
                    os._exit(1)
                os._exit(0)
            ranks.append(process)
        ended = [os.waitpid(process, 0)[1] for process in ranks]
        for rank in range(RANKS):
            for kind, raised in (("UserError", UserError), ("Error", RuntimeError)):
                if (folder / f"{kind}-{rank}").exists():
                    raise raised((folder / f"{kind}-{rank}").read_text())
        assert ended == [0] * RANKS, f"a rank ended with {ended}"


@contextmanager
def _joined(folder: Path, rank: int, port: int) -> Iterator[None]:
    from deepspeed import comm

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ.update(place, LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = dist.FileStore(str(folder / "store"), RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    with skip_shm_build():
        comm.init_distributed("gloo", verbose=False)
    yield
    dist.barrier()


def describe(error: BaseException) -> str:
    """Return type, first line and innermost place of an exception, without folders."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first} ({Path(place.filename).name}, {place.name})"


def measure(folder: Path, kind: str, names: tuple[str, ...] = CELLS) -> dict[str, Cell]:
    """Return all cells of a family; the ranks of stage 3 start first, as forks of a process that has not trained."""
    try:
        family = Family(folder, kind)
    except UserError as error:
        return dict.fromkeys(names, f"refused: {error}")
    except Exception as error:  # of any model code; the table shows it
        return dict.fromkeys(names, f"not built: {describe(error)}")
    with one_estimate():
        found = {name: family.cell(name) for name in sorted(names, key=lambda name: name != "stage3")}
    return {name: found[name] for name in names}


def run_forked(work: Callable[[], Any], timeout_s: float, cpu_s: float = float("inf")) -> Any:
    """Return the result of `work` in a fork of this process, or the reason why there is none.

    `cpu_s` limits the processor time of each process, which other programs on the machine do not use up.
    """
    import resource
    import signal
    import time

    with TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        if not (process := os.fork()):
            os.setpgid(0, 0)
            if cpu_s != float("inf"):
                resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s)))
            try:
                result.write_text(json.dumps(work()))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        with suppress(OSError):  # the fork sets it too; whichever comes first
            os.setpgid(process, process)
        end = time.monotonic() + timeout_s
        while not os.waitpid(process, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return f"{NO_RESULT} {timeout_s:.0f} s"
            time.sleep(0.1)
        return json.loads(result.read_text()) if result.exists() else "failed: the process ended"
