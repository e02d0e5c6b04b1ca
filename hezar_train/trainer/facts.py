"""The facts of a run that `print_info` shows."""

from __future__ import annotations

from torch import nn

from hezar_train.config import TrainerConfig
from hezar_train.optim import Schedule
from hezar_train.plan import Plan
from hezar_train.runtime import Runtime
from hezar_train.state import TrainerState

__all__ = ["facts_of", "num_parameters"]


def num_parameters(model: nn.Module, *, trainable: bool = False) -> int:
    """Count the parameters, or only those that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def facts_of(
    config: TrainerConfig, plan: Plan, runtime: Runtime, model: nn.Module, schedule: Schedule, state: TrainerState,
    *, optimizer: object, eval_samples: int | None, best_key: str,
) -> dict[str, str]:  # fmt: skip
    """Collect what a person wants to see before a run starts, in words."""
    return {
        "Output folder": str(config.output_dir),
        "Task": str(config.task or "-"),
        **_of_the_model(model),
        "Device": str(runtime.device),
        "Processes": str(runtime.num_processes),
        "Precision": {"no": "fp32"}.get(runtime.precision, runtime.precision),
        **_of_the_plan(plan, eval_samples),
        "Optimizer": type(optimizer).__name__,
        "Learning rate": _learning_rate(optimizer, schedule),
        "Schedule": schedule.name or "-",
        "Best model by": best_key,
        "Saves": "off" if not config.save_enabled else _period(plan.save_updates, "at epoch ends"),
        "Logs": _period(plan.log_updates, "at epoch ends"),
        "Seed": str(config.seed),
        "Starts at": f"step {state.global_step}, epoch {state.epoch}" if state.global_step else "the beginning",
    }


def _of_the_model(model: nn.Module) -> dict[str, str]:
    total, trained = num_parameters(model), num_parameters(model, trainable=True)
    return {"Model": type(model).__name__, "Parameters": f"{total:,} ({trained:,} trained)"}


def _of_the_plan(plan: Plan, eval_samples: int | None) -> dict[str, str]:
    return {
        "Training samples": _count(plan.num_samples),
        "Evaluation samples": _count(eval_samples),
        "Epochs": str(plan.num_epochs),
        "Batch size": str(plan.batch_size),
        "Gradient accumulation": str(plan.accumulation),
        "Samples per update": str(plan.window_samples),
        "Steps per epoch": _count(plan.steps_in_epoch),
        "Total steps": f"{plan.total_steps:,}",
        "Total updates": f"{plan.total_updates:,}",
    }


def _learning_rate(optimizer: object, schedule: Schedule) -> str:
    """Tell the rate that the optimizer was made with, and that of the moment where a schedule makes it another."""
    rates = schedule.rates()
    now = ", ".join(f"{rate:g}" for rate in (rates[:1] if len(set(rates)) == 1 else rates))
    made_with = getattr(optimizer, "defaults", {}).get("lr")
    if schedule.name is None or made_with is None or f"{float(made_with):g}" == now:
        return now
    return f"{float(made_with):g} (now {now})"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _period(updates: int | None, otherwise: str) -> str:
    return otherwise if updates is None else f"every {updates:,} updates and {otherwise}"
