"""A script that reads like LiBai's `tools/train_net.py`: a lazy config, overrides of its keys, train or evaluate.

python docs/examples/train_net.py --config-file docs/examples/train_net_config.py train.train_iter=100
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # for the config's own imports
from hezar_train.compat.libai import Checkpointer
from hezar_train.compat.libai.config import LazyConfig, default_argument_parser, try_get_key
from hezar_train.compat.libai.engine import DefaultTrainer, default_setup


def shorten(cfg: Any) -> None:
    """Let a run be a trial: 20 iterations, two evaluations, every iteration logged."""
    cfg.train.train_epoch, cfg.train.train_iter = 0, 20
    cfg.train.evaluation.eval_period, cfg.train.log_period = 10, 1


def evaluate(cfg: Any, resume: bool) -> dict[str, Any]:
    """Evaluate the weights of `train.load_weight`, or the last ones saved."""
    tokenizer = DefaultTrainer.build_tokenizer(cfg) if try_get_key(cfg, "tokenization") is not None else None
    model = DefaultTrainer.build_model(cfg)
    Checkpointer(model, save_dir=cfg.train.output_dir).resume_or_load(cfg.train.load_weight, resume=resume)
    return DefaultTrainer.test(cfg, DefaultTrainer.build_test_loader(cfg, tokenizer), model)


def main(args: argparse.Namespace) -> Any:
    """Do what the command line asks for."""
    cfg = LazyConfig.load(args.config_file)
    cfg = LazyConfig.apply_overrides(cfg, args.opts)
    default_setup(cfg, args)
    if args.fast_dev_run:
        shorten(cfg)
    if args.eval_only:
        return evaluate(cfg, args.resume)
    trainer = DefaultTrainer(cfg)
    return trainer.train()


if __name__ == "__main__":
    main(default_argument_parser().parse_args())
