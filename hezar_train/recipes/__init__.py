"""From a recipe, or from a run's folder, to a trainer: find, read, override, check, build.

A recipe is a folder with `recipe.py`, which defines `build(**options) -> Recipe` and never a loop, and `config.yaml`
with two sections: `recipe:` (the options of `build`) and `trainer:` (a `TrainerConfig`). This package owns the format,
the search for a name, the record that a run keeps of its recipe, and the way back from that record. It refuses to run
anything before every mistake in the config and the options is known: `build`'s options are read from its source, so
that a check needs no torch.
"""

from __future__ import annotations

from hezar_train.recipes.build import (
    RECORD_FILE,
    build_trainer,
    load_any,
    load_run,
    load_target,
    option_names,
    recipe_of_hash,
    refuse_changed_recipe,
    refuse_without_checkpoint,
    resumed,
    run_config,
    saved_checkpoints,
)
from hezar_train.recipes.importing import import_recipe
from hezar_train.recipes.loading import (
    PictureSize,
    asked_for,
    load_pictures,
    load_splits,
    refuse_missing_columns,
    small_greys,
    with_held_out,
)
from hezar_train.recipes.open_run import Inputs, OpenRun, gather_inputs, open_run, path_of, text_of
from hezar_train.recipes.pretraining import pretrained_by
from hezar_train.recipes.recipe import (
    CONFIG_NAME,
    RECIPE_NAME,
    LoadedRecipe,
    Recipe,
    check_file,
    copy_recipe,
    load_recipe,
    read_sections,
    recipe_folders,
    recipe_names,
)

__all__ = [
    "CONFIG_NAME",
    "RECIPE_NAME",
    "RECORD_FILE",
    "Inputs",
    "LoadedRecipe",
    "OpenRun",
    "PictureSize",
    "Recipe",
    "asked_for",
    "build_trainer",
    "check_file",
    "copy_recipe",
    "gather_inputs",
    "import_recipe",
    "load_any",
    "load_pictures",
    "load_recipe",
    "load_run",
    "load_splits",
    "load_target",
    "open_run",
    "option_names",
    "path_of",
    "pretrained_by",
    "read_sections",
    "recipe_folders",
    "recipe_names",
    "recipe_of_hash",
    "refuse_changed_recipe",
    "refuse_missing_columns",
    "refuse_without_checkpoint",
    "resumed",
    "run_config",
    "saved_checkpoints",
    "small_greys",
    "text_of",
    "with_held_out",
]
