"""From a recipe, a config file or a run's folder to a trainer, which keeps a record of its recipe.

A run's folder is enough to go on with it: `recipe.json` has the recipe's path as it was given, its hash and the
options. The recipe is looked for there, seen from where the user is and from the folders around the run, then by its
name; of several, the one with the right hash is taken. A run that was moved, or is named from elsewhere, is still
itself: its `output_dir` is where it is.

The folder may be somebody else's, so its word is not enough to run a recipe, to import what its config names or to read
what its options name: that must be the package's, the user's own (`trust`), or named on the command line.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hezar_train.config import TrainerConfig, read_mapping, write_mapping
from hezar_train.config.named_code import named_code, texts_in
from hezar_train.errors import CheckpointError, ConfigError, HezarTrainError, a_kind, choices, shown_path, suggestion
from hezar_train.events import FINISHED, end_of, read_starts
from hezar_train.recipes.importing import import_recipe
from hezar_train.recipes.recipe import (
    CONFIG_NAME,
    CONFIG_SUFFIXES,
    MOST_SHOWN,
    OPTION_PREFIX,
    RECIPE_NAME,
    LoadedRecipe,
    Recipe,
    changed_parts,
    checked,
    find_config,
    find_folder,
    hash_of,
    is_hash_of,
    list_recipe_folders,
    load_recipe,
    options_of,
    overridden,
    read_sections,
    recipe_folders,
    recipe_names,
)
from hezar_train.recipes.trust import (
    is_shipped,
    refuse_foreign_places,
    refuse_foreign_push,
    refuse_foreign_settings,
    refuse_untrusted_code,
    remember,
    trust_file,
    was_trained_with,
)
from hezar_train.run_folder import can_be_path
from hezar_train.run_layout import (
    CONFIG_FILE,
    DAMAGED_PREFIX,
    MANIFEST_FILE,
    RECIPE_FILE,
    RunLayout,
    is_run,
    refuse_dirs_outside,
    step_of,
)

if TYPE_CHECKING:
    from hezar_train.loop import Hook
    from hezar_train.trainer import Trainer

__all__ = [
    "RECORD_FILE",
    "build_recipe",
    "build_trainer",
    "load_any",
    "load_run",
    "load_target",
    "option_names",
    "read_record",
    "recipe_of_hash",
    "refuse_changed_recipe",
    "refuse_without_checkpoint",
    "resumed",
    "run_config",
    "saved_checkpoints",
]

RECORD_FILE = RECIPE_FILE


def run_config(run: str | Path) -> TrainerConfig:
    """Read the config of a run; its `output_dir` is the folder given."""
    return TrainerConfig.from_dict(_run_fields(Path(run)))


def load_run(
    run: str | Path, overrides: Iterable[str] = (), recipe: str | None = None, *, trust: bool = False
) -> LoadedRecipe:
    """Return what a run was started with, from its folder alone, with overrides; `recipe` says where its recipe is.

    What this user has neither named nor trained with before is refused, unless the folder is trusted.
    """
    folder, overrides = Path(run), list(overrides)
    fields, record = _run_fields(folder), read_record(folder)
    refuse_dirs_outside(folder, fields, overrides)
    home = _home_of(folder, record, trust=trust) if recipe is None else find_folder(recipe)
    fields, options = overridden(fields, record.get("options") or {}, overrides)
    if not trust:
        given, given_options = overridden({}, {}, overrides)
        if recipe is None and not given.get("accept_changes"):
            _refuse_unknown_hash(home, record)
        refuse_untrusted_code(folder, fields, home, named_code(given))
        way = "Read them; if you trust them, give the same command with --trust, once."
        refuse_foreign_places(f"{folder / RECORD_FILE}", options, home, texts_in(given_options), way)
        refuse_foreign_push(folder, fields, home, given)
        way = " Or give the same command with --trust, once."
        refuse_foreign_settings(f"the config of {folder}", fields, home, given, way)
    return checked(home, fields, options, str(record.get("config") or CONFIG_NAME))


def recipe_of_hash(
    sha256: str,
    fields: Mapping[str, Any],
    options: Mapping[str, Any],
    overrides: Iterable[str] = (),
    recipe: str | None = None,
) -> LoadedRecipe:
    """Return the recipe on this machine that has a hash, with the config and the options given.

    Both come from somebody else: what they name of files, addresses and services is refused, unless an override says
    the same.
    """
    overrides = list(overrides)
    folders = list_recipe_folders() if recipe is None else [find_folder(recipe)]
    found = [folder for folder in folders if is_hash_of(folder, sha256)]
    home = next((folder for folder in found if recipe is not None or _is_trusted(folder)), None)
    if home is None and found:
        raise _untrusted(f"the recipe {found[0]} has the right hash, but", found[0], f"--recipe {found[0]}")
    if home is None:
        raise ConfigError(
            f"no recipe on this machine has the SHA-256 {sha256}. Recipes: {choices(recipe_names()) or 'none'}. "
            "Install the version of this package that the card names, or put the recipe's folder below ./recipes/."
        )
    given, given_options = overridden({}, {}, overrides)
    fields, options = overridden(dict(fields), dict(options), overrides)
    refuse_foreign_places("the repository", options, home, texts_in(given_options))
    refuse_foreign_settings("the config of the repository", fields, home, given)
    return checked(home, fields, options)


def load_target(given: str, overrides: Iterable[str] = (), *, trust: bool = False) -> LoadedRecipe:
    """Load what can be trained: a recipe, or the config of a run that came from one."""
    path = Path(given)
    is_beside_recipe = path.name != CONFIG_FILE and (path.parent / RECIPE_NAME).is_file()
    if path.suffix.lower() in CONFIG_SUFFIXES and (path.parent / RECORD_FILE).is_file() and not is_beside_recipe:
        return _load_run_as_it_was(_run_of_config(path), overrides, trust=trust)
    if is_run(path) and not (path / RECIPE_NAME).is_file():
        raise ConfigError(
            f"{given} is a run, not a recipe. Name its config: {shown_path(path / CONFIG_FILE)}; or go on with "
            f"the run: hezar-train resume {given}"
        )
    return load_recipe(given, overrides)


def _load_run_as_it_was(run: Path, overrides: Iterable[str], *, trust: bool) -> LoadedRecipe:
    """Load the config of a run to begin another one; refuse a recipe that this user has not trained with as it is."""
    loaded = load_run(run, overrides, trust=trust)
    if not trust and not _is_trusted(loaded.folder):
        raise ConfigError(
            f"{loaded.folder} has changed since this run began "
            f"({', '.join(changed_parts(read_record(run), loaded.folder))}), and you have not trained with it as it is "
            "now. Read it; if it is yours, give the same command with --trust, once, or train the recipe itself: "
            f"hezar-train train {shlex.quote(str(loaded.folder))}"
        )
    return loaded


def load_any(given: str, overrides: Iterable[str] = ()) -> LoadedRecipe:
    """Return config and options of a config file, plain or with sections, of a recipe or of a run, to look at them."""
    path = Path(given)
    if path.suffix.lower() in CONFIG_SUFFIXES or path.is_file():
        return checked(path.parent, *overridden(*read_sections(path), overrides), path.name)
    if not is_run(path):
        return load_recipe(given, overrides)
    record = _checked_record(path / RECORD_FILE) if (path / RECORD_FILE).is_file() else {}
    return checked(path, *overridden(_run_fields(path), record.get("options") or {}, overrides), CONFIG_FILE)


def read_record(run: Path) -> dict[str, Any]:
    """Return what a run keeps of its recipe; one that has none was started by a script of the user's own."""
    path = run / RECORD_FILE
    if not path.is_file():
        refuse_checkpoint(run, takes_step=True)
    if not path.is_file():
        raise ConfigError(
            f"{run} was not started from a recipe: it has no {RECORD_FILE}. Its own script goes on with it, with "
            "resume_from_checkpoint=True."
        )
    return _checked_record(path)


def refuse_checkpoint(folder: Path, *, takes_step: bool) -> None:
    """Raise for a checkpoint where its run is expected; `takes_step` says whether a step may be named beside that."""
    if not (folder / MANIFEST_FILE).is_file():
        return
    named = folder.parent.parent
    advice = (
        f"Name that, and the step: {named} --checkpoint {step_of(folder.name)}" if takes_step else f"Name that: {named}"
    )
    raise ConfigError(f"{folder} is a checkpoint; expected the folder of its run, which is two folders above. {advice}")


def _checked_record(path: Path) -> dict[str, Any]:
    """Read a record; refuse one of another form than `LoadedRecipe.record` writes."""
    record = read_mapping(path)
    kinds: dict[str, type] = {"path": str, "config": str, "sha256": str, "parts": dict, "options": dict}
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind | None):
            raise ConfigError(f"{path}: {name} is {a_kind(record[name])}; expected a {kind.__name__}")
    if not can_be_path(record.get("path") or ""):
        raise ConfigError(f"{path}: path is {str(record['path'])[:MOST_SHOWN]!r}, which no folder can be called")
    return record


def refuse_changed_recipe(
    loaded: LoadedRecipe,
    so: str = "so the run would not go on exactly",
    way: str = "go on all the same: accept_changes=true",
) -> None:
    """Raise if the recipe is not the one that the run was started with, unless changes are accepted."""
    changed = changed_parts(read_record(Path(loaded.config.output_dir)), loaded.folder)
    if changed and not loaded.config.accept_changes:
        raise ConfigError(
            f"{loaded.folder} has changed since this run began ({', '.join(changed)}), {so}. Put it back, name a "
            f"folder that has the recipe as it was (--recipe FOLDER), or {way}."
        )


def refuse_without_checkpoint(loaded: LoadedRecipe) -> None:
    """Raise if a run has trained and there is nothing to go on from; one that never began starts from the beginning."""
    config, layout = loaded.config, RunLayout.of(loaded.config)
    saved = [path.name for path in layout.checkpoints.glob("*")]
    is_own = config.resume_from_checkpoint in (True, "last")
    if not is_own or any(name.isdigit() or name.startswith(DAMAGED_PREFIX) for name in saved):
        return  # what is damaged is told when it is loaded
    is_finished = any(end_of(start).get("how") == FINISHED for start in read_starts(layout.root))
    has_trained = layout.ledger.is_file() and layout.ledger.stat().st_size > 0
    if is_finished or has_trained:
        why = "it finished" if is_finished else "it ended before its first save"
        why += "" if config.save_enabled else ", with save_enabled=false"
        raise CheckpointError(
            f"{layout.root} has no checkpoint to go on from: {why}. To train it from the beginning: hezar-train train "
            f"{shlex.quote(str(layout.config))}; what is there now is then kept in {layout.previous}."
        )


def option_names(given: str) -> list[str]:
    """Return the options of the recipe that a name, a folder, a config file or a run means."""
    path = Path(given)
    run = path.parent if path.name == CONFIG_FILE else path
    home = _home_of(run, read_record(run), trust=True) if is_run(run) else find_config(given).parent
    return options_of(home / RECIPE_NAME)


def _run_of_config(path: Path) -> Path:
    """Return the run that a file is the config of; among the files of a run there are others."""
    if path.name != CONFIG_FILE or not path.is_file():
        what = "not a config" if path.is_file() else "not there"
        raise ConfigError(f"{path} is {what}. The config of this run is {path.with_name(CONFIG_FILE)}.")
    return path.parent


def _run_fields(run: Path) -> dict[str, Any]:
    if not is_run(run):
        raise _no_run(run)
    # Whether changes were accepted is a decision of that start, not of the next one.
    return {**read_mapping(run / CONFIG_FILE), "output_dir": str(run), "accept_changes": False}


def _no_run(given: Path) -> ConfigError:
    """Say what may have been meant: a run beside it or in ./runs, or a recipe that was not trained yet."""
    others = [str(path) for folder in (given.parent, Path("runs")) for path in folder.glob("*") if is_run(path)]
    meant = [path for path in others if Path(path).name == given.name]
    hint = f" Did you mean {meant[0]!r}?" if meant else suggestion(str(given), others)
    if not hint and given.name in recipe_names():
        hint = f" Nothing was trained there yet: hezar-train train {given.name}."
    return ConfigError(
        f"{given} is not the folder of a run: it has no {CONFIG_FILE}.{hint} `hezar-train runs` lists those in ./runs."
    )


def _home_of(run: Path, record: dict[str, Any], *, trust: bool) -> Path:
    """Return the folder of a run's recipe: with the right hash if there is one, else the first that is there.

    Without trust in the run, it must be a recipe of the package or one that this user has trained with.
    """
    found = [folder for folder in _possible_homes(run, str(record.get("path", ""))) if (folder / RECIPE_NAME).is_file()]
    right = [folder for folder in found if is_hash_of(folder, record.get("sha256"))]
    # One that has changed since is found, too, if this user has trained with it as the run knew it: that it has changed
    # is told next. Of a folder that merely lies where a known one did, neither the run nor the user knows the code.
    candidates = right + found if trust else [
        *(folder for folder in right if _is_trusted(folder)),
        *(one for one in found if is_shipped(one) or was_trained_with(one, str(record.get("sha256")))),
    ]  # fmt: skip
    if candidates:
        return candidates[0]
    if found:
        raise _untrusted(f"{run} came from the recipe {found[0]}, and", (right + found)[0], "--trust")
    raise ConfigError(
        f"the recipe of {run} was {record.get('path')}, and is not there any more. Say where it is: --recipe FOLDER"
    )


def _refuse_unknown_hash(home: Path, record: Mapping[str, Any]) -> None:
    """Raise if a recipe at a place that this user has trained with is not what the user has trained with."""
    if not _is_trusted(home):
        raise ConfigError(
            f"{home} has changed since this run began ({', '.join(changed_parts(record, home))}), so the run would not "
            "go on exactly, and as it is now you have not trained with it on this machine. Put it back, name a folder "
            "that has the recipe as it was (--recipe FOLDER), or read it and take it all the same: --trust; to go on "
            "with the run, accept_changes=true."
        )


def _is_trusted(folder: Path) -> bool:
    return is_shipped(folder) or was_trained_with(folder, hash_of(folder))


def _untrusted(words: str, folder: Path, option: str) -> ConfigError:
    return ConfigError(
        f"{words} you have not trained with that recipe on this machine, as far as {trust_file()} knows. Its code "
        f"would be run: read {folder / RECIPE_NAME}. If you trust it, give the same command with {option}, once."
    )


def _possible_homes(run: Path, path: str) -> Iterator[Path]:
    yield Path(path)
    if not Path(path).is_absolute():
        yield from (ancestor / path for ancestor in run.resolve().parents)
    if (name := Path(path).name) in (known := recipe_folders()):
        yield known[name]


def build_trainer(loaded: LoadedRecipe) -> Trainer:
    """Seed, build the model and the data, and return the trainer, which is at its checkpoint if it resumes."""
    if loaded.config.resume_from_checkpoint:
        _compare_with_record(loaded)
    built, _ = build_recipe(loaded)
    trainer = built.make_trainer(loaded.config)
    trainer.register_hooks([_record_keeper(loaded)])
    return trainer


def build_recipe(loaded: LoadedRecipe) -> tuple[Recipe, ModuleType]:
    """Seed everything and call the recipe's `build`; return what it built, and the recipe's module."""
    from hezar_train.data import seed_python_numpy_torch
    from hezar_train.runtime import keep_compiled_code_apart, use_threads

    keep_compiled_code_apart()  # build() may compile something
    use_threads(loaded.config.num_threads)  # what build() computes may depend on their number
    remember(loaded)
    seed_python_numpy_torch(loaded.config.seed)  # the model's first weights are then a function of the seed, too
    module = import_recipe(loaded.source)
    built = _built_by(module, loaded.options)
    if not isinstance(built, Recipe):
        raise ConfigError(
            f"{loaded.source}: build() returned {a_kind(built)}; expected a hezar_train.Recipe. End it with: return "
            "Recipe(model=..., train_dataset=...)"
        )
    return built, module


def _built_by(module: ModuleType, options: Mapping[str, Any]) -> Any:
    """Call a recipe's `build`; note the options that it was called with on an error."""
    try:
        return module.build(**options)
    except HezarTrainError:
        raise
    except Exception as error:
        if options:
            given = ", ".join(f"{OPTION_PREFIX}{name}={str(value)[:MOST_SHOWN]}" for name, value in options.items())
            error.add_note(f"This was raised while build() ran with {given}. Is that what it should be?")
        raise


def saved_checkpoints(config: TrainerConfig) -> str:
    """Return a short text that changes whenever the checkpoints in a run's folder do."""
    folder = RunLayout.of(config).checkpoints
    found = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("[0-9]*"))
    return hashlib.sha256(repr(found).encode()).hexdigest() if found else ""


def resumed(loaded: LoadedRecipe, saved_before: str) -> LoadedRecipe:
    """Let a recipe go on from the newest checkpoint, if one was saved since `saved_before`; else start as it says.

    A run that died before it saved anything must begin as it was asked to: in its folder there may be the checkpoints
    of an earlier run, and `resume_from_checkpoint` may name one elsewhere.
    """
    saved = saved_checkpoints(loaded.config)
    if saved in {"", saved_before}:
        return loaded
    return replace(loaded, config=replace(loaded.config, resume_from_checkpoint=True))


def _compare_with_record(loaded: LoadedRecipe) -> None:
    """Refuse to go on with other options than the run was started with; tell of a changed recipe."""
    from hezar_train.checkpoint import CheckpointStore
    from hezar_train.runtime import logger

    layout = RunLayout.of(loaded.config)
    if not layout.recipe.exists() or not CheckpointStore(layout.checkpoints).steps():
        return  # killed before it had saved anything: the run starts from the beginning
    before, options = _checked_record(layout.recipe), json.loads(json.dumps(loaded.options))
    if changed := changed_parts(before, loaded.folder):
        words = "%s has changed since this run began (%s): the run may not go on exactly"
        logger.warning(words, loaded.folder, ", ".join(changed))
    changes = list(_option_changes(before.get("options") or {}, options))
    if changes and not loaded.config.accept_changes:
        listed = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"{layout.root} cannot be resumed exactly, because something changed:\n{listed}\n"
            "Put it back; or begin another run, in another output_dir; or go on all the same with accept_changes=True."
        )


def _option_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        old, new = (repr(values[name]) if name in values else "not given" for values in (before, now))
        if old != new:
            yield f"recipe.{name}: {old} when the run began, {new} now"


def _record_keeper(loaded: LoadedRecipe) -> Hook:
    """Return a hook that writes the record once the run's folder is locked and its own."""
    from hezar_train.loop import Hook

    class RecipeRecord(Hook):
        def before_train(self) -> None:
            if self.trainer.runtime.is_main:
                write_mapping(RunLayout.of(loaded.config).recipe, loaded.record())

    return RecipeRecord()
