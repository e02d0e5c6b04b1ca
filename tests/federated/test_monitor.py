from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import nn

from hezar_train import Trainer
from hezar_train.errors import ConfigError, DataError
from hezar_train.federated import Monitor
from hezar_train.loop import Context

Build = Callable[..., Trainer]
RESULTS = {"test_total": [10, 30], "test_correct": [5, 30], "test_acc": [0.5, 1.0], "test_avg_loss": [2.0, 1.0]}


@pytest.fixture
def monitored(worker: Build, rows: Any) -> Trainer:
    data = {"train": rows(), "val": rows(30, seed=2), "test": rows(31, seed=3)}
    return worker(arguments={"train_dataset": data, "hooks": [Monitor(["acc", "f1", "roc_auc"])]})


@pytest.mark.parametrize("split", ["val", "test", "train"])
def test_metrics_of_a_split_are_those_of_scikit_learn_on_all_of_it(monitored: Trainer, split: str) -> None:
    loss = monitored.evaluate(split)["loss"]
    data = monitored.splits.data[split]
    labels = np.array([row["labels"] for row in data])
    shares = monitored.model(torch.stack([row["x"] for row in data])).softmax(1).detach().numpy()
    expected = {
        "loss": loss * len(data),
        "avg_loss": loss,
        "total": len(data),
        "acc": accuracy_score(labels, shares.argmax(1)),
        "f1": f1_score(labels, shares.argmax(1), average="macro"),
        "roc_auc": roc_auc_score(labels, shares, multi_class="ovr"),
    }
    found = monitored.ctx.eval_metrics
    assert set(found) == {f"{split}_{name}" for name in expected}
    for name, value in expected.items():
        assert found[f"{split}_{name}"] == pytest.approx(value, rel=1e-5), name


def test_labels_and_outputs_are_there_at_the_end_of_an_evaluation_and_gone_after_it(monitored: Trainer) -> None:
    shapes: list[Any] = []
    monitored.register_hook_in_eval(lambda ctx: shapes.extend([ctx.ys_true.shape, ctx.ys_prob.shape]), "on_fit_end")
    monitored.evaluate("val")
    assert shapes == [(30,), (30, 3)]
    assert monitored.ctx.ys_true is None


def test_nothing_is_gathered_without_a_monitor_or_in_training(worker: Build, monitored: Trainer, rows: Any) -> None:
    seen: list[Any] = []

    def note(ctx: Context) -> None:
        seen.append(ctx.ys_true)

    monitored.register_hook_in_train(note, "on_fit_end")
    monitored.train()
    plain = worker(out="plain", arguments={"eval_dataset": rows(3)})
    plain.register_hook_in_eval(note, "on_fit_end")
    plain.evaluate()
    assert seen == [None, None]


def test_an_evaluation_inside_training_is_measured_too(monitored: Trainer) -> None:
    found: list[float] = []
    monitored.register_hook_in_train(lambda ctx: found.append(ctx.eval_metrics["val_acc"]), "on_fit_end")
    monitored.train()
    monitored.evaluate("val")
    assert found == [monitored.ctx.eval_metrics["val_acc"]]


def test_hooks_find_it_as_ctx_monitor(monitored: Trainer) -> None:
    assert isinstance(monitored.ctx.monitor, Monitor)


def test_a_model_without_logits_is_refused(worker: Build, rows: Any) -> None:
    class Silent(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": super().forward(x).mean()}

    arguments = {"model": Silent(4, 3), "eval_dataset": rows(3), "hooks": [Monitor()]}
    trainer = worker(arguments=arguments, criterion=None)
    with pytest.raises(DataError, match="a Monitor needs batches with labels and a model that returns logits"):
        trainer.evaluate()


def test_the_size_of_models_is_the_number_of_their_parameters() -> None:
    monitor = Monitor()
    assert monitor.track_model_size(nn.Linear(4, 3)) == 15
    assert monitor.track_model_size([nn.Linear(4, 3), nn.Linear(2, 2)]) == monitor.total_model_size == 21


def test_the_best_record_is_one_evaluation_as_a_whole() -> None:
    monitor, best = Monitor(best_res_update_round_wise_key="val_acc"), {}
    rounds = [(0.5, 2.0), (0.8, 3.0), (0.8, 1.0), (0.7, 0.5), (math.nan, 0.1)]
    taken = [monitor.update_best_result(best, {"val_acc": a, "val_loss": b}, "client") for a, b in rounds]
    assert taken == [True, True, False, False, False]
    assert best == {"client": {"val_acc": 0.8, "val_loss": 3.0}}


def test_by_default_the_smaller_mean_loss_is_better() -> None:
    monitor, best = Monitor(), {}
    for value in (2.0, 1.0, 3.0):
        monitor.update_best_result(best, {"val_avg_loss": value}, "client")
    assert best["client"]["val_avg_loss"] == 1.0


def test_a_result_without_the_key_is_refused_and_so_is_a_key_without_direction() -> None:
    with pytest.raises(DataError, match=r"has no 'val_avg_loss'.*It has: val_acc"):
        Monitor().update_best_result({}, {"val_acc": 1.0}, "client")
    with pytest.raises(ConfigError, match="'colour' is not a metric"):
        Monitor(best_res_update_round_wise_key="val_colour")


def test_the_forms_of_a_report() -> None:
    report = Monitor().format_eval_res(RESULTS, rnd=3)
    assert (report["Role"], report["Round"]) == ("Server #", 3)
    assert report["Results_weighted_avg"] == {
        "test_total": 20, "test_correct": 17.5, "test_acc": 0.875, "test_avg_loss": 1.25
    }  # fmt: skip
    assert report["Results_avg"]["test_acc"] == 0.75
    assert report["Results_raw"] == RESULTS
    assert Monitor().format_eval_res(RESULTS, rnd=3, return_raw=True).keys() == {"Role", "Round", "Results_raw"}
    assert Monitor().format_eval_res(RESULTS, rnd=3, forms=["avg"]).keys() == {"Role", "Round", "Results_avg"}


def test_fairness_tells_how_evenly_workers_fare() -> None:
    values = [float(value) for value in range(1, 21)]
    results = {"val_total": [1] * 20, "val_acc": values[::-1]}
    found = Monitor().format_eval_res(results, rnd=0, forms=["fairness"])["Results_fairness"]
    shares = np.array(values) / 210
    assert found == {
        "val_total": 1,
        "val_acc_std": pytest.approx(np.std(values)),
        "val_acc_bottom_decile": 3,
        "val_acc_top_decile": 19,
        "val_acc_min": 1,
        "val_acc_max": 20,
        "val_acc_bottom10%": 1.5,
        "val_acc_top10%": 19.5,
        "val_acc_cos1": pytest.approx(10.5 / np.sqrt(np.mean(np.square(values)))),
        "val_acc_entropy": pytest.approx(-(shares * np.log(shares)).sum()),
    }


def test_a_workers_own_result_stays_as_it_is() -> None:
    report = Monitor().format_eval_res({"test_acc": 0.5}, rnd=1, role="Client #3")
    assert report == {"Role": "Client #3", "Round": 1, "Results_raw": {"test_acc": 0.5}}


def test_unknown_forms_and_missing_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"form='avrage' is not known.*Did you mean 'avg'|'weighted_avg'"):
        Monitor().format_eval_res(RESULTS, rnd=0, forms=["avrage"])
    with pytest.raises(DataError, match="no 'test_total'"):
        Monitor().format_eval_res({"test_acc": [1.0]}, rnd=0)
