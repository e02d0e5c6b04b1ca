"""The run of `workload.py` under Ray Train: ray_run.py OUT WORKERS [RANK:STEP:SIGNAL ...] [--bad-sample].

A worker sends itself each signal once, at the step that follows so many finished ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer


def train_on_worker(settings: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from workload import Hook, NoisyPoints, Slow, Trainer, make_config, make_net

    out, rank = settings["out"], int(os.environ["RANK"])

    class Hit(Hook):
        def before_step(self) -> None:
            for one in settings["signals"]:
                name = Path(f"{out}.{one}")
                victim, step, number = one.split(":")
                if (rank, self.trainer.state.global_step) == (int(victim), int(step)) and not name.exists():
                    name.touch()
                    os.kill(os.getpid(), signal.Signals[number])

    group, data = dist.group.WORLD, NoisyPoints(151)
    if settings["bad_sample"]:
        data.points[7] = float("nan")
    config = make_config(out, num_threads=1, collective_timeout_seconds=10.0)
    trainer = Trainer(config, make_net(), data, NoisyPoints(22), hooks=[Slow(0.02), Hit()])
    trainer.train()
    return {"own_group": group is not dist.group.WORLD, "backend": dist.get_backend(), "device": str(trainer.device)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("workers", type=int)
    parser.add_argument("signals", nargs="*", default=[])
    parser.add_argument("--bad-sample", action="store_true")
    options = parser.parse_args()
    ray.init(num_cpus=options.workers, include_dashboard=False)
    failures = FailureConfig(max_failures=len(options.signals))
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"out": options.out, "signals": options.signals, "bad_sample": options.bad_sample},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(name="run", storage_path=f"{options.out}.ray", failure_config=failures),
    )
    try:
        found = trainer.fit().return_value
    except WorkerGroupError as error:
        told = error.worker_failures[0]
        found = {"error": type(told).__name__, "step": told.step, "samples": told.samples}
    print(f"\nFOUND {json.dumps(found)}")


if __name__ == "__main__":
    main()
