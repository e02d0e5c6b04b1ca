"""lernomatic's finder of learning rates: its names on a sweep, both curves drawn, and files that show it again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hezar_train import Trainer
from hezar_train.compat.lernomatic import LogFinder, find_lr, lr_finder_auto_load
from hezar_train.errors import ConfigError, DataError
from hezar_train.trainer.lr_finder import SweepSettings

Toy = Callable[..., Trainer]
Rows = Callable[..., list[dict[str, Any]]]


class TestLogFinder:
    @pytest.fixture
    def finder(self, toy: Toy, rows: Rows) -> LogFinder:
        trainer = toy(task="text_classification", eval_dataset=rows(20, 2), train_dataset=rows(80))
        return LogFinder(trainer, lr_min=1e-3, beta=0.9)

    def test_one_epoch_leads_from_the_least_rate_to_the_largest(self, finder: LogFinder) -> None:
        low, high = finder.find()
        assert finder.get_lr_range() == (low, high)
        assert 1e-3 <= low < high <= 1.0
        assert len(finder.log_lr_history) == len(finder.smooth_loss_history) == len(finder.acc_history) == 20
        assert finder.get_lr_history() == pytest.approx(list(np.linspace(-3, 0, 20)))

    def test_so_many_batches_are_tried_at_most(self, finder: LogFinder) -> None:
        finder.max_batches = 5
        finder.find()
        assert len(finder.log_lr_history) == 5

    def test_each_update_but_the_first_tells_what_it_added_to_the_mean_loss(self, finder: LogFinder) -> None:
        assert finder.loss_grad_history == []
        finder.find()
        mean, added = 0.0, []
        for loss in finder.result.losses:  # type: ignore[union-attr]
            before, mean = mean, 0.9 * mean + (1 - 0.9) * loss
            added.append(mean - before)
        assert finder.loss_grad_history == pytest.approx(added[1:], rel=1e-12)

    def test_accuracies_are_those_of_all_validation_data(self, toy: Toy, rows: Rows) -> None:
        trainer = toy(task="text_classification", eval_dataset=rows(80, 2), train_dataset=rows(80))
        finder = LogFinder(trainer, lr_min=1e-3, beta=0.9)
        finder.find()
        sweep = {"lr_min": 1e-3, "lr_max": 1.0, "num_steps": 20, "acc_test": True, "beta": 0.9}
        assert finder.acc_history == trainer.find_lr(**sweep, acc_batches=None).accuracies
        assert finder.acc_history != trainer.find_lr(**sweep, acc_batches=8).accuracies

    def test_a_file_holds_everything_but_the_trainer(self, finder: LogFinder, tmp_path: Path) -> None:
        found = finder.find()
        loaded = lr_finder_auto_load(finder.save(tmp_path / "rates.json"))
        assert (loaded.get_lr_range(), loaded.result) == (found, finder.result)
        assert loaded.loss_grad_history == finder.loss_grad_history
        assert json.loads((tmp_path / "rates.json").read_text())["accuracies"] == finder.acc_history
        with pytest.raises(DataError, match="this finder has no trainer"):
            loaded.find()

    @pytest.mark.parametrize("name", ["rates.json", "rates.pth"])
    def test_a_file_of_any_name_brings_the_settings_back(self, finder: LogFinder, tmp_path: Path, name: str) -> None:
        assert finder.lr_mult == 0.0
        finder.find()
        loaded = lr_finder_auto_load(finder.save(tmp_path / name))
        assert (loaded.lr_min, loaded.lr_max, loaded.beta, loaded.lr_mult) == (1e-3, 1.0, 0.9, finder.lr_mult)
        assert finder.lr_mult == pytest.approx(1000 ** (1 / 19))

    @pytest.mark.parametrize("content", ["PK pickled", "[1]", '{"rates": [1.0]}'])
    def test_another_file_is_told(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "rates.pth").write_text(content)
        with pytest.raises(DataError, match=r"rates.pth is no file that a finder has saved here"):
            lr_finder_auto_load(tmp_path / "rates.pth")

    def test_an_unknown_setting_is_told_with_the_nearest_name(self) -> None:
        with pytest.raises(ConfigError, match=r"find_lr_select_method='max_acc' is no setting .*lr_select_method"):
            LogFinder(None, find_lr_select_method="max_acc")

    @pytest.mark.parametrize("log", [False, True])
    def test_both_curves_are_drawn_over_the_rate_or_its_exponent(self, finder: LogFinder, log: bool) -> None:
        axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
        finder.find()
        finder.plot_lr_vs_loss(axes, log=log)
        finder.plot_lr_vs_acc(axes, "mine", log=log)
        drawn = [list(line.get_xdata()) for line in axes.lines]
        rates = finder.log_lr_history if log else finder.result.rates  # type: ignore[union-attr]
        low, high = (math.log10(rate) if log else rate for rate in finder.get_lr_range())
        assert drawn == [rates, [low] * 2, [high] * 2] * 2
        assert axes.get_title() == "mine"

    def test_before_a_sweep_there_is_nothing_to_show(self, finder: LogFinder) -> None:
        assert (finder.get_lr_history(), finder.acc_history, finder.smooth_loss_history) == (None, [], [])
        with pytest.raises(DataError, match="nothing was found yet"):
            finder.get_lr_range()

    def test_accuracies_need_evaluation_data(self, toy: Toy) -> None:
        with pytest.raises(ValueError, match="accuracies are measured on evaluation data"):
            LogFinder(toy()).find()


def test_settings_sweep_as_the_trainers_own_verb_does(toy: Toy) -> None:
    found = find_lr(toy(), SweepSettings(lr_min=1e-6, lr_max=1.0, num_steps=12, beta=0.5))
    assert found == toy(out="other").find_lr(1e-6, 1.0, 12, beta=0.5)
