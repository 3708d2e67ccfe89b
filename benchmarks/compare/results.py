"""Measurements of a comparison: held-out bits per token (BPT) with intervals, S and lambda, and paired differences.

BPT of a run = sum of token losses (nats) / number of target tokens / ln 2, over all held-out documents, at the end and
at the evaluation where it was lowest. A setting's BPT is the mean over its seeds.

Two more moments show alternatives for the same runs. *stopped*: early stopping at the evaluation that is best on one
half of the documents, measured on the other half, and vice versa, so that the stopping text is not the reported one.
*scaled*: the same choice among scales of the finished adapter.

Interval of a setting: percentile bootstrap (Efron, 1979) over documents, its seeds kept; the spread over the seeds is
reported separately. Interval of a difference of two settings: documents and seeds are both drawn with replacement, and
both settings are measured on the same draw (the same documents, runs of the same seed), so that common effects cancel.
With three seeds the bootstrap over seeds is too narrow, so a t interval over the seeds' own differences is reported
too: "lower" is only claimed if both exclude zero.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.compare.measured_run import DOCUMENTS_FILE, SCALES
from benchmarks.compare.trials import Setting, Trial
from trainer.config import UserError

CONFIDENCE = 0.95
MOMENTS = ("final", "best", "stopped", "scaled")
MEAN_OF = (
    "best_step",
    "final_training_bpt",
    "final_param_bpt",
    "final_penalty_nats",
    "final_s",
    "step_in_deadband",
    "fraction_in_deadband",
    "final_lambda",
    "scale",
    "text_kl_bits",
    "text_bpt_rise",
)
TRAINING_MEAN_OVER = 20
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """One finished run. `losses_ED`: sum of token losses, nats, of each document at each evaluation."""

    trial: Trial
    steps: list[int]
    losses_ED: Values
    tokens_D: Values
    records: list[dict[str, Any]]
    scaled_FD: Values | None = None
    """The same for the finished adapter at each of SCALES."""
    texts: dict[str, Any] | None = None
    """For the texts that measure forgetting: tokens, and loss and KL sums at each evaluation."""

    @property
    def curve(self) -> Values:
        curve: Values = self.losses_ED.sum(1) / self.tokens_D.sum() / math.log(2)
        return curve

    @property
    def trained(self) -> int:
        """Number of evaluations of the adapter as trained, without one that was scaled to its target at the end."""
        return len(self.steps) - (self.steps[-2:].count(self.steps[-1]) == 2)

    def index(self, moment: str) -> int:
        """Return the evaluation of a moment: the last one, or the one with the lowest held-out loss."""
        return len(self.steps) - 1 if moment == "final" else int(np.argmin(self.curve))

    def losses(self, moment: str) -> Values | None:
        """Return the loss sum of each document, nats; None if it was not measured."""
        if moment == "stopped":
            return cross_validated_losses(self.losses_ED)
        if moment == "scaled":
            return None if self.scaled_FD is None else cross_validated_losses(self.scaled_FD)
        losses: Values = self.losses_ED[self.index(moment)]
        return losses

    def bpt(self, moment: str) -> float | None:
        losses = self.losses(moment)
        return None if losses is None else float(losses.sum() / self.tokens_D.sum() / math.log(2))

    def forgetting(self, index: int) -> tuple[float, float] | tuple[None, None]:
        """Return K on the texts and the rise of their loss since the start, in bits per token, at one evaluation."""
        if self.texts is None:
            return None, None
        kl_ED, losses_ED, nats = self.texts["kl"], self.texts["losses"], self.texts["tokens"] * math.log(2)
        return float(kl_ED[index].sum() / nats), float((losses_ED[index] - losses_ED[0]).sum() / nats)

    def numbers(self) -> dict[str, Any]:
        """Return the run's row of compare.csv."""
        setting, scu, last, best = self.trial.setting, self.trial.config.scu, self.records[-1], self.index("best")
        inside = [abs(record["error"]) <= float(scu.deadband) for record in self.records]
        reached = inside.index(True) if True in inside else None
        steered = setting.controller == "pi"
        kl_bits, rise = self.forgetting(-1)
        return {
            "setting": setting.label,
            "measure": setting.measure,
            "controller": setting.controller,
            "lambda": setting.lambda_,
            "seed": self.trial.seed,
            "start_bpt": float(self.curve[0]),
            "final_bpt": float(self.curve[-1]),
            "best_bpt": float(self.curve[best]),
            "best_step": self.steps[best],
            "stopped_bpt": self.bpt("stopped"),
            "scaled_bpt": self.bpt("scaled"),
            "scale": None if self.scaled_FD is None else SCALES[best_scale(self.scaled_FD)],
            "text_kl_bits": kl_bits,
            "text_bpt_rise": rise,
            "final_training_bpt": float(np.mean([record["data_bpt"] for record in self.records[-TRAINING_MEAN_OVER:]])),
            "final_param_bpt": last.get("param_bpt"),
            "final_penalty_nats": last["reg_loss"],
            "final_s": last["kl_smoothed" if "kl_smoothed" in last else "s_smoothed"],
            "target": scu.target if steered else None,
            "step_in_deadband": self.records[reached]["step"] if steered and reached is not None else None,
            "fraction_in_deadband": float(np.mean(inside[reached:])) if steered and reached is not None else None,
            "final_lambda": last["lambda"],
        }


@dataclass(frozen=True)
class Interval:
    """A number and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float
    over_seeds: tuple[float, float] | None = None
    """Student's interval of the difference, over the differences of the seeds."""

    @property
    def sign(self) -> int:
        """-1 or 1 if every interval excludes zero, else 0."""
        low, high = self.over_seeds or (-math.inf, math.inf)
        if max(self.high, high) < 0:
            return -1
        return 1 if min(self.low, low) > 0 else 0

    def text(self, sign: str = "") -> str:
        """Format as `1.234 [1.200, 1.270]`."""
        return f"{self.value:{sign}.4f} [{self.low:{sign}.4f}, {self.high:{sign}.4f}]"


class Comparison:
    """All results by setting, in the order of the plan; every setting's runs in the order of their seeds."""

    def __init__(self, results: Sequence[Result], *, draws: int) -> None:
        self.results = list(results)
        self.by_setting: dict[Setting, list[Result]] = {}
        for result in results:
            self.by_setting.setdefault(result.trial.setting, []).append(result)
        # One set of draws, so that intervals do not depend on the order of calls.
        generator = np.random.default_rng(0)
        count = len(results[0].tokens_D)
        self.tokens_D = results[0].tokens_D
        # Counts of each document in each draw: a product with it sums the drawn documents.
        self._drawn_BD = generator.multinomial(count, [1.0 / count] * count, size=draws).astype(np.float64)
        self._seed_draws_BS = generator.random((draws, max(map(len, self.by_setting.values()))))

    def losses(self, setting: Setting, moment: str) -> dict[int, Values]:
        """Return seed -> loss sum of each document, nats, of the runs that measured it."""
        found = {run.trial.seed: run.losses(moment) for run in self.by_setting[setting]}
        return {seed: losses for seed, losses in found.items() if losses is not None}

    def bpt(self, setting: Setting, moment: str) -> Interval:
        """Return the mean over the seeds, with its interval over documents."""
        mean_D = np.mean(list(self.losses(setting, moment).values()), axis=0)
        value = float(mean_D.sum() / self.tokens_D.sum())
        return _interval(value, (self._drawn_BD @ mean_D) / (self._drawn_BD @ self.tokens_D))

    def difference(self, one: Setting, other: Setting, moment: str, of_other: str | None = None) -> Interval | None:
        """Return BPT of `one` minus that of `other`, over their common seeds; None without any.

        `of_other`: the moment of the other, if different.
        """
        ones, others = self.losses(one, moment), self.losses(other, of_other or moment)
        seeds = sorted(ones.keys() & others.keys())
        if not seeds:
            return None
        difference_SD = np.array([ones[seed] - others[seed] for seed in seeds])
        drawn_BS = (self._drawn_BD @ difference_SD.T) / (self._drawn_BD @ self.tokens_D)[:, None]
        picked_BS = (self._seed_draws_BS[:, : len(seeds)] * len(seeds)).astype(np.int64)
        value = float(difference_SD.mean(0).sum() / self.tokens_D.sum())
        interval = _interval(value, np.take_along_axis(drawn_BS, picked_BS, axis=1).mean(1))
        return replace(
            interval, over_seeds=compute_t_interval(difference_SD.sum(1) / self.tokens_D.sum() / math.log(2))
        )

    def find(self, controller: str, measure: str | None = None) -> list[Setting]:
        """Return the settings of a controller, and of a measure if given."""
        return [
            setting
            for setting in self.by_setting
            if setting.controller == controller and measure in (None, setting.measure)
        ]

    def best_fixed(self, measure: str, moment: str) -> Setting | None:
        """Return the fixed lambda with the lowest BPT; chosen on the evaluated documents, which favors it."""
        return min(self.find("fixed", measure), key=lambda setting: self.bpt(setting, moment).value, default=None)

    def edge(self, measure: str, moment: str) -> tuple[Setting, str] | None:
        """Return the best fixed lambda and the end of the sweep it is at, if the sweep has several and it is at one."""
        family, best = self.find("fixed", measure), self.best_fixed(measure, moment)
        if best is None or len(family) < 2 or best not in (family[0], family[-1]):
            return None
        return best, "smallest" if best == family[0] else "largest"

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a summary of each setting."""
        nothing = next(iter(self.find("none")), None)
        for setting, runs in self.by_setting.items():
            numbers = [run.numbers() for run in runs]
            row: dict[str, Any] = {"setting": setting.label, **asdict(setting), "runs": len(runs)}
            for moment in MOMENTS:
                values = [number[f"{moment}_bpt"] for number in numbers if number[f"{moment}_bpt"] is not None]
                row[f"{moment}_bpt"] = self.bpt(setting, moment) if values else None
                row[f"{moment}_bpt_over_seeds"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
                other = None if nothing in (None, setting) else self.difference(setting, nothing, moment)
                row[f"{moment}_minus_none"] = other
            for name in MEAN_OF:
                known = [number[name] for number in numbers if number[name] is not None]
                row[name] = float(np.mean(known)) if known else None
            yield row


def read_results(trials: Sequence[Trial]) -> list[Result]:
    """Read the results of finished trials. Raises UserError if they were measured on different documents."""
    results = []
    data: dict[str, Trial] = {}
    for trial in trials:
        written = json.loads((trial.folder / DOCUMENTS_FILE).read_text(encoding="utf-8"))
        data.setdefault(written["data"], trial)
        losses_ED = np.array([entry["loss_sums"] for entry in written["evaluations"]], dtype=np.float64)
        steps = [entry["step"] for entry in written["evaluations"]]
        tokens_D = np.array(written["target_tokens"], dtype=np.float64)
        records = json.loads((trial.folder / "scu_metrics.json").read_text(encoding="utf-8"))
        scaled = [entry["loss_sums"] for entry in written.get("scaled", [])]
        scaled_FD = np.array(scaled, dtype=np.float64) if scaled else None
        results.append(Result(trial, steps, losses_ED, tokens_D, records, scaled_FD, _texts(written)))
    if len(data) > 1:
        first, second = list(data.values())[:2]
        raise UserError(f"{second.folder}: trained on other data than {first.folder}; use another --output")
    return results


def _texts(written: dict[str, Any]) -> dict[str, Any] | None:
    entries = written.get("texts")
    if not entries:
        return None
    kl, losses = (np.array([entry[name] for entry in entries]) for name in ("kl_sums", "loss_sums"))
    return {"tokens": float(sum(written["text_tokens"])), "kl": kl, "losses": losses}


def compute_t_interval(values: Values) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean of a sample; None for a sample of one."""
    if len(values) < 2:
        return None
    half = compute_t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def compute_t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t.

    Source: Abramowitz and Stegun, table 26.10, and their expansion 26.7.5 beyond it.
    """
    table = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    if freedom <= len(table):
        return table[freedom - 1]
    z, n = 1.959964, float(freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


def _interval(value: float, draws: Values) -> Interval:
    """Convert from nats to bits."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(value / math.log(2), float(low) / math.log(2), float(high) / math.log(2))


def best_scale(losses_FD: NDArray[np.float64]) -> int:
    """Return the row with the lowest sum, of losses by factor F and document D."""
    return int(np.argmin(losses_FD.sum(1)))


def cross_validated_losses(losses_FD: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each document's loss at the scale that is best on the half of the documents without it."""
    chosen = np.empty(losses_FD.shape[1])
    for half in (0, 1):
        chosen[half::2] = losses_FD[best_scale(losses_FD[:, 1 - half :: 2]), half::2]
    return chosen
