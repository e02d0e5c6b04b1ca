"""LiBai's lazy configs: calls described, made, read from files, overridden and written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.compat.libai.config import (
    LazyCall,
    LazyConfig,
    configurable,
    default_argument_parser,
    get_config,
    instantiate,
    try_get_key,
)
from hezar_train.compat.libai.optim import get_default_optimizer_params
from hezar_train.errors import ConfigError, MissingDependencyError


class TestCalls:
    def test_a_call_is_made_when_it_is_asked_for_with_what_was_changed(self) -> None:
        cfg = LazyCall(nn.Sequential)()
        layer = LazyCall(nn.Linear)(in_features=4, out_features=2, bias=False)
        layer.out_features = 3
        made = instantiate(layer)
        assert tuple(made.weight.shape) == (3, 4)
        assert isinstance(instantiate(cfg), nn.Sequential)

    def test_calls_inside_a_call_are_made_first_unless_told_otherwise(self) -> None:
        cfg = LazyCall(dict)(inner=LazyCall(dict)(a=1), several=[LazyCall(dict)(b=2)])
        assert instantiate(cfg) == {"inner": {"a": 1}, "several": [{"b": 2}]}
        assert instantiate(cfg, _recursive_=False)["inner"]["_target_"] == "builtins.dict"

    def test_a_dotted_name_is_a_target_too(self) -> None:
        assert isinstance(instantiate({"_target_": "torch.nn.ReLU"}), nn.ReLU)
        with pytest.raises(ConfigError, match=r"'torch.nn.Rehlu' cannot be found"):
            instantiate({"_target_": "torch.nn.Rehlu"})

    def test_a_failed_call_says_which_it_was(self) -> None:
        with pytest.raises(TypeError) as failed:
            instantiate(LazyCall(nn.Linear)(in_features=4))
        assert "Linear(in_features)" in failed.value.__notes__[0]

    def test_a_constructor_may_take_a_config(self) -> None:
        class Model:
            @configurable
            def __init__(self, width: int, depth: int = 1) -> None:
                self.width, self.depth = width, depth

            @classmethod
            def from_config(cls, cfg: Any) -> dict[str, Any]:
                return {"width": cfg.width}

        made = instantiate(LazyCall(Model)(cfg={"width": 7}, depth=2))
        assert (made.width, made.depth) == (7, 2)
        assert Model(3).width == 3


class TestFiles:
    def test_a_file_is_run_with_its_relative_imports_each_time_anew(self, tmp_path: Path) -> None:
        (tmp_path / "common").mkdir()
        (tmp_path / "common" / "train.py").write_text("train = dict(output_dir='out', amp=dict(enabled=False))\n")
        (tmp_path / "run.py").write_text(
            "from .common.train import train\nfrom hezar_train.compat.libai import LazyCall\n"
            "train.amp.enabled = True\nmodel = LazyCall(dict)(a=1)\n_hidden = dict(a=1)\nnumber = 3\n"
        )
        cfg = LazyConfig.load(str(tmp_path / "run.py"))
        assert sorted(cfg) == ["model", "train"]
        assert cfg.train.amp.enabled is True
        assert LazyConfig.load(tmp_path / "common" / "train.py", "train").amp.enabled is False
        with pytest.raises(ConfigError, match=r"has no optim. It has: model, train"):
            LazyConfig.load(tmp_path / "run.py", ("train", "optim"))

    def test_overrides_have_types_and_say_where_there_is_no_group(self) -> None:
        cfg = get_config("common/train.py")
        changes = ["train.train_iter=7", "train.amp.enabled=true", "train.warmup_ratio=1e-2", "train.load_weight=a/b"]
        train = LazyConfig.apply_overrides(cfg, changes).train
        assert (train.train_iter, train.amp.enabled, train.warmup_ratio, train.load_weight) == (7, True, 0.01, "a/b")
        with pytest.raises(ConfigError, match="seed is a int, not a group"):
            LazyConfig.apply_overrides(cfg, ["train.seed.number=1"])
        with pytest.raises(ConfigError, match="expected key=value"):
            LazyConfig.apply_overrides(cfg, ["train.seed"])

    def test_a_written_config_is_read_again_without_running_anything(self, tmp_path: Path) -> None:
        cfg = LazyConfig.load(_file_of(tmp_path))
        LazyConfig.save(cfg, tmp_path / "config.yaml")
        again = LazyConfig.load(tmp_path / "config.yaml")
        assert again.model == {"_target_": "torch.nn.modules.linear.Linear", "in_features": 4, "out_features": 2}
        assert isinstance(instantiate(again.model), nn.Linear)

    def test_groups_that_are_not_there_are_told(self) -> None:
        assert get_config("common/optim.py").optim.lr == 1e-4
        with pytest.raises(ConfigError, match=r"no config 'common/models/bert.py' here"):
            get_config("common/models/bert.py")

    def test_a_key_may_be_missing(self) -> None:
        cfg = get_config("common/train.py")
        assert try_get_key(cfg, "train.topk", "train.seed") == 1234
        assert try_get_key(cfg, "train.topk", default=5) == 5


def _file_of(folder: Path) -> Path:
    path = folder / "run.py"
    path.write_text(
        "from torch import nn\nfrom hezar_train.compat.libai import LazyCall\n"
        "model = LazyCall(nn.Linear)(in_features=4, out_features=2)\n"
    )
    return path


def test_the_arguments_of_train_net_are_libais() -> None:
    args = default_argument_parser().parse_args(["--config-file", "a.py", "--resume", "train.seed=1"])
    assert (args.config_file, args.resume, args.eval_only, args.fast_dev_run) == ("a.py", True, False, False)
    assert args.opts == ["train.seed=1"]


def test_without_omegaconf_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hezar-train\[libai\]'"):
        LazyCall(dict)(a=1)


def test_norms_biases_and_overridden_names_have_settings_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].bias.requires_grad_(False)
    groups = get_default_optimizer_params(
        model, weight_decay_norm=0.0, weight_decay_bias=0.1, clip_grad_max_norm=1.0, clip_grad_norm_type=2.0
    )
    clip = {"clip_grad_max_norm": 1.0, "clip_grad_norm_type": 2.0}
    found = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    assert found == [clip, {**clip, "weight_decay": 0.0}, {**clip, "weight_decay": 0.1}]
    assert [len(group["params"]) for group in groups] == [1, 1, 1]
    torch.optim.AdamW(groups, lr=0.1)
