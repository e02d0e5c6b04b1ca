"""`evaluate`, `predict`, `export` and `find-lr`: commands that use a run or a recipe and leave it as it is.

While they are at work, a line on the terminal counts batches; it is gone at the end.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from hezar_train.cli.options import (
    debug_option,
    overrides_argument,
    plain_warnings,
    recipe_argument,
    recipe_option,
    refuse_unwritable_file,
    refuse_unwritable_folder,
    run_argument,
    trust_option,
)
from hezar_train.cli.output import echo
from hezar_train.config.files import write_atomically
from hezar_train.errors import ConfigError, MissingDependencyError
from hezar_train.run_layout import LR_FINDER_FILE

if TYPE_CHECKING:
    from hezar_train.loop import Context, HookSet
    from hezar_train.recipes import OpenRun
    from hezar_train.trainer.lr_finder import LRFinderResult

__all__ = [
    "counting",
    "evaluate",
    "export",
    "find_lr",
    "predict",
]

OUT = "--out FILE"
MOST_NAMED = 5
A_LOOK = ("push_to_hub=false", "trackers=[]", "resume_from_checkpoint=false")
"""What a look at a run does not do, whatever its config says."""
REFRESH_SECONDS = 0.25
ERASED_LINE = "\r\x1b[K"

checkpoint_option = click.option(
    "--checkpoint",
    metavar="best|last|STEP",
    default="best",
    show_default=True,
    help="Whose weights to take; without a best one, the last.",
)


@click.command("evaluate", short_help="Measure a run on its evaluation data, or on a split.")
@run_argument
@click.option("--split", metavar="NAME", help="A split (train, val, test) or a named evaluation set.")
@checkpoint_option
@click.option("--json", "as_json", is_flag=True, help="Print the exact values as JSON.")
@recipe_option
@trust_option
@debug_option
def evaluate(run: str, split: str | None, checkpoint: str, as_json: bool, recipe: str | None, trust: bool) -> None:
    """Evaluate a checkpoint of a run with the metrics of its config; nothing is written.

    \b
    Examples:
      hezar-train evaluate runs/image_classification
      hezar-train evaluate runs/image_classification --split train --checkpoint last
    """
    opened = _open(run, recipe, checkpoint, trust=trust)
    with counting(opened.trainer.hooks_in_eval, "evaluated"):
        metrics = opened.evaluate(split)
    if as_json:
        echo(json.dumps({"checkpoint": opened.checkpoint.name, "split": split, "metrics": metrics}))
        return
    from hezar_train.terminal import print_facts

    shown = opened.trainer.metrics_handler.shown
    print_facts({
        "checkpoint": str(opened.checkpoint),
        **({} if split is None else {"split": split}),
        **{name: shown(name, value) for name, value in metrics.items()},
    })  # fmt: skip


@click.command("predict", short_help="Predict for your own texts, images or sounds.")
@run_argument
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(allow_dash=True))
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False), help="Write JSON lines instead of printing.")
@checkpoint_option
@recipe_option
@trust_option
@debug_option
def predict(
    run: str, files: tuple[str, ...], out: str | None, checkpoint: str, recipe: str | None, trust: bool
) -> None:
    """Predict with a checkpoint of a run.

    FILE is a text file (.txt, a line each), a file of JSON lines (.jsonl), an image, a sound, or a folder of these; -
    reads lines from the standard input. Each is read as the run's recipe reads it. One line is printed for each: what
    was given, a tab, and the prediction.

    \b
    Examples:
      hezar-train predict runs/license_plate car.png
      hezar-train predict runs/text_classification mine.txt --out topics.jsonl
      echo "plays music in a terminal" | hezar-train predict runs/text_classification -
    """
    from hezar_train.recipes import gather_inputs

    if out is not None:
        refuse_unwritable_file(out, OUT)
    given = gather_inputs(files)
    opened = _open(run, recipe, checkpoint, trust=trust)
    with counting(opened.trainer.hooks_in_predict, "predicted"):
        found = list(zip(map(_plain, given), opened.predict(given), strict=True))
    if empty := [_text(one) for one, value in found if value == ""]:
        echo(f"nothing was found in {len(empty)} of {len(found)}: {', '.join(empty[:MOST_NAMED])}", err=True)
    if out is None:
        for one, value in found:
            echo(f"{_text(one)}\t{_text(value)}")
        return
    lines = (json.dumps({"input": one, "prediction": value}, ensure_ascii=False) for one, value in found)
    write_atomically(out, "".join(f"{line}\n" for line in lines))
    echo(f"{len(found)} predictions are in {out}" if len(found) != 1 else f"1 prediction is in {out}")


@click.command("export", short_help="Write the model of a run for others.")
@run_argument
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False))
@click.option("--merge", is_flag=True, help="Merge adapters into the weights: one whole model, which needs no peft.")
@click.option("--max-shard-size", metavar="SIZE", help="Files of at most this size, such as 5GB, with their index.")
@checkpoint_option
@recipe_option
@trust_option
@debug_option
def export(
    run: str, folder: str, merge: bool, max_shard_size: str | None, checkpoint: str, recipe: str | None, trust: bool
) -> None:
    """Write the model of a checkpoint to FOLDER: weights, its config, tokenizer or preprocessor.

    Of a run with adapters, or with save_trained_only, what was trained: adapters as PeftModel.from_pretrained loads
    them. With --merge the whole model, as its own library loads it.

    \b
    Examples:
      hezar-train export runs/image_classification exported
      hezar-train export runs/chat merged --merge --checkpoint last
    """
    refuse_unwritable_folder(folder, "FOLDER")
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise ConfigError(f"{folder} is not empty. Name a folder that is, or one that is not there yet.")
    opened = _open(run, recipe, checkpoint, trust=trust)
    opened.export(folder, merge=merge, max_shard_size=max_shard_size)
    echo(f"{opened.checkpoint} is in {folder}")


@click.command("find-lr", short_help="Suggest a learning rate for a recipe.")
@recipe_argument
@overrides_argument
@click.option("--num-steps", type=click.IntRange(min=2), default=100, show_default=True, help="Rates to try.")
@click.option("--lr-min", type=float, default=1e-7, show_default=True, help="The first rate.")
@click.option("--lr-max", type=float, default=10.0, show_default=True, help="The last rate.")
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help=f"The picture; else OUTPUT_DIR/{LR_FINDER_FILE}.",
)
@trust_option
@debug_option
def find_lr(
    recipe: str, overrides: tuple[str, ...], num_steps: int, lr_min: float, lr_max: float, out: str | None, trust: bool
) -> None:
    """Train a few updates with growing learning rates, from the first weights, and suggest one.

    Nothing of it is kept but a picture of the loss over the rate.

    \b
    Examples:
      hezar-train find-lr image_classification
      hezar-train find-lr image_classification batch_size=64 --lr-max 1
    """
    from hezar_train.recipes import build_trainer, load_target

    with plain_warnings():
        loaded = load_target(recipe, ["resume_from_checkpoint=false", *overrides], trust=trust)
    picture = Path(loaded.config.output_dir) / LR_FINDER_FILE if out is None else Path(out)
    refuse_unwritable_file(picture, OUT)
    result = build_trainer(loaded).find_lr(lr_min, lr_max, num_steps)
    _draw(result, picture)
    low, high = result.get_lr_range()
    echo(f"{result}\nA range for schedules that go up and down: {low:.3g} to {high:.3g}")
    echo(f"To train with it: hezar-train train {shlex.join([recipe, *overrides])} learning_rate={high:.3g}")


def _draw(result: LRFinderResult, path: Path) -> None:
    try:
        echo(f"The curve is in {result.plot(path)}")
    except (MissingDependencyError, OSError, ValueError) as error:  # the rates count, not the picture of them
        echo(f"warning: there is no picture. {error}", err=True)


def _open(run: str, recipe: str | None, checkpoint: str, *, trust: bool) -> OpenRun:
    from hezar_train.recipes import load_run, open_run

    with plain_warnings():
        accepted = ["accept_changes=true"] if trust else []
        loaded = load_run(run, [*A_LOOK, *accepted], recipe, trust=trust)
    return open_run(loaded, checkpoint)


def _plain(given: Any) -> Any:
    return str(given) if isinstance(given, Path) else given


def _text(value: Any) -> str:
    """Return a value on one line, without a tab."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split())


@contextmanager
def counting(hooks: HookSet, what: str) -> Iterator[None]:
    """Count the batches of a hook set while the body runs; only a terminal shows it."""
    if not sys.stderr.isatty():
        yield
        return
    from hezar_train.loop import Moment

    num_batches, last_shown = 0, float("-inf")

    def count(ctx: Context) -> None:  # noqa: ARG001 - what a hook is called with
        nonlocal num_batches, last_shown
        num_batches += 1
        if perf_counter() - last_shown >= REFRESH_SECONDS:
            click.echo(f"{ERASED_LINE}{what}: {num_batches} batches", nl=False, err=True)
            last_shown = perf_counter()

    hooks.register(count, Moment.BATCH_END, name=count.__name__)
    try:
        yield
    finally:
        hooks.remove(Moment.BATCH_END, count.__name__)
        click.echo(ERASED_LINE, nl=False, err=True)
