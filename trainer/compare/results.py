"""What a comparison measured: held-out bits per token (BPT) with intervals, S and lambda, differences that are paired.

BPT of a run = sum of token losses (nats) / number of target tokens / ln 2, over all held-out documents, at the end and
at the evaluation where it was lowest. A setting's BPT is the mean over its seeds.

Interval of a setting: percentile bootstrap (Efron, 1979) over documents, its seeds kept; the spread over the seeds is
given beside it. Interval of a difference of two settings: documents and seeds are both drawn with replacement, and both
settings are measured on the same draw (the same documents, runs of the same seed): what they have in common cancels.
With three seeds the part of the seeds is rough.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.compare.run import DOCUMENTS_FILE
from trainer.compare.trials import Setting, Trial
from trainer.config import UserError

CONFIDENCE = 0.95
MOMENTS = ("final", "best")
MEAN_OF = (
    "best_step",
    "final_training_bpt",
    "final_param_bpt",
    "final_penalty_nats",
    "final_s",
    "step_in_deadband",
    "share_in_deadband",
    "final_lambda",
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

    @property
    def curve(self) -> Values:
        """Held-out bits per token at each evaluation."""
        curve: Values = self.losses_ED.sum(1) / self.tokens_D.sum() / math.log(2)
        return curve

    def index(self, moment: str) -> int:
        """The evaluation that counts: the last one, or the one with the lowest held-out loss."""
        return len(self.steps) - 1 if moment == "final" else int(np.argmin(self.curve))

    def numbers(self) -> dict[str, Any]:
        """What the run came to, a row of compare.csv."""
        setting, scu, last, best = self.trial.setting, self.trial.config.scu, self.records[-1], self.index("best")
        inside = [abs(record["error"]) <= scu.deadband for record in self.records]
        reached = inside.index(True) if True in inside else None
        steered = setting.controller == "pi"
        return {
            "setting": setting.label,
            "measure": setting.measure,
            "controller": setting.controller,
            "lambda": setting.strength,
            "seed": self.trial.seed,
            "start_bpt": float(self.curve[0]),
            "final_bpt": float(self.curve[-1]),
            "best_bpt": float(self.curve[best]),
            "best_step": self.steps[best],
            "final_training_bpt": float(np.mean([record["data_bpt"] for record in self.records[-TRAINING_MEAN_OVER:]])),
            "final_param_bpt": last["param_bpt"],
            "final_penalty_nats": last["reg_loss"],
            "final_s": last["s_smoothed"],
            "target": scu.target if steered else None,
            "step_in_deadband": self.records[reached]["step"] if steered and reached is not None else None,
            "share_in_deadband": float(np.mean(inside[reached:])) if steered and reached is not None else None,
            "final_lambda": last["lambda"],
        }


@dataclass(frozen=True)
class Interval:
    """A number and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, sign: str = "") -> str:
        """`1.234 [1.200, 1.270]`"""
        return f"{self.value:{sign}.4f} [{self.low:{sign}.4f}, {self.high:{sign}.4f}]"


class Comparison:
    """All results, by setting in the order of the plan; every setting's runs in the order of their seeds."""

    def __init__(self, results: Sequence[Result], *, draws: int) -> None:
        self.results = list(results)
        self.by_setting: dict[Setting, list[Result]] = {}
        for result in results:
            self.by_setting.setdefault(result.trial.setting, []).append(result)
        # One set of draws for everything: intervals do not change with what else is asked.
        generator = np.random.default_rng(0)
        count = len(results[0].tokens_D)
        self.tokens_D = results[0].tokens_D
        # How often each document is in each draw: a product with it sums the drawn documents.
        self._drawn_BD = generator.multinomial(count, [1.0 / count] * count, size=draws).astype(np.float64)
        self._seed_draws_BS = generator.random((draws, max(map(len, self.by_setting.values()))))

    def losses(self, setting: Setting, moment: str) -> dict[int, Values]:
        """Seed -> loss sum of each document, nats."""
        return {run.trial.seed: run.losses_ED[run.index(moment)] for run in self.by_setting[setting]}

    def bpt(self, setting: Setting, moment: str) -> Interval:
        """Mean over the seeds, with its interval over documents."""
        mean_D = np.mean(list(self.losses(setting, moment).values()), axis=0)
        value = float(mean_D.sum() / self.tokens_D.sum())
        return _interval(value, (self._drawn_BD @ mean_D) / (self._drawn_BD @ self.tokens_D))

    def difference(self, one: Setting, other: Setting, moment: str) -> Interval | None:
        """BPT of `one` minus that of `other`, over the seeds that both have; None if there is none."""
        ones, others = self.losses(one, moment), self.losses(other, moment)
        seeds = sorted(ones.keys() & others.keys())
        if not seeds:
            return None
        difference_SD = np.array([ones[seed] - others[seed] for seed in seeds])
        drawn_BS = (self._drawn_BD @ difference_SD.T) / (self._drawn_BD @ self.tokens_D)[:, None]
        picked_BS = (self._seed_draws_BS[:, : len(seeds)] * len(seeds)).astype(np.int64)
        value = float(difference_SD.mean(0).sum() / self.tokens_D.sum())
        return _interval(value, np.take_along_axis(drawn_BS, picked_BS, axis=1).mean(1))

    def find(self, controller: str, measure: str | None = None) -> list[Setting]:
        """The settings of a controller, and of a measure."""
        return [
            setting
            for setting in self.by_setting
            if setting.controller == controller and measure in (None, setting.measure)
        ]

    def best_fixed(self, measure: str, moment: str) -> Setting | None:
        """The fixed lambda with the lowest BPT; chosen on the very documents it is then compared on, to its favour."""
        return min(self.find("fixed", measure), key=lambda setting: self.bpt(setting, moment).value, default=None)

    def rows(self) -> Iterator[dict[str, Any]]:
        """What each setting came to."""
        nothing = next(iter(self.find("none")), None)
        for setting, runs in self.by_setting.items():
            numbers = [run.numbers() for run in runs]
            row: dict[str, Any] = {"setting": setting.label, **asdict(setting), "runs": len(runs)}
            for moment in MOMENTS:
                values = [number[f"{moment}_bpt"] for number in numbers]
                row[f"{moment}_bpt"] = self.bpt(setting, moment)
                row[f"{moment}_bpt_over_seeds"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
                other = None if nothing in (None, setting) else self.difference(setting, nothing, moment)
                row[f"{moment}_minus_none"] = other
            for name in MEAN_OF:
                known = [number[name] for number in numbers if number[name] is not None]
                row[name] = float(np.mean(known)) if known else None
            yield row


def read_results(trials: Sequence[Trial]) -> list[Result]:
    """Read what finished trials wrote. Raises UserError if they were not measured on the same documents."""
    results = []
    data: dict[str, Trial] = {}
    for trial in trials:
        written = json.loads((trial.folder / DOCUMENTS_FILE).read_text(encoding="utf-8"))
        data.setdefault(written["data"], trial)
        losses_ED = np.array([entry["loss_sums"] for entry in written["evaluations"]], dtype=np.float64)
        steps = [entry["step"] for entry in written["evaluations"]]
        tokens_D = np.array(written["target_tokens"], dtype=np.float64)
        records = json.loads((trial.folder / "scu_metrics.json").read_text(encoding="utf-8"))
        results.append(Result(trial, steps, losses_ED, tokens_D, records))
    if len(data) > 1:
        first, second = list(data.values())[:2]
        raise UserError(f"{second.folder}: trained on other data than {first.folder}; name another --output")
    return results


def _interval(value: float, draws: Values) -> Interval:
    """From nats to bits."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(value / math.log(2), float(low) / math.log(2), float(high) / math.log(2))
