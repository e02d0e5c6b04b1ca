"""The trained model for others: as files in a folder, or on the Hub."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from hezar_train.checkpoint import unwrap
from hezar_train.hub import PushNames, PushOutcome, push_run
from hezar_train.trainer.export import MODEL_CONFIG_FILE, ExportNames, export, save_own_config
from hezar_train.trainer.parts import Parts

__all__ = ["Handover"]


class Handover(Parts):
    """What a trainer gives away, under names that its class or the caller chooses."""

    def save(
        self,
        path: str | os.PathLike[str],
        config_filename: str | None = None,
        model_filename: str | None = None,
        model_config_filename: str | None = None,
        subfolder: str | None = None,
        dataset_config_file: str | None = None,
        optimizer_file: str | None = None,
        lr_scheduler_file: str | None = None,
    ) -> Path:
        """Write the model for others: weights, model config and preprocessor at `path`, the trainer's files below."""
        names = ExportNames(
            config=config_filename or self.trainer_config_file,
            model=model_filename or self.model_file,
            model_config=model_config_filename or MODEL_CONFIG_FILE,
            subfolder=subfolder or self.trainer_subfolder,
            dataset_config=dataset_config_file or self.dataset_config_file,
            optimizer=optimizer_file or self.optimizer_file,
            lr_scheduler=lr_scheduler_file or self.lr_scheduler_file,
            state=self.trainer_state_file,
        )
        parts = self._snapshot.take_whole()
        self.runtime.processes.on_main(lambda: export(Path(path), self._snapshot, parts, self.train_dataset, names))
        return Path(path)

    def push_to_hub(
        self,
        repo_id: str | None = None,
        config_filename: str | None = None,
        push_model: bool = True,
        push_optimizer: bool = True,
        push_logs: bool = True,
        model_filename: str | None = None,
        model_config_filename: str | None = None,
        optimizer_filename: str | None = None,
        subfolder: str | None = None,
        dataset_config_filename: str | None = None,
        commit_message: str | None = None,
        private: bool | None = None,
        hezar_format: bool = False,
    ) -> PushOutcome | None:
        """Push the newest checkpoint with everything that belongs to it in one commit, and wait for it.

        The main process does it and returns the commit (`.oid`, `.url`), the others None. `hezar_format` adds the
        weights as hezar's own `model.save` writes them, which is a pickle.
        """
        names = PushNames(
            config_filename or self.trainer_config_file, model_filename or self.model_file, model_config_filename,
            optimizer_filename or self.optimizer_file, subfolder or self.trainer_subfolder,
            push_model=push_model, push_optimizer=push_optimizer, push_logs=push_logs,
        )  # fmt: skip
        dataset_config = dataset_config_filename or self.dataset_config_file

        def push() -> PushOutcome:
            with TemporaryDirectory() as extra:
                save_own_config(self.train_dataset, Path(extra) / names.subfolder, dataset_config)
                if hezar_format:
                    unwrap(self.model).save(extra)  # type: ignore[operator]
                return push_run(
                    self.folder.root, repo_id, commit_message=commit_message, private=private, names=names,
                    extra_folder=Path(extra),
                )  # fmt: skip

        return self.runtime.processes.on_main(push)
