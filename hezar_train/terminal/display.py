"""Show the facts of a run: as a table on a terminal, as aligned plain lines elsewhere; and draw lines with a bar.

`facts_of` collects what `print_info` shows before a run starts, `print_facts` shows any facts. `Painter` turns rich
text into the characters that a terminal wants, in the room that there is; `send` writes them, and escapes what the
stream's encoding lacks.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from torch import nn

from hezar_train.config import TrainerConfig
from hezar_train.errors import printable
from hezar_train.optim import Pace, Schedule
from hezar_train.plan import Plan
from hezar_train.runtime import Runtime
from hezar_train.runtime.logging import can_draw_on, columns_of, folded
from hezar_train.state import TrainerState

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "Painter",
    "can_draw_on",
    "facts_of",
    "info_table",
    "num_parameters",
    "print_facts",
    "send",
]

_MAX_BAR_WIDTH = 40
_WANTED_BAR_WIDTH = 10
_MIN_BAR_WIDTH = 5
_BORDERS = len("│  │  │")


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
        "Schedule": _schedule(schedule),
        "Best model by": best_key,
        "Saves": "off" if not config.save_enabled else _period(plan.save_updates, "at epoch ends"),
        "Logs": _period(plan.log_updates, "at epoch ends"),
        "Seed": str(config.seed),
        "Starts at": _start(state, plan),
    }


def _start(state: TrainerState, plan: Plan) -> str:
    """Say what is done already, and which epoch the next step is of."""
    if state.global_step == 0:
        return "the beginning"
    if state.epoch_finished and state.epoch >= plan.num_epochs:
        return f"the end, after step {state.global_step}"
    return f"epoch {state.epoch + state.epoch_finished}, after step {state.global_step}"


def _of_the_model(model: nn.Module) -> dict[str, str]:
    total, trained = num_parameters(model), num_parameters(model, trainable=True)
    return {"Model": type(model).__name__, "Parameters": f"{total:,} ({trained:,} trained)"}


def _of_the_plan(plan: Plan, eval_samples: int | None) -> dict[str, str]:
    return {
        "Training samples": _count(plan.num_samples),
        "Evaluation samples": _count(eval_samples),
        "Epochs": str(plan.num_epochs),
        **_of_batches(plan),
        "Steps per epoch": _count(plan.steps_in_epoch),
        "Total steps": f"{plan.total_steps:,}",
        "Total updates": f"{plan.total_updates:,}",
    }


def _of_batches(plan: Plan) -> dict[str, str]:
    """Tell what bounds a step and an update: samples or tokens."""
    step = {} if plan.step_tokens is None else {"Tokens per step": f"at most {plan.step_tokens:,}"}
    if plan.window_tokens is not None:
        tokens = f"at most {plan.window_tokens:,}"
        return {**step, "Tokens per update": tokens, "Samples per update": f"{plan.window_samples} on average"}
    return {
        "Batch size": str(plan.batch_size),
        "Gradient accumulation": str(-(-plan.window_samples // plan.step_samples)),
        **step,
        "Samples per update": str(plan.window_samples),
    }


def _learning_rate(optimizer: object, schedule: Schedule) -> str:
    """Tell the rate that the optimizer was made with, and that of the moment where a schedule makes it another."""
    rates = schedule.rates()
    now = ", ".join(f"{rate:g}" for rate in (rates[:1] if len(set(rates)) == 1 else rates))
    made_with = getattr(optimizer, "defaults", {}).get("lr")
    is_driven = schedule.name is not None or schedule.is_warming
    if not is_driven or made_with is None or f"{float(made_with):g}" == now:
        return now
    return f"{float(made_with):g} (now {now})"


def _schedule(schedule: Schedule) -> str:
    """Tell the schedule, when it ticks, and how long its warm-up is."""
    warmup = schedule.warmup_updates
    led = f"a warm-up of {warmup:,} updates" if warmup else ""
    if schedule.name is None:
        return led or "-"
    when = {Pace.TICK: "every update", Pace.EPOCH: "at epoch ends", Pace.EVALUATION: "after evaluations"}
    ticks = when[schedule.rate_pace or Pace.TICK]
    if schedule.rate_pace is Pace.TICK and schedule.period_updates != 1:
        ticks = f"every {schedule.period_updates:,} updates"
    return f"{schedule.name}, ticks {ticks}{f', after {led}' if led else ''}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _period(updates: int | None, otherwise: str) -> str:
    return otherwise if updates is None else f"every {updates:,} updates and {otherwise}"


def info_table(facts: Mapping[str, str], columns: int = 80) -> Table:
    """Make a two-column table of facts, for a terminal of so many columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    room = columns - _BORDERS - max(map(len, facts), default=0)
    for name, value in facts.items():
        table.add_row(Text(name), Text(_foldable(str(value), room)))
    return table


def print_facts(facts: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Print facts: a table on a terminal, aligned plain lines elsewhere."""
    stream = sys.stdout if stream is None else stream
    facts = {printable(name): printable(str(value)) for name, value in facts.items()}
    if can_draw_on(stream):
        send(stream, Painter(stream).paint(info_table(facts, columns_of(stream))))
        return
    width = max((len(name) for name in facts), default=0)
    send(stream, "".join(f"{name:<{width}}  {value}\n" for name, value in facts.items()))


def _foldable(value: str, room: int) -> str:
    """Let a word that is too long for its column, such as a path, go on in the next line after a slash or a dot."""
    if all(len(word) <= room for word in value.split()):
        return value
    return folded(re.split(r"(?<=[ /._])", value), room, gap="")


class Painter:
    """Turn rich text into the characters that a terminal wants.

    It renders into a buffer of its own: given the stream, rich would end the process when the stream breaks, and would
    take the width of another one.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._buffer = io.StringIO()
        self._console = Console(file=self._buffer, force_terminal=True, markup=False, highlight=False)
        self._mark = "━" if (stream.encoding or "utf-8").lower().startswith("utf") else "-"

    def paint(self, what: RenderableType) -> str:
        """Return what rich makes of `what`."""
        self._console.width = columns_of(self._stream)
        self._console.print(what, end="")
        painted = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return painted

    def bar(self, label: str, done: int, total: int | None, parts: Sequence[str], spare: Sequence[str] = ()) -> str:
        """Return a label, a bar and the parts on one line; `spare` are those that make room for it, first to last."""
        from rich.text import Text

        width = columns_of(self._stream) - 1  # a character in the last column makes some terminals wrap
        kept = _kept([label, *parts], spare, width - (_WANTED_BAR_WIDTH if total else 0))
        marks = self._marks(min(_MAX_BAR_WIDTH, width - _length(kept)), done, total)
        place = 1 if label in kept else 0
        line = Text("  ").join(part for part in (*map(Text, kept[:place]), marks, *map(Text, kept[place:])) if part)
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
        return self.paint(line)

    def folded(self, parts: Sequence[str]) -> str:
        """Return the parts on as many lines as they take; none is cut."""
        return folded(parts, columns_of(self._stream))

    def _marks(self, width: int, done: int, total: int | None) -> Text:
        from rich.text import Text

        if width < _MIN_BAR_WIDTH or not total:
            return Text()
        filled = min(width, width * done // total)
        style = "bar.finished" if done >= total else "bar.complete"
        return Text.assemble((self._mark * filled, style), (self._mark * (width - filled), "bar.back"))


def _kept(parts: list[str], spare: Sequence[str], room: int) -> list[str]:
    """Return the parts without as many of the spare ones, first to last, as there is no room for."""
    for part in spare:
        if _length(parts) <= room:
            break
        parts = [other for other in parts if other is not part]
    return parts


def _length(parts: Sequence[str]) -> int:
    return sum(len(part) + 2 for part in parts)


def send(stream: TextIO, text: str) -> None:
    """Write at once; what the stream's encoding lacks is escaped, for a line is no reason to lose a run."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
