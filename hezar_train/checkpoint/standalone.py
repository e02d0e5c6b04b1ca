"""`Checkpointer`: checkpoints under names of one's own, of a model and any objects with a state, without a Trainer.

Owns the names in a folder and the tag file that says which was saved last. A checkpoint here has the layout of a
Trainer's (the package's docstring) and is written as carefully: whole or not at all, and the tag moves only once it is
there. A name may be saved again; until the new one has the name, the old one can be loaded. Refuses pickles.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from hezar_train.checkpoint.manifest import CONFIG_FILE, MANIFEST_FILE, make_folder_durably
from hezar_train.checkpoint.optimizer_state import load_state
from hezar_train.checkpoint.sharded import load_shards
from hezar_train.checkpoint.store import Checkpoint, CheckpointStore, Contents, put_back, write_checkpoint
from hezar_train.checkpoint.weights import WeightReport, initial_weights
from hezar_train.config.files import write_atomically
from hezar_train.errors import CheckpointError, choices
from hezar_train.run_folder import is_inside, read_file, remove_folder

__all__ = ["Checkpointer"]

TAG_FILE = "last_checkpoint"
MOST_TAG_BYTES = 4096
UNTAGGED_NAME = "model_best"  # a resume goes on from the last one, not from the best
OPTIMIZER = "optimizer"

logger = logging.getLogger(__name__)


class Checkpointer:
    """Save and load a model together with `checkpointables`, objects that have `state_dict` and `load_state_dict`.

    With `save_to_disk=False`, as on all processes but the main one, `save` does nothing.
    """

    report: WeightReport | None = None
    """What became of each name of the model in the last `load`; None if all of them had to fit."""

    def __init__(
        self, model: nn.Module, save_dir: str | os.PathLike[str] = "", *, save_to_disk: bool = True,
        **checkpointables: Any,
    ) -> None:  # fmt: skip
        self.model, self.save_dir, self.save_to_disk = model, Path(save_dir), save_to_disk
        for name, kept in checkpointables.items():
            if not (hasattr(kept, "state_dict") and hasattr(kept, "load_state_dict")):
                kind = type(kept).__name__
                raise CheckpointError(f"{name}= is a {kind}; expected an object with state_dict and load_state_dict")
        self.checkpointables = checkpointables

    def save(self, name: str, **extra: Any) -> None:
        """Write everything, and `extra`, to the folder `name`; then tag it as the last one, unless it is the best."""
        if not self.save_to_disk:
            return
        final = self._folder(name)
        make_folder_durably(self.save_dir)
        CheckpointStore(self.save_dir).clean()
        write_checkpoint(final, self._parts(extra), step=0)
        if name != UNTAGGED_NAME:
            self.tag_last_checkpoint(name)

    def load(
        self, path: str | os.PathLike[str] | None, checkpointables: Iterable[str] | None = None, *, strict: bool = False
    ) -> dict[str, Any]:
        """Load from a name, a checkpoint, a run or a safetensors file; return what was saved as `extra`.

        Of the model, what fits is loaded and `report` says what did not; with `strict`, everything must fit. Of the
        checkpointables, all are restored, or those named: an empty list means weights alone.
        """
        if not path:
            return {}
        wanted = list(self.checkpointables) if checkpointables is None else list(checkpointables)
        if unknown := [name for name in wanted if name not in self.checkpointables]:
            known = choices(self.checkpointables) or "none"
            raise CheckpointError(f"there is no checkpointable {choices(unknown)}. There are: {known}.")
        source = self._found(path)
        is_whole = strict or (source / MANIFEST_FILE).exists()
        checkpoint = CheckpointStore(source.parent).open(source) if is_whole else None
        if strict and checkpoint is not None:
            load_shards(checkpoint, self.model)
        self.report = None if strict else _load_fitting(self.model, source)
        return {} if checkpoint is None else self._restore(checkpoint, wanted, strict=strict)

    def resume_or_load(self, path: str | os.PathLike[str] | None, resume: bool = True) -> dict[str, Any]:
        """Restore the last checkpoint, of which all must fit; without one, or without `resume`, load weights alone."""
        if resume and (last := self.get_checkpoint_file()) is not None:
            return self.load(last, strict=True)
        return self.load(path, checkpointables=[])

    def has_checkpoint(self) -> bool:
        """Tell whether a checkpoint was saved here."""
        return (self.save_dir / TAG_FILE).exists()

    def get_checkpoint_file(self) -> Path | None:
        """Return the folder of the checkpoint saved last, None if there is none."""
        if not self.has_checkpoint():
            return None
        try:
            name = read_file(self.save_dir / TAG_FILE, MOST_TAG_BYTES).decode("utf-8").strip()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.save_dir / TAG_FILE} is not the name of a checkpoint") from None
        put_back(found := self._folder(name))  # a plain name: a tag must not lead anywhere else
        return found

    def delete(self, name: str) -> None:
        """Delete a checkpoint that was saved here; anything else of that name stays, and is told."""
        folder = self._folder(name)
        if self.save_to_disk and folder.exists() and not ((folder / MANIFEST_FILE).is_file() and remove_folder(folder)):
            logger.warning("%s is not deleted: it is no checkpoint, or could not be", folder)

    def tag_last_checkpoint(self, name: str) -> None:
        """Note that a checkpoint is the last one."""
        write_atomically(self.save_dir / TAG_FILE, self._folder(name).name + "\n")

    def _parts(self, extra: dict[str, Any]) -> Contents:
        states = {name: kept.state_dict() for name, kept in self.checkpointables.items()}
        optimizer = states.pop(OPTIMIZER, None)
        kept = {"checkpointables": states, "given": extra}
        return Contents.gather(self.model, optimizer, state={}, texts={CONFIG_FILE: "{}\n"}, extra=kept)

    def _restore(self, checkpoint: Checkpoint, wanted: list[str], *, strict: bool) -> dict[str, Any]:
        extra = checkpoint.extra()
        states = {OPTIMIZER: checkpoint.optimizer(), **extra.get("checkpointables", {})}
        if missing := [name for name in wanted if states.get(name) is None]:
            message = f"{checkpoint.path} has no state of {choices(missing)}"
            if strict:
                raise CheckpointError(f"{message}: name the others as checkpointables, or load with strict=False")
            logger.warning("%s: left as it is", message)
        for name in wanted:
            if name not in missing:
                self._give_back(name, states[name], checkpoint.path)
        given: dict[str, Any] = extra.get("given", {})
        return given

    def _give_back(self, name: str, state: Any, path: Path) -> None:
        load_state(self.checkpointables[name], state, f"{name!r} in {path}")

    def _folder(self, name: str) -> Path:
        if not is_inside(name) or name.startswith(".") or name == TAG_FILE or Path(name).name != name:
            raise CheckpointError(f"{name!r} cannot be the name of a checkpoint: expected a plain folder name")
        return self.save_dir / name

    def _found(self, path: str | os.PathLike[str]) -> Path:
        """Return where a checkpoint is, by its name here or by its path."""
        here = self.save_dir / path
        put_back(here)
        return here if here.exists() else Path(path)


def _load_fitting(model: nn.Module, source: Path) -> WeightReport:
    report = initial_weights(model, source)
    differences = {"missing": report.missing, "unexpected": report.unexpected, "of another shape": report.mismatched}
    for words, names in differences.items():
        if names:
            logger.warning("not loaded from %s, %s: %s", source, words, ", ".join(names))
    return report
