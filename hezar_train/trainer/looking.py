"""Looking at data without learning from it: the walk behind evaluation and prediction.

None of it is called by users.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hezar_train.checkpoint import unwrap
from hezar_train.data import preserved_randomness, seed_device, step_seed, without_company
from hezar_train.events import EventStorage
from hezar_train.loop import HookSet, Routine
from hezar_train.plan import UNLIMITED, one_pass
from hezar_train.runtime import logger
from hezar_train.runtime.sharding import is_sharded
from hezar_train.trainer.assembly import Assembly
from hezar_train.trainer.checks import refuse_absent_best
from hezar_train.trainer.continuations import continuations
from hezar_train.trainer.decoding import decoded_inputs, generates, label_names_of
from hezar_train.trainer.evaluation import EvaluationReport, looking_only
from hezar_train.trainer.prediction import write_predictions
from hezar_train.trainer.sample_looks import SampleLooks, is_cheap_to_fetch
from hezar_train.trainer.worst import in_words
from hezar_train.types import Mode, TaskType

__all__ = ["Looking"]

NUM_TEXTS = 4


class Looking(Assembly):
    """The routines that look."""

    _evaluated_data: dict[str, Any] | None = None
    """The data of each set, while an evaluation is made for the record."""

    if TYPE_CHECKING:

        def _model_at_hand(self) -> AbstractContextManager[None]: ...

    @contextmanager
    def _tuned_for_evaluation(self) -> Iterator[None]:
        """With `finetune_before_eval`, let the body see finetuned weights, which are gone afterwards."""
        is_asked = self.config.finetune_before_eval and not self.only_for_eval
        if not is_asked or self.ctx.get("mode") is Mode.FINETUNE:
            yield
            return
        before = copy.deepcopy(self.model.state_dict())
        try:
            self.finetune()
            yield
        finally:
            self.model.load_state_dict(before)

    def _evaluate_one(self, data: Any, split: str, hooks: HookSet) -> EvaluationReport:
        mode = Mode.VAL if split == "val" else Mode.TEST
        self._look_through(data, Routine(self.ctx, hooks, mode, split), self.config.max_eval_batches)
        return self._evaluation.report()

    def _look_through(
        self, data: Any, routine: Routine, max_batches: int | None = None, *, weighs: bool = True
    ) -> None:
        """Walk once over data, in order, without gradients and without moving the global generators."""
        source = self._as_source(self.create_eval_dataloader(data), training=False)
        plan = one_pass(source.num_samples, source.batch_size, self.runtime.num_processes)
        total = plan.steps_in_epoch
        self.progress.start_evaluation(total)

        def announce() -> None:
            self.ctx[f"num_{routine.split}_batch"], self.ctx[f"num_{routine.split}_epoch"] = total, 1

        try:
            with (
                EventStorage(),
                preserved_randomness(),
                looking_only(self.model),
                self._replicas.looked_at(is_free=self._generate is not None),
                routine.running(announce=announce),
                routine.epoch(),
            ):
                seed_device(step_seed(self.config.seed, 0, self.runtime.rank), self.runtime.device)
                samples_left = UNLIMITED if max_batches is None else max_batches * plan.batch_size
                windows = source.windows(plan, 0, 0, UNLIMITED, samples_left)
                if not self._replicas.walks_together:
                    windows = map(without_company, windows)
                routine.walk(map(self._weigh_here, windows) if weighs else windows)  # predictions may lack labels
        finally:
            self.progress.end_evaluation()
            source.close()

    def _predict_together(self, data: Any, path: str | os.PathLike[str] | None) -> list[Any] | Path:
        """Let each process predict its share; all get the list, and the main one writes the file."""
        own: list[tuple[int, Any]] = []
        self._prediction.sink = lambda number, value: own.append((number, value))
        with self._model_at_hand():
            self._look_through(data, Routine(self.ctx, self.hooks_in_predict, Mode.TEST, "test"), weighs=False)
        gathered = self.runtime.processes.gather(own)
        everyone = sorted((pair for part in gathered for pair in part), key=lambda pair: pair[0])
        if path is None:
            return [value for _, value in everyone]
        self.runtime.processes.on_main(lambda: write_predictions(Path(path), everyone))
        return Path(path)

    def _foresee(self, batch: Any) -> dict[str, Any]:
        """Run the model for its predictions alone; one that writes texts may not even run without labels."""
        with torch.no_grad(), self._autocast():
            return self._outputs_of(batch) if self._generate is None else {"generated": self._generate(batch)}

    def _evaluate_for_record(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Evaluate; return the metrics, and what only a report shows."""
        self._evaluation.saved = self._due.what_is_saved()
        self.last_evaluation, self._evaluated_data = {}, {}
        try:
            with preserved_randomness(), looking_only(self.model):  # an override may draw, and forget the modes
                seed_device(step_seed(self.config.seed, self.state.global_step, self.runtime.rank), self.runtime.device)
                metrics = self.val_epoch() or {}
                if self._tests_while_training():
                    metrics |= {f"test.{name}": value for name, value in (self.test_epoch() or {}).items()}
                details = self._details(self._evaluated_data) if self.runtime.is_main else {}
        finally:
            self._evaluation.saved, self._evaluated_data = None, None
        if metrics:
            refuse_absent_best(self.best_key, metrics)
        return metrics, details

    def _details(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return what only a report shows: tables, the worst samples, examples, and what they looked like."""
        reports = self.last_evaluation.items()
        plain = {
            "tables": {name: report.tables for name, report in reports},
            "worst_samples": {name: report.worst_samples for name, report in reports},
            "sample_loss_name": self.metrics_handler.sample_loss_name,
        }
        try:
            return plain | self._samples_as_they_looked(data)
        except Exception as error:  # noqa: BLE001 - of the user's dataset or tokenizer: no picture is worth a run
            logger.warning("the report will not show what samples looked like: %s: %s", type(error).__name__, error)
            return plain

    def _samples_as_they_looked(self, data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        pictures = self.folder.pictures(self.state.global_step)
        looks = SampleLooks(self.folder.root, pictures, self.config.seed, self.preprocessor)
        names, decode = label_names_of(unwrap(self.model)), partial(decoded_inputs, self.preprocessor)
        told = in_words(self.metrics_handler, names, decode)
        worst, examples = {}, {}
        for place, (name, report) in enumerate(self.last_evaluation.items()):
            prefix, samples = f"{place}-" if name else "", data.get(name)
            worst[name] = looks.added([told(row) for row in report.worst_samples], samples, prefix)
            shown = looks.added(report.examples, samples, prefix) or self._texts_written_on(samples)
            examples[name] = [{key: row[key] for key in row if key != "sample"} for row in shown]
        return {"worst_samples": worst} | ({"examples": examples} if any(examples.values()) else {})

    def _texts_written_on(self, data: Any) -> list[dict[str, Any]]:
        """Return texts that a language model writes after the beginnings of a few samples."""
        model, config = unwrap(self.model), self.config
        is_asked = config.evaluate_with_generate and config.task == TaskType.LANGUAGE_MODELING
        if not is_asked or not generates(model) or is_sharded(self.model) or not is_cheap_to_fetch(data):
            return []
        with torch.no_grad(), self._autocast():
            samples = [data[number] for number in range(min(NUM_TEXTS, len(data)))]
            return continuations(model, samples, self.preprocessor, config.generation_kwargs, self.runtime.device)
