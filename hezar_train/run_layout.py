"""The names of everything in a run's folder, each spelled here and nowhere else, and the paths that they make.

    RUN/
      train_config.yaml  plan.json  recipe.json  environment.json    what was asked for, and each start
      ledger.jsonl  best.json  hub.json  lock                        what was done, and who is doing it
      lengths.bin                                                    how long each sample is, where that counts
      report.html  curves.png  lr_finder.png                         a page and pictures
      evaluations/{step}.json  evaluations/{step}/                   results, and pictures of samples
      logs/{start}_{host}/                                           metrics.json  training_logs.csv  events.out...
      checkpoints/{step}/                                            model.safetensors  ...  manifest.json
      previous/{n}/                                                  an earlier run that was started afresh over
      .hub/                                                          files of pushes that are under way

A user may rename two of the folders (`checkpoints_dir`, `logs_dir`); every other name is fixed, because other versions
look for it. One that lies outside holds a folder per run, named after the run and the hash of its path: two runs never
share one, and what is in it was put there by a run at this very path, whatever a file in the run says. The name of the
config is spelled in `config`, which lies below. Nothing here writes a file or opens the lock: closing any descriptor of
the lock file would release the lock of a trainer in this process.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from hezar_train.config import CONFIG_FILE, TrainerConfig, read_mapping
from hezar_train.errors import ConfigError
from hezar_train.run_folder import can_be_path, is_plain, plain_path, refuse_links, refuse_second_names

__all__ = [
    "ADAPTER_CONFIG_FILE",
    "ADAPTER_FILE",
    "BASE_FILE",
    "BEST_FILE",
    "CHECKPOINTS_FOLDER",
    "COMPARISON_FILE",
    "CONFIG_FILE",
    "CSV_FILE",
    "CURVES_FILE",
    "DAMAGED_PREFIX",
    "DROPPED_PREFIX",
    "DROPPED_SUFFIX",
    "EVALUATIONS_FOLDER",
    "EVENTS_PREFIX",
    "EXPORTS_FOLDER",
    "HEZAR_CONFIG_FILE",
    "HUB_FILE",
    "HUB_STAGING_FOLDER",
    "LEDGER_FILE",
    "LENGTHS_FILE",
    "LOCK_FILE",
    "LOGS_FOLDER",
    "LR_FINDER_FILE",
    "MANIFEST_FILE",
    "METRICS_FILE",
    "MODEL_CONFIG_FOLDER",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "PLAN_FILE",
    "PREPROCESSOR_FOLDER",
    "PREVIOUS_FOLDER",
    "RECIPE_FILE",
    "REPLACED_PREFIX",
    "REPORT_FILE",
    "STARTS_FILE",
    "STATE_FILE",
    "TEMPORARY_PREFIX",
    "TRAINED_FILE",
    "TRASH_PREFIX",
    "RunLayout",
    "is_run",
    "refuse_dirs_outside",
    "step_name",
    "step_of",
    "without_host",
]

PLAN_FILE = "plan.json"
RECIPE_FILE = "recipe.json"
STARTS_FILE = "environment.json"
LEDGER_FILE = "ledger.jsonl"
LENGTHS_FILE = "lengths.bin"
BEST_FILE = "best.json"
HUB_FILE = "hub.json"
LOCK_FILE = "lock"
REPORT_FILE = "report.html"
CURVES_FILE = "curves.png"
LR_FINDER_FILE = "lr_finder.png"
COMPARISON_FILE = "comparison.html"
"""A page about several runs: it lies where the command was given, unless that is the folder of one of them."""

EVALUATIONS_FOLDER = "evaluations"
EXPORTS_FOLDER = "exports"
"""For what a user's own `save()` writes beside each checkpoint."""
PREVIOUS_FOLDER = "previous"
HUB_STAGING_FOLDER = ".hub"
CHECKPOINTS_FOLDER: str = TrainerConfig.checkpoints_dir
LOGS_FOLDER: str = TrainerConfig.logs_dir

METRICS_FILE = "metrics.json"
CSV_FILE = "training_logs.csv"
EVENTS_PREFIX = "events.out.tfevents."
"""How the names of TensorBoard's files begin; the second of their start follows."""
NAMES_WITH_HOST = re.compile(
    rf"(\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d)_.+|({re.escape(EVENTS_PREFIX)}\d+)\..+(\.\d+\.\d+)", re.DOTALL
)
DROPPED_SUFFIX = ".dropped"
"""Of what a resume took away from a file or a set of files, because it is done again."""

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
MANIFEST_FILE = "manifest.json"
BASE_FILE = "base_model.json"
"""Of a checkpoint that holds what is trained alone: the frozen base model that it stands on."""
TRAINED_FILE = "trained.safetensors"
"""What is trained, for others; not called `MODEL_FILE`, which libraries load as a whole model."""
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
"""Where peft looks for an adapter."""
PREPROCESSOR_FOLDER = "preprocessor"
MODEL_CONFIG_FOLDER = "model_config"
HEZAR_CONFIG_FILE = "model_config.yaml"
"""A model's config in the form of the hezar library; transformers has names of its own."""

LOG_SUFFIXES = (".json", ".jsonl")
WRITTEN = (
    *(LOCK_FILE, LEDGER_FILE, f"{LEDGER_FILE}{DROPPED_SUFFIX}", PLAN_FILE, RECIPE_FILE, STARTS_FILE, BEST_FILE),
    *(HUB_FILE, CONFIG_FILE, LENGTHS_FILE, EVALUATIONS_FOLDER, HUB_STAGING_FOLDER),
)
"""What a run writes, cuts or deletes under a fixed name; reports and pictures only ever take the place of another."""

DIGITS_OF_NO_STEP = 19
TAG_DIGITS = 12
"""Of the hash that tells a run's folder of logs or checkpoints from that of another run."""

TEMPORARY_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"
DAMAGED_PREFIX = ".damaged-"
DROPPED_PREFIX = ".dropped-"
REPLACED_PREFIX = ".replaced-"


def step_name(step: int) -> str:
    """Return the name of what belongs to a step: a checkpoint, an evaluation's record or pictures."""
    return f"{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a name stands for, under any zero padding; None for any other name."""
    is_step = name.isascii() and name.isdigit() and len(name.lstrip("0")) < DIGITS_OF_NO_STEP
    return int(name[-DIGITS_OF_NO_STEP:]) if is_step else None


def without_host(name: str) -> str:
    """Return a path of logs as it is published: the names of this machine's folders and files tell its own, too."""
    return "/".join(NAMES_WITH_HOST.sub(r"\1\2\3", part) for part in name.split("/"))


def is_run(folder: Path) -> bool:
    """Tell whether a folder is that of a run: whether it has a config."""
    return (folder / CONFIG_FILE).is_file()


class RunLayout:
    """The paths of one run; nothing of it needs to exist."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        checkpoints_dir: str | os.PathLike[str] = CHECKPOINTS_FOLDER,
        logs_dir: str | os.PathLike[str] = LOGS_FOLDER,
        config: Path | None = None,
    ) -> None:
        """Lay out the run at `root`; `config` is where its config is, if not under the usual name."""
        self.root = Path(root)
        self.checkpoints = _folder_of(self.root, checkpoints_dir)
        self.all_logs = _folder_of(self.root, logs_dir)
        self.evaluations = self.root / EVALUATIONS_FOLDER
        self.exports = self.root / EXPORTS_FOLDER
        self.ledger = self.root / LEDGER_FILE
        self.plan = self.root / PLAN_FILE
        self.lengths = self.root / LENGTHS_FILE
        self.config = self.root / CONFIG_FILE if config is None else config
        self.best = self.root / BEST_FILE
        self.recipe = self.root / RECIPE_FILE
        self.hub = self.root / HUB_FILE
        self.hub_staging = self.root / HUB_STAGING_FOLDER
        self.environment = self.root / STARTS_FILE
        self.pages = [self.root / name for name in (REPORT_FILE, CURVES_FILE, COMPARISON_FILE)]
        self.lock = self.root / LOCK_FILE
        self.previous = self.root / PREVIOUS_FOLDER

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """Return the layout of the run that a config asks for."""
        return cls(config.output_dir, config.checkpoints_dir, config.logs_dir)

    @classmethod
    def at(cls, root: str | os.PathLike[str]) -> Self:
        """Return the layout of the run in a folder, by the config that lies there."""
        config = _find_config(Path(root))
        return cls.with_settings(root, read_mapping(config), config)

    @classmethod
    def with_settings(
        cls, root: str | os.PathLike[str], settings: Mapping[str, Any], config: Path | None = None
    ) -> Self:
        """Return the layout of a run by its config as it was read, which may lack everything; `config` is its file."""
        usual = {"checkpoints_dir": CHECKPOINTS_FOLDER, "logs_dir": LOGS_FOLDER}
        told = {name: str(settings.get(name) or default) for name, default in usual.items()}
        found = {name: one if can_be_path(f"{root}/{one}/") else usual[name] for name, one in told.items()}
        return cls(root, **found, config=config)

    def new_logs(self) -> Path:
        """Name a folder for logs after now and this host; a link that lies in wait there is refused."""
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        host = re.sub(r"[^\w.-]", "-", socket.gethostname()) or "host"
        return plain_path(self.all_logs, f"{stamp}_{host}")

    def logs(self, logs_dir: str | None) -> Path:
        """Return the folder of the logs that a state names (`TrainerState.logs_dir`), or a new one.

        A state comes from a file: of a folder that is not this run's own it is not believed.
        """
        if not logs_dir or not self.owns(folder := self.placed(logs_dir)):
            return self.new_logs()
        # Elsewhere in the run only where an earlier start with another `logs_dir` has made it.
        is_usual = _absolute(folder).is_relative_to(_absolute(self.all_logs))
        return folder if is_usual or folder.is_dir() else self.new_logs()

    def placed(self, name: str) -> Path:
        """Return where something of the logs lies that a state names: fetched from the Hub, without the host's name."""
        usual, fetched = self.root / name, self.root / without_host(name)
        return fetched if not usual.exists() and fetched.exists() else usual

    def owns(self, name: str | os.PathLike[str]) -> bool:
        """Tell whether a path is inside the run's folder or its own folder of logs, with no link on the way.

        A link on the way would make a name inside the run lead anywhere, and who names it here is a file of the run.
        """
        path = _absolute(self.root / name)
        return is_plain(_absolute(self.root), path) or (
            not path.is_relative_to(_absolute(self.root)) and is_plain(_absolute(self.all_logs), path)
        )

    def is_log(self, path: Path) -> bool:
        """Tell whether a path is that of a file which grows while the run trains: the ledger, or one of the logs.

        Logs of an earlier start may lie in another folder of the run, if the config has named another since.
        """
        whole = _absolute(path)
        if whole == _absolute(self.ledger):
            return True
        is_other = any(whole.is_relative_to(_absolute(one)) for one in self._not_logs())
        return (
            self.owns(whole) and whole.suffix in LOG_SUFFIXES and whole.parent != _absolute(self.root) and not is_other
        )

    def _not_logs(self) -> tuple[Path, ...]:
        return (self.checkpoints, self.evaluations, self.exports, self.previous, self.hub_staging)

    def refuse_links(self) -> None:
        """Raise if something of the run that is written, cut or deleted is a link, or holds one."""
        refuse_links(self.root, WRITTEN)
        refuse_links(self.root, (PREVIOUS_FOLDER, EXPORTS_FOLDER), deeply=False)
        for folder in (self.checkpoints, self.all_logs):
            inside = _relative(self.root, folder)
            if inside is None:
                refuse_links(folder.parent, [folder.name])
            elif inside != Path():
                refuse_links(self.root, [inside])

    def log_files(self, name: str) -> list[Path]:
        """Return the files of a name in all folders of logs, oldest first."""
        return sorted(self.all_logs.glob(f"*/{name}"))

    def evaluation_record(self, step: int) -> Path:
        """Name the file with the result of an evaluation."""
        return self.evaluations / f"{step_name(step)}.json"

    def pictures(self, step: int) -> Path:
        """Name the folder of the pictures that belong to an evaluation."""
        return self.evaluations / step_name(step)

    def export(self, step: int) -> Path:
        """Name the folder that a user's own `save()` is given beside a checkpoint; refuse one that leads elsewhere."""
        name = f"{EXPORTS_FOLDER}/{step_name(step)}"
        refuse_links(self.root, [name])
        refuse_second_names(self.root / name)
        return self.root / name

    def evaluation_records(self) -> dict[int, Path]:
        """Return the records of all evaluations by their steps, ascending."""
        return _by_step(self.evaluations, ".json")

    def checkpoint_folders(self) -> dict[int, Path]:
        """Return the folders of all checkpoints by their steps, ascending; none of them is verified."""
        return _by_step(self.checkpoints)


def _find_config(root: Path) -> Path:
    """Return a run's config; a trainer may call it otherwise, but checkpoints always hold it under this name."""
    found = [*sorted(root.glob(f"{CHECKPOINTS_FOLDER}/[0-9]*/{CONFIG_FILE}")), *root.glob(CONFIG_FILE)]
    if not found:
        raise ConfigError(f"{root} is not the folder of a run: it has no {CONFIG_FILE}")
    return found[-1]


def refuse_dirs_outside(root: Path, settings: Mapping[str, Any], given: Iterable[str] = ()) -> None:
    """Raise if a run's own config sends logs or checkpoints out of the run, to where it has never written.

    `given` are the settings that the user names now ("logs_dir=..."): those are the user's word, not the file's.
    """
    named = {one.partition("=")[0].strip() for one in given}
    for name in {"checkpoints_dir", "logs_dir"} - named:
        outside = settings.get(name)
        if not outside or _relative(root, root / str(outside)) is not None:
            continue
        if not (folder := _folder_of(root, str(outside))).is_dir():
            raise ConfigError(
                f"{root / CONFIG_FILE}: {name}={str(outside)!r} leads out of {root}, and this run has never written "
                f"there ({folder} is not there). If it is yours, say so: {name}={outside}; what lies there from before "
                f"belongs in {folder}."
            )


def _folder_of(root: Path, given: str | os.PathLike[str]) -> Path:
    """Return where a folder is: as given if that is inside the run, else the run's own folder in there."""
    inside = _relative(root, root / given)
    if inside is not None:
        return root / inside
    resolved = root.resolve()
    tag = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:TAG_DIGITS]
    return root / given / f"{resolved.name or 'run'}-{tag}"


def _relative(root: Path, path: Path) -> Path | None:
    """Return a path from the root on; None if its words lead out of it."""
    whole, top = _absolute(path), _absolute(root)
    return whole.relative_to(top) if whole.is_relative_to(top) else None


def _absolute(path: Path) -> Path:
    # By its words alone: a link inside the folder must not decide what is inside.
    return Path(os.path.abspath(path))


def _by_step(folder: Path, suffix: str = "") -> dict[int, Path]:
    """Return what is named after a step, under any zero padding, by step."""
    named = ((step_of(path.name.removesuffix(suffix)), path) for path in folder.glob(f"*{suffix}"))
    return dict(sorted((step, path) for step, path in named if step is not None))
