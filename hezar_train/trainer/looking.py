"""Looking at data without learning from it: evaluation, prediction, and the one walk behind both."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hezar_train.data import Source, Window, preserved_randomness, seed_device, step_seed, without_filler
from hezar_train.events import EventStorage
from hezar_train.loop import HookSet, Routine
from hezar_train.plan import UNLIMITED, Plan, one_pass
from hezar_train.trainer.assembly import Assembly
from hezar_train.trainer.checks import named_sets, one_set, refuse_absent_best
from hezar_train.trainer.evaluator import EvaluationReport, PredictionFile, looking_only, write_predictions
from hezar_train.trainer.report_samples import Drawn, ReportDetails
from hezar_train.types import Mode

__all__ = ["Looking"]


class Looking(Assembly):
    """The routines that look."""

    _evaluated_data: dict[str, Any] | None = None
    """The data of each set, while an evaluation is made for the record."""

    def evaluate(
        self, eval_dataset: Any = None, hooks_set: HookSet | None = None, *, target_data_split_name: str | None = None
    ) -> dict[str, float]:
        """Evaluate; return loss and metrics, under the set's name where there are several. Nothing is logged.

        On the evaluation data, on a split or one of its named sets ("val", "dev"), or on data given, also several by
        name. `last_evaluation` then has the tables and the worst samples of each set.
        """
        asked = eval_dataset if target_data_split_name is None else target_data_split_name
        sets = named_sets(self.eval_dataset, self.splits, asked)
        hooks = self.hooks[Mode.VAL] if hooks_set is None else hooks_set
        with self._model_at_hand(), self._tuned_for_evaluation():
            self.last_evaluation = {one.name: self._evaluate_one(one.data, one.split, hooks) for one in sets}
        is_in_order = type(self).create_eval_dataloader is Looking.create_eval_dataloader
        if self._evaluated_data is not None and is_in_order:
            self._evaluated_data = {one.name: one.data for one in sets}
        return {
            f"{name}.{key}" if name else key: value
            for name, report in self.last_evaluation.items()
            for key, value in report.metrics.items()
        }

    def predict(self, dataset: Any = None, path: str | os.PathLike[str] | None = None) -> list[Any] | Path:
        """Return the prediction for each sample in order; with a path, write them there as JSON lines or Parquet."""
        data = one_set(self.eval_dataset, dataset)
        if self.runtime.num_processes > 1:
            return self._predict_together(data, path)
        if path is None:
            found: list[Any] = []
            self._predict_into(lambda _, value: found.append(value), data)
            return found
        with PredictionFile(Path(path)) as file:
            self._predict_into(file.add, data)
        return Path(path)

    def pictures(self) -> Iterable[Drawn]:
        """Return what the report is to show of a model that draws: pictures, each with words by name.

        A picture holds values from 0 to 1: rows and columns, or 1 or 3 channels before them. Called after each
        evaluation of a training, on every process, in evaluation mode, without gradients; draws follow from the step.
        """
        return ()

    def _predict_together(self, data: Any, path: str | os.PathLike[str] | None) -> list[Any] | Path:
        """Let each process predict its share; all get the list, and the main one writes the file."""
        own: list[tuple[int, Any]] = []
        self._predict_into(lambda number, value: own.append((number, value)), data)
        gathered = self.runtime.processes.gather(own)
        everyone = sorted((pair for part in gathered for pair in part), key=lambda pair: pair[0])
        if path is None:
            return [value for _, value in everyone]
        self.runtime.processes.on_main(lambda: write_predictions(Path(path), everyone))
        return Path(path)

    def _predict_into(self, sink: Callable[[int, Any], None], data: Any) -> None:
        """Hand the number and the prediction of each sample on."""
        self._prediction.sink = sink
        with self._model_at_hand():
            self._look_through(data, Routine(self.ctx, self.hooks_in_predict, Mode.TEST, "test"), weighs=False)

    def _foresee(self, batch: Any) -> dict[str, Any]:
        """Run the model for its predictions alone; one that writes texts may not even run without labels."""
        with torch.no_grad(), self._autocast():
            return self._outputs_of(batch) if self._generate is None else {"generated": self._generate(batch)}

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
        source = self._eval_source(data)
        plan = one_pass(source.num_samples, source.batch_size, self.runtime.num_processes)
        self.progress.start_evaluation(plan.steps_in_epoch)
        try:
            with self._only_looking(routine, plan.steps_in_epoch):
                windows = self._windows_in_order(source, plan, max_batches)
                if weighs:  # what is to be predicted may lack labels
                    windows = map(self._weigher.weigh_here, windows)
                routine.walk(windows)
        finally:
            self.progress.end_evaluation()
            source.close()

    @contextmanager
    def _only_looking(self, routine: Routine, num_batches: int | None) -> Iterator[None]:
        """Run a routine of one epoch around the body, and leave nothing behind but what its hooks keep."""
        lengths = {f"num_{routine.split}_batch": num_batches, f"num_{routine.split}_epoch": 1}
        with (
            EventStorage(),
            preserved_randomness(),
            looking_only(self.model),
            self._replicas.looked_at(is_free=self._generate is not None),
            routine.running(announce=lambda: self.ctx.merge_from_dict(lengths)),
            routine.epoch(),
        ):
            seed_device(step_seed(self.config.seed, 0, self.runtime.rank), self.runtime.device)
            yield

    def _windows_in_order(self, source: Source, plan: Plan, max_batches: int | None) -> Iterator[Window]:
        samples_left = UNLIMITED if max_batches is None else max_batches * plan.batch_size
        windows = source.windows(plan, 0, 0, UNLIMITED, samples_left)
        return windows if self._replicas.needs_lockstep else map(without_filler, windows)

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
                drawn = list(self.pictures())  # by every process: a model may be in pieces
                details = self._report_details(drawn) if self.runtime.is_main else {}
        finally:
            self._evaluation.saved, self._evaluated_data = None, None
        if metrics:
            refuse_absent_best(self.best_key, metrics)
        return metrics, details

    def _report_details(self, drawn: Sequence[Drawn]) -> dict[str, Any]:
        folder, pictures = self.folder, self.folder.pictures(self.state.global_step)
        details = ReportDetails(
            self.config, self.runtime, self.model, self.metrics_handler, self.preprocessor, folder.root, pictures
        )
        return details.of(self.last_evaluation, self._evaluated_data or {}, drawn)
