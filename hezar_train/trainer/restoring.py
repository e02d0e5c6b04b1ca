"""How a run goes on after a kill: the checkpoint it finds, and what is put back from it.

None of it is called by users.
"""

from __future__ import annotations

from pathlib import Path

from hezar_train.checkpoint import Checkpoint, initial_weights, load_shards
from hezar_train.data import Source
from hezar_train.errors import DataError
from hezar_train.runtime import logger
from hezar_train.trainer.checkpointing import apply_accepted, find_checkpoint, local_weights, refuse_changes
from hezar_train.trainer.checks import tell_weights
from hezar_train.trainer.replanning import Replanning

__all__ = ["Restoring"]


class Restoring(Replanning):
    """A trainer that goes back to where a checkpoint has it."""

    _found: Checkpoint | None

    def _go_back(self) -> Checkpoint | None:
        """Restore the checkpoint that the config asks for; else load the initial weights it names."""
        checkpoint = self._found
        if checkpoint is None:
            if self.config.init_weights_from is not None:
                tell_weights(initial_weights(self.model, self._initial_source()), self.config.init_weights_from)
            return None
        if self.only_for_eval:
            load_shards(checkpoint, self.model)
            return None
        self._restore(checkpoint)
        return checkpoint

    def _initial_source(self) -> Path:
        """Return where the initial weights are; the main process downloads those that are on the Hub."""
        source, processes = self.config.init_weights_from or "", self.runtime.processes
        found = processes.on_main(lambda: str(local_weights(source)))
        return Path(str(processes.share(found)))

    def _find_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to go on from; the main process chooses it for all."""
        processes = self.runtime.processes
        found = processes.on_main(lambda: find_checkpoint(self.config, self.folder))
        path = processes.share(None if found is None else str(found.path))
        return Checkpoint(Path(path)) if path is not None and found is None else found

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Bring everything back to where a checkpoint has it, if the run can go on from there exactly."""
        refuse_changes(checkpoint, self.config, self.plan, self._snapshot.facts)
        self._snapshot.put_back(checkpoint)
        self._due.forget()
        self._freeze_as_saved()
        if self.config.accept_changes:
            apply_accepted(checkpoint, self.config, self.optimizer, self.schedule, self.model)
        self._refuse_lost_place(self._source)
        self._take_up_measuring()
        logger.info("resuming from %s", checkpoint.path)

    def _refuse_lost_place(self, source: Source) -> None:
        if source.resume_problem and self.state.position and not self.state.epoch_finished:
            raise DataError(f"cannot resume in the middle of an epoch: {source.resume_problem}")

    def _take_up_measuring(self) -> None:
        """Go on with what was measured but not logged, and with the best result if it is of the same metric."""
        state, storage = self.state, self.storage
        state.total_epochs = self.config.num_epochs
        for name, (value, step, hint) in self._snapshot.measured.items():
            storage.step = step
            storage.put_scalar(name, value, hint is not False)
        storage.step = state.global_step
        self._settle_best()
