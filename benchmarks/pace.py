"""Compare the pace of the trainer with that of a loop written by hand, and fail if it falls behind its limit.

    python benchmarks/pace.py [tiny|ordinary|workers|accumulation|small|large|all] [--peers] [--rounds 7]
                              [--plot FILE] [--json FILE] [--profile]

Every contestant runs in a fresh process, on one thread and on a pseudo-terminal, one after another, several rounds
over. Each stamps the time after its first log period and after its last step, so that imports and set-up count for
nobody.
What is judged is the ratio of minima over all rounds; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import os
import pstats
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RATE = 1e-3
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01
PROFILE_LINES = 40
MUCH_NOISE = 0.05
LABELS = 10
NUM_INPUTS, TOKENS, VOCABULARY = 32, 32, 1000
FLOOR, FLOOR_AGAIN, TRAINER = "bare", "bare-again", "hezar_train"
ROUNDS, ROUNDS_OF_ALL = 7, 3


@dataclass(frozen=True)
class Encoder:
    """The measures of a transformer encoder and of what it reads."""

    width: int
    num_layers: int
    num_heads: int
    num_tokens: int


@dataclass(frozen=True)
class Workload:
    """What is trained, for how long, and how much slower than the bare loop the trainer may be."""

    batch_size: int
    num_steps: int
    limit: float
    as_rows: bool = False  # a dict for each index and a collate function, instead of a TensorDataset
    num_workers: int = 0
    accumulation: int = 1
    log_updates: int = 50
    encoder: Encoder | None = None  # None: a perceptron

    @property
    def log_steps(self) -> int:
        """Steps between two log entries, and before the clock starts."""
        return self.log_updates * self.accumulation

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        return self.num_steps // self.accumulation


WORKLOADS = {
    "tiny": Workload(batch_size=8, num_steps=6000, limit=1.10),
    "ordinary": Workload(batch_size=8, num_steps=6000, limit=1.00, as_rows=True),
    "workers": Workload(batch_size=8, num_steps=6000, limit=1.10, as_rows=True, num_workers=2),
    "accumulation": Workload(batch_size=8, num_steps=6000, limit=1.10, as_rows=True, accumulation=4),
    "small": Workload(batch_size=16, num_steps=200, limit=1.02, encoder=Encoder(128, 2, 4, TOKENS)),
    "large": Workload(batch_size=2, num_steps=60, limit=1.02, log_updates=10, encoder=Encoder(512, 8, 8, 16)),
}


class Clock:
    """Measure from the end of the first log period to the end of the last step."""

    def __init__(self, first_step: int, last_step: int, profiler: cProfile.Profile | None = None) -> None:
        self._first, self._last, self._profiler = first_step, last_step, profiler
        self._step = 0
        self._start = 0.0
        self.seconds: float | None = None

    def tick(self) -> None:
        """Count a step that has just ended."""
        self._step += 1
        if self._step == self._first:
            if self._profiler:
                self._profiler.enable()
            self._start = time.perf_counter()
        elif self._step == self._last:
            self.seconds = time.perf_counter() - self._start
            if self._profiler:
                self._profiler.disable()


def make_model(workload: str) -> Any:
    """Build the network of a workload; it returns logits."""
    from torch import nn

    setting = WORKLOADS[workload]
    if setting.encoder:
        return make_encoder(setting.encoder)
    layers = nn.Sequential(nn.Linear(NUM_INPUTS, 64), nn.ReLU(), nn.Linear(64, LABELS))
    if not setting.as_rows:
        return layers

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, inputs: Any) -> Any:
            return self.layers(inputs)

    return Net()


def make_encoder(shape: Encoder) -> Any:
    """Build a transformer encoder that labels rows of tokens."""
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(
                shape.width, shape.num_heads, dim_feedforward=4 * shape.width, batch_first=True
            )
            self.embedding = nn.Embedding(VOCABULARY, shape.width)
            self.encoder = nn.TransformerEncoder(layer, shape.num_layers)
            self.head = nn.Linear(shape.width, LABELS)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))

    return Net()


def make_dataset(workload: str) -> Any:
    """Make random samples for one epoch."""
    import torch
    from torch.utils.data import TensorDataset

    setting = WORKLOADS[workload]
    size = setting.batch_size * setting.num_steps
    if setting.encoder:
        inputs = torch.randint(VOCABULARY, (size, setting.encoder.num_tokens))
    else:
        inputs = torch.randn(size, NUM_INPUTS)
    make = Rows if setting.as_rows else TensorDataset
    return make(inputs, torch.randint(LABELS, (size,)))


class Rows:
    """A dataset as people write it: a dict of tensors for each index."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self._inputs[index], "labels": self._labels[index]}


def stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch, as people write it."""
    import torch

    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def collate_of(workload: str) -> Callable[[list[Any]], Any] | None:
    """Return the collate function of a workload; None: torch's own."""
    return stack if WORKLOADS[workload].as_rows else None


def pair_of(batch: Any) -> Any:
    """Return the inputs and labels of a batch."""
    return (batch["inputs"], batch["labels"]) if isinstance(batch, dict) else batch


def make_loader(workload: str) -> Any:
    """Make the loader of a loop written by hand."""
    from torch.utils.data import DataLoader

    setting = WORKLOADS[workload]
    return DataLoader(
        make_dataset(workload),
        batch_size=setting.batch_size,
        shuffle=True,
        collate_fn=collate_of(workload),
        num_workers=setting.num_workers,
        persistent_workers=setting.num_workers > 0,
    )


def make_optimizer(workload: str, model: Any) -> tuple[Any, Any]:
    """Make an optimizer and the schedule that ticks at each of its updates."""
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LinearLR

    optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY, fused=True)
    total = WORKLOADS[workload].num_updates
    return optimizer, LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=total)


def run_bare(workload: str, clock: Clock) -> None:
    """Train as one would write it by hand."""
    from torch.nn import CrossEntropyLoss
    from torch.nn.utils import clip_grad_norm_

    log_steps, accumulation = WORKLOADS[workload].log_steps, WORKLOADS[workload].accumulation
    model, loader, criterion = make_model(workload), make_loader(workload), CrossEntropyLoss()
    optimizer, scheduler = make_optimizer(workload, model)
    model.train()
    for step, batch in enumerate(loader, start=1):
        inputs, labels = pair_of(batch)
        loss = criterion(model(inputs), labels)
        (loss if accumulation == 1 else loss / accumulation).backward()
        if step % accumulation == 0:
            clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % log_steps == 0:
            print(f"step {step} loss {loss.item():.4f}")
        clock.tick()


def run_accelerate(workload: str, clock: Clock) -> None:
    """Train as Accelerate's documentation writes it."""
    from accelerate import Accelerator
    from torch.nn import CrossEntropyLoss

    log_steps, accumulation = WORKLOADS[workload].log_steps, WORKLOADS[workload].accumulation
    model, loader, criterion = make_model(workload), make_loader(workload), CrossEntropyLoss()
    optimizer, scheduler = make_optimizer(workload, model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    model.train()
    for step, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model) if accumulation > 1 else contextlib.nullcontext():
            inputs, labels = pair_of(batch)
            loss = criterion(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        if step % log_steps == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f}")
        clock.tick()


def run_trainer(workload: str, clock: Clock) -> None:
    """Train with this library: progress bar, JSON lines, CSV, TensorBoard, ledger and all."""
    from hezar_train import Hook, Trainer, TrainerConfig

    class Watch(Hook):
        def after_step(self) -> None:
            clock.tick()

    setting = WORKLOADS[workload]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(
            output_dir=folder,
            num_epochs=1,
            batch_size=setting.batch_size,
            gradient_accumulation_steps=setting.accumulation,
            num_dataloader_workers=setting.num_workers,
            use_cpu=True,
            optimizer="adamw",
            learning_rate=RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler="linear",
            lr_scheduler_kwargs={"start_factor": 1.0, "end_factor": 0.0},
            lr_scheduling_steps=1,
            log_steps=setting.log_steps,
            criterion="CrossEntropyLoss",
        )
        data = make_dataset(workload)
        Trainer(config, make_model(workload), data, data_collator=collate_of(workload), hooks=[Watch()]).train()


def run_transformers(workload: str, clock: Clock) -> None:
    """Train with the Trainer of transformers, as its documentation does a model of one's own."""
    from torch import nn
    from torch.utils.data import default_collate
    from transformers import Trainer, TrainerCallback, TrainingArguments

    setting = WORKLOADS[workload]

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.criterion = make_model(workload), nn.CrossEntropyLoss()

        def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
            logits = self.network(inputs)
            return {"loss": self.criterion(logits, labels), "logits": logits}

    class Watch(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

        on_step_end = on_substep_end

    def name_the_pair(rows: list[Any]) -> dict[str, Any]:
        inputs, labels = default_collate(rows)
        return {"inputs": inputs, "labels": labels}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=setting.batch_size,
            gradient_accumulation_steps=setting.accumulation,
            dataloader_num_workers=setting.num_workers,
            dataloader_persistent_workers=setting.num_workers > 0,
            dataloader_pin_memory=False,
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler_type="linear",
            logging_steps=setting.log_updates,
            save_strategy="no",
        )
        collate = collate_of(workload) or name_the_pair
        data = make_dataset(workload)
        Trainer(WithLoss(), arguments, collate, data, callbacks=[Watch()]).train()


def run_lightning(workload: str, clock: Clock) -> None:
    """Train with Lightning's Trainer, as its documentation writes it."""
    import lightning
    from torch import nn

    setting = WORKLOADS[workload]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.criterion = make_model(workload), nn.CrossEntropyLoss()

        def training_step(self, batch: Any, _: int) -> Any:
            inputs, labels = pair_of(batch)
            loss = self.criterion(self.network(inputs), labels)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer, scheduler = make_optimizer(workload, self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            default_root_dir=folder,
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=setting.accumulation,
            gradient_clip_val=MAX_GRAD_NORM,
            log_every_n_steps=setting.log_updates,
            enable_checkpointing=False,
            callbacks=[Watch()],
        )
        trainer.fit(Module(), make_loader(workload))


def run_pytorch_accelerated(workload: str, clock: Clock) -> None:
    """Train with pytorch-accelerated's Trainer, as its documentation writes it."""
    from functools import partial

    from pytorch_accelerated import Trainer, TrainerPlaceholderValues
    from pytorch_accelerated.callbacks import TrainerCallback, get_default_callbacks
    from torch.nn import CrossEntropyLoss
    from torch.optim.lr_scheduler import LinearLR

    os.environ["ACCELERATE_USE_CPU"] = "true"
    setting = WORKLOADS[workload]

    class OwnTrainer(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return super().calculate_train_batch_loss(pair_of(batch))

        def optimizer_step(self) -> None:
            self._accelerator.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)  # its own clips each value
            super().optimizer_step()

    class Watch(TrainerCallback):
        def on_train_step_end(self, trainer: Any, *, batch_output: Any, step: int, **_: Any) -> None:
            if (step + 1) % setting.log_steps == 0:
                trainer.print(f"step {step + 1} loss {batch_output['loss'].item():.4f}")
            clock.tick()

    model = make_model(workload)
    optimizer, _ = make_optimizer(workload, model)
    total = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    OwnTrainer(model, CrossEntropyLoss(), optimizer, callbacks=(*get_default_callbacks(), Watch())).train(
        make_dataset(workload),
        num_epochs=1,
        per_device_batch_size=setting.batch_size,
        gradient_accumulation_steps=setting.accumulation,
        create_scheduler_fn=partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=total),
        train_dataloader_kwargs={
            "num_workers": setting.num_workers,
            "persistent_workers": setting.num_workers > 0,
        },
        collate_fn=collate_of(workload),
    )


PEERS: dict[str, Callable[[str, Clock], None]] = {  # by the name that pip knows
    "transformers": run_transformers,
    "lightning": run_lightning,
    "pytorch-accelerated": run_pytorch_accelerated,
}
CONTESTANTS: dict[str, Callable[[str, Clock], None]] = {
    FLOOR: run_bare,
    FLOOR_AGAIN: run_bare,
    "accelerate": run_accelerate,
    TRAINER: run_trainer,
    **PEERS,
}


def run_child(contestant: str, workload: str, report: Path, *, profile: bool) -> None:
    """Be one contestant: train, and write down the seconds, or which import a peer lacks."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    profiler = cProfile.Profile() if profile else None
    clock = Clock(WORKLOADS[workload].log_steps, WORKLOADS[workload].num_steps, profiler)
    try:
        CONTESTANTS[contestant](workload, clock)
    except ImportError as error:
        if contestant not in PEERS:
            raise
        report.write_text(json.dumps({"missing": str(error)}), encoding="utf-8")
        return
    text = io.StringIO()
    if profiler:
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
    report.write_text(json.dumps({"seconds": clock.seconds, "profile": text.getvalue()}), encoding="utf-8")


def on_a_terminal(command: list[str]) -> tuple[int, str]:
    """Run a command on a pseudo-terminal; return its exit code and what it showed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = bytearray()
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
            while chunk := os.read(ours, 65536):
                shown += chunk
    os.close(ours)
    return process.returncode, shown.decode(errors="replace")


def measure(contestant: str, workload: str, *, profile: bool = False) -> dict[str, Any]:
    """Run one contestant in a fresh process and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, __file__, workload, "--child", contestant, "--report", str(report)]
        code, shown = on_a_terminal(command + ["--profile"] * profile)
        found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if code != 0 or (found.get("seconds") is None and "missing" not in found):
        sys.exit(f"{contestant} did not finish {workload!r} (exit code {code}). It showed:\n{shown[-4000:]}")
    return dict(found)


@dataclass(frozen=True)
class Measured:
    """The seconds of all contestants of a workload, round by round."""

    workload: str
    seconds: dict[str, list[float]]

    @property
    def best(self) -> dict[str, float]:
        """The least seconds of each contestant."""
        return {name: min(values) for name, values in self.seconds.items()}

    @property
    def floor(self) -> float:
        """The faster of the two bare loops, so that a slow one flatters nobody."""
        return min(self.best[FLOOR], self.best[FLOOR_AGAIN])

    @property
    def noise(self) -> float:
        """By how much the slower of the two is slower."""
        return max(self.best[FLOOR], self.best[FLOOR_AGAIN]) / self.floor - 1

    @property
    def allowed(self) -> float:
        """The largest ratio with which the trainer passes."""
        return WORKLOADS[self.workload].limit + self.noise

    @property
    def ratios(self) -> dict[str, float]:
        """How much slower each is than the floor."""
        return {name: value / self.floor for name, value in self.best.items()}


def compare(workload: str, contestants: list[str], num_rounds: int) -> Measured:
    """Run all rounds of a workload; a peer that is not installed is told and left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(num_rounds):
        here = list(seconds)
        turn = round_number % len(here)  # so that nobody always follows the same neighbour
        for name in here[turn:] + here[:turn]:
            found = measure(name, workload)
            if "missing" in found:
                print(f"{name} is left out ({found['missing']}): pip install {name}", file=sys.stderr)
                del seconds[name]
                continue
            seconds[name].append(found["seconds"])
        print(f"{workload}: round {round_number + 1} of {num_rounds}", file=sys.stderr)
    return Measured(workload, seconds)


def judge(measured: Measured) -> bool:
    """Print the table of minima and tell whether the trainer keeps its limit."""
    setting, noise = WORKLOADS[measured.workload], measured.noise
    steps = setting.num_steps - setting.log_steps
    print(f"\n{measured.workload}: {steps} steps of {setting.batch_size}")
    print(f"{'contestant':<20}{'seconds':>9}{'us/step':>10}{'ratio':>8}")
    for name, value in measured.best.items():
        print(f"{name:<20}{value:>9.3f}{value / steps * 1e6:>10.1f}{measured.ratios[name]:>8.3f}")
    print(f"floor against itself {1 + noise:.3f}; limit {setting.limit:.2f} + {noise:.3f} = {measured.allowed:.3f}")
    if noise > MUCH_NOISE:
        print("the machine is busy with other work, so this says little: run it again")
    if TRAINER not in measured.seconds:
        return True
    ratio = measured.ratios[TRAINER]
    passed = ratio <= measured.allowed
    print(f"{TRAINER} {ratio:.3f}: {'PASS' if passed else 'FAIL'}")
    return passed


def versions_of(contestants: list[str]) -> dict[str, str]:
    """Return the versions of torch and of the libraries that took part."""
    packages = {TRAINER: "hezar-train", FLOOR: "torch"}
    return {packages.get(name, name): version(packages.get(name, name)) for name in contestants if name != FLOOR_AGAIN}


def plot(measurements: list[Measured], path: Path) -> None:
    """Draw the ratios of each workload as bars over the floor; grey is what the floor differs from itself by."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    heights = [0.6 + 0.22 * len(one.seconds) for one in measurements]
    with rc_context({"svg.hashsalt": "pace", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(7, sum(heights)), layout="tight")
        column = figure.subplots(len(measurements), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, measured in zip(column, measurements, strict=True):
            names, ratios = list(measured.ratios), list(measured.ratios.values())
            axes.axvspan(1.0, 1.0 + measured.noise, color="0.85", zorder=0)
            bars = axes.barh(names, ratios, color=["tab:blue" if name == TRAINER else "tab:gray" for name in names])
            axes.axvline(1.0, color="black", linewidth=0.8)
            axes.bar_label(bars, fmt="%.2f", padding=2)
            axes.margins(x=0.1)
            axes.invert_yaxis()
            axes.set_title(f"{measured.workload}: time of a step, the bare loop's is 1")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def write_json(measurements: list[Measured], path: Path) -> None:
    """Write all seconds, the ratios and the versions."""
    contestants = list(dict.fromkeys(name for one in measurements for name in one.seconds))
    workloads = {
        one.workload: {
            **asdict(WORKLOADS[one.workload]),
            "noise": one.noise,
            "seconds": one.seconds,
            "ratios": one.ratios,
        }
        for one in measurements
    }
    text = json.dumps({"versions": versions_of(contestants), "workloads": workloads}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="all", choices=[*WORKLOADS, "all"])
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"times that every contestant runs (of one workload {ROUNDS}, of all {ROUNDS_OF_ALL})",
    )
    parser.add_argument("--only", nargs="+", choices=[*CONTESTANTS], help="besides the bare loop")
    parser.add_argument("--peers", action="store_true", help=f"also {', '.join(PEERS)}, those that are installed")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file (.svg, .png)")
    parser.add_argument("--json", type=Path, help="write the seconds of all rounds into this file")
    parser.add_argument("--profile", action="store_true", help="profile the steps of the trainer instead")
    parser.add_argument("--child", choices=[*CONTESTANTS], help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'hezar-train[plot]'")
    return asked


def chosen(asked: argparse.Namespace) -> list[str]:
    """Return the contestants that were asked for; the bare loop always runs, twice."""
    own = {name for name in CONTESTANTS if name not in PEERS}
    names = {FLOOR, FLOOR_AGAIN, *(asked.only or own), *(PEERS if asked.peers else ())}
    return [name for name in CONTESTANTS if name in names]


def main() -> int:
    asked = parse()
    if asked.child:
        run_child(asked.child, asked.workload, asked.report, profile=asked.profile)
        return 0
    workloads = [*WORKLOADS] if asked.workload == "all" else [asked.workload]
    if asked.profile:
        for workload in workloads:
            print(measure(TRAINER, workload, profile=True)["profile"])
        return 0
    num_rounds = asked.rounds or (ROUNDS if len(workloads) == 1 else ROUNDS_OF_ALL)
    measurements, passed = [], []
    for workload in workloads:
        measurements.append(compare(workload, chosen(asked), num_rounds))
        passed.append(judge(measurements[-1]))
    if asked.json:
        write_json(measurements, asked.json)
    if asked.plot:
        plot(measurements, asked.plot)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
