"""A run's folder made by hand in milliseconds, with all that a run can leave: texts, pictures, starts, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from hezar_train import TrainerConfig
from hezar_train.config.files import write_mapping
from hezar_train.events import METRICS_FILE, JSONLinesWriter, Row

BEGUN = 1_767_323_045.0
LOGS = "2026-01-02_03-04-05_host"
SETS = {"": 0.0, "held_out_font": 0.05}
PLATES = [("۱۲ب۳۴۵", "۱۲پ۳۴۵"), ("۷۷س۹۱۲", "۷۷س۹۱"), ("۴۵ی۶۷۸", "۴۵ی۶۷۸"), ("سلام دنیا", "سلم دنیا")]


class HandmadeRun:
    """A folder that looks like that of a run which read Persian plates, was stopped once and went on."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        given = {
            "task": "image2text",
            "num_epochs": 4,
            "learning_rate": 0.002,
            "metric_for_best_model": "cer",
            **settings,
        }
        TrainerConfig(root, **given).save(root)
        self.write("plan.json", {"total_steps": 400, "steps_in_epoch": 100, "num_samples": 3200})

    def write(self, name: str, content: Any) -> Path:
        """Write a JSON file of the run."""
        return write_mapping(self.root / name, content)

    def log(self, rows: list[Row], name: str = METRICS_FILE) -> Path:
        """Append rows to the run's log."""
        path = self.root / "logs" / LOGS / name
        writer = JSONLinesWriter(path)
        writer.write(rows)
        writer.close()
        return path

    def train(self, num_steps: int = 400, pace: float = 0.5) -> HandmadeRun:
        """Log a training with an evaluation every 50 steps and a pause of an hour after step 200."""
        for step in range(10, num_steps + 1, 10):
            moment = BEGUN + step * pace + (3600 if step > 200 else 0)
            rows = [Row(step, 1 + step // 101, moment, _training(step))]
            if step % 50 == 0:
                rows.append(Row(step, 1 + step // 101, moment + 2, _evaluation(step)))
            self.log(rows)
        return self

    def note_starts(self) -> HandmadeRun:
        """Write down two starts, as the trainer does."""
        start = {
            "time": BEGUN,
            "command": "hezar-train train license_plate",
            "versions": {"python": "3.11.2", "torch": "2.13.0"},
            "hardware": {"device": "cpu", "processes": 1, "threads": 2},
            "model": {"class": "CRNN", "num_parameters": 812_345},
            "data": {"train": {"kind": "Plates", "size": 3200}},
        }
        later = {
            **start,
            "time": BEGUN + 3700,
            "step": 200,
            "hardware": {"device": "cpu", "processes": 2, "threads": 2},
        }
        self.write("environment.json", {"starts": [start, later]})
        return self

    def evaluate(self, step: int = 400, **changes: Any) -> HandmadeRun:
        """Write the record of an evaluation, with the samples that were misread, and make it the best."""
        pictures = [self._picture(step, number, target) for number, (target, _) in enumerate(PLATES)]
        worst = [
            {"sample": number, "loss": 2.5 - number / 2, "prediction": said, "target": target, "image": picture}
            for number, ((target, said), picture) in enumerate(zip(PLATES, pictures, strict=True))
        ]
        metrics = {name.removeprefix("evaluation."): value for name, value in _evaluation(step).items()}
        found = {"step": step, "epoch": 4, "metrics": metrics, "worst_samples": dict.fromkeys(SETS, worst)}
        found |= changes
        self.write(f"evaluations/{step:08d}.json", found)
        self.write("best.json", {"step": step, "metric": "evaluation.cer", "value": found["metrics"]["cer"]})
        return self

    def _picture(self, step: int, number: int, words: str) -> str:
        name = f"evaluations/{step:08d}/{number}.png"
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new("L", (160, 48), 235)
        ImageDraw.Draw(picture).text((12, 14), f"plate {number} {len(words)}", fill=20)
        picture.save(path)
        return name


def finished_run(root: Path) -> HandmadeRun:
    """Return a run with everything."""
    return HandmadeRun(root).train().note_starts().evaluate(350).evaluate(400)


def everything(folder: Path) -> str:
    """Return all that a report says, as text."""
    return (folder / "report.html").read_text(encoding="utf-8")


def data_of(page: str) -> Any:
    """Return the numbers that a page draws."""
    start = page.index('id="data">') + len('id="data">')
    return json.loads(page[start : page.index("</script>", start)])


def _training(step: int) -> dict[str, float]:
    return {
        "train.loss": 3 * math.exp(-step / 200),
        "train.recent_loss": 3 * math.exp(-step / 90) + 0.12 * math.sin(step * 1.7) ** 2,
        "train.learning_rate": 0.001 * (1 + math.cos(math.pi * step / 400)),
        "train.grad_norm": 1 + 0.6 * math.sin(step),
        "train.samples_per_second": 640 + 40 * math.cos(step / 7),
    }


def _evaluation(step: int) -> dict[str, float]:
    found = {}
    for name, harder in SETS.items():
        prefix = f"evaluation.{name}." if name else "evaluation."
        cer = 0.9 * math.exp(-step / 100) + harder
        found |= {
            f"{prefix}loss": 3 * math.exp(-step / 90) + 0.1 + harder,
            f"{prefix}cer": cer, f"{prefix}cer.low": cer * 0.9, f"{prefix}cer.high": cer * 1.12,
        }  # fmt: skip
    return found
