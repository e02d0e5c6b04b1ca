"""A recipe: what its `build` returns, its config and options, where it is found, and the hash that a run knows it by.

Everything that is wrong with a config and the options is told in one error. Nothing of a recipe is run or imported
here: the options of `build` are read from its source, with their types where a config file can hold them (int, float,
bool, str, None, lists of these, and one or the other of them). What else an annotation says is the recipe's own affair.

The hash is taken over everything in the recipe's folder that `build` may import (`importing` refuses the rest) and
what it usually reads. Left out is what should not change what is built: hidden files, caches and runs, wherever they
lie, and beside `recipe.py` the README, pictures, `runs/` and the YAML configs, of which the run keeps what they said. A
link to a file counts as the file; one to a folder as where it leads, for what lies there may be endless. Of a very
large file the size counts. Runs were once recorded with the hash of `recipe.py` alone; that is still understood.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hezar_train.config import TrainerConfig, read_mapping
from hezar_train.config.checks import wrong_type
from hezar_train.config.credentials import secret_problems
from hezar_train.config.files import CONFIG_SUFFIXES, no_such_file, parse_yaml
from hezar_train.config.names import tells_unknown_arguments
from hezar_train.errors import ConfigError, a_kind, choices, suggestion, why_unreadable
from hezar_train.run_folder import RunFolderError, read_file
from hezar_train.run_layout import CONFIG_FILE, LOCK_FILE

if TYPE_CHECKING:
    from torch import nn

    from hezar_train.metrics import MetricsHandler
    from hezar_train.trainer import Trainer

__all__ = [
    "CONFIG_NAME",
    "CONFIG_SUFFIXES",
    "OWN_RECIPES",
    "RECIPE_NAME",
    "SECTIONS",
    "LoadedRecipe",
    "Recipe",
    "changed_parts",
    "check_file",
    "checked",
    "copy_recipe",
    "default_options",
    "find_config",
    "find_folder",
    "hash_of",
    "hash_of_parts",
    "is_hash_of",
    "is_hashed",
    "list_recipe_folders",
    "load_recipe",
    "option_problems",
    "options_of",
    "overridden",
    "parts_of",
    "read_sections",
    "recipe_folders",
    "recipe_names",
    "shipped_root",
]

logger = logging.getLogger(__name__)

RECIPE_NAME = "recipe.py"
CONFIG_NAME = "config.yaml"
OWN_RECIPES = Path("recipes")

SECTIONS = ("recipe", "trainer")
OPTION_PREFIX = "recipe."
MOST_SHOWN = 80
A_TRAINER_CLASS = "a subclass of hezar_train.Trainer, or a function that makes one. Leave it out for the plain Trainer."

PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list,)
}  # fmt: skip

SOURCE_SUFFIX = ".py"
CACHE_FOLDER = "__pycache__"
UNREAD_SUFFIXES = (".png", ".yaml", ".yml")
UNREAD_NAMES = ("readme", "readme.md", "readme.rst", "readme.txt", "runs")
LARGE_BYTES = 100_000_000
MOST_SOURCE_BYTES = 4 << 20
MARKS_OF_A_RUN = (CONFIG_FILE, LOCK_FILE)  # the second is there before anything else is


@tells_unknown_arguments
@dataclass
class Recipe:
    """What a recipe's `build` returns: all that a trainer needs besides its config."""

    model: nn.Module | Mapping[str, nn.Module]
    """One model; or several by name, for a trainer of several."""
    train_dataset: Any
    eval_dataset: Any = None
    data_collator: Any = None
    preprocessor: Any = None
    metrics_handler: MetricsHandler | None = None
    trainer_class: Callable[..., Trainer] | None = None
    """A trainer of the recipe's own, such as a MultiModelTrainer; it is called as a Trainer is."""

    def make_trainer(self, config: TrainerConfig) -> Trainer:
        """Pass everything to the recipe's own trainer, or to the plain one."""
        from hezar_train.trainer import Trainer

        if self.trainer_class is None and isinstance(self.model, Mapping):
            if len(self.model) == 1:
                raise ConfigError(
                    f"the model of the Recipe is a mapping of one, {next(iter(self.model))!r}; expected a "
                    "torch.nn.Module. Pass the model alone, without the mapping."
                )
            raise ConfigError(
                f"there are several models ({choices(map(str, self.model))}), and the plain trainer trains one. Say "
                "what trains them: Recipe(..., trainer_class=...), a subclass of MultiModelTrainer."
            )
        if self.trainer_class is None and self.model is None:
            raise ConfigError(
                "the model of the Recipe is None; expected a torch.nn.Module. Is a return missing in what makes it?"
            )
        make: Callable[..., Trainer] = self.trainer_class or Trainer
        _refuse_other_class(make, Trainer)
        trainer = make(
            config, self.model, self.train_dataset, self.eval_dataset, data_collator=self.data_collator,
            preprocessor=self.preprocessor, metrics_handler=self.metrics_handler,
        )  # fmt: skip
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"trainer_class made {a_kind(trainer)}; expected {A_TRAINER_CLASS}")
        return trainer


def _refuse_other_class(make: Any, expected: type) -> None:
    if not callable(make) or (isinstance(make, type) and not issubclass(make, expected)):
        raise ConfigError(f"trainer_class is {a_kind(make)}; expected {A_TRAINER_CLASS}")


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe whose config and options have been checked, not yet built."""

    folder: Path
    config: TrainerConfig
    options: dict[str, Any]
    config_name: str = CONFIG_NAME
    """The file in the folder that it was started with."""

    @property
    def source(self) -> Path:
        """Where `build` is defined."""
        return self.folder / RECIPE_NAME

    def record(self) -> dict[str, Any]:
        """Return what a run keeps of its recipe."""
        parts = parts_of(self.folder)
        return {
            "path": str(self.folder),
            "config": self.config_name,
            "sha256": hash_of_parts(parts),
            "parts": parts,
            "options": self.options,
        }


def load_recipe(path_or_name: str | Path, overrides: Iterable[str] = ()) -> LoadedRecipe:
    """Find a recipe by name, folder or config file, and check its config with the overrides; nothing is built."""
    config_file = find_config(str(path_or_name))
    return checked(config_file.parent, *overridden(*read_sections(config_file), overrides), config_file.name)


def check_file(path: str | Path, overrides: Iterable[str] = ()) -> TrainerConfig:
    """Read a config file, plain or with a recipe's sections, and return its config; raise with every problem."""
    source = Path(path)
    fields, options = overridden(*read_sections(source), overrides)
    return checked(source.parent, fields, options, source.name).config


def read_sections(config_file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trainer's fields and the recipe's options of a config file; a plain one has no options."""
    if not config_file.exists():
        raise no_such_file(config_file, "Name a config file that is there.")
    content = read_mapping(config_file)
    if not set(SECTIONS) & content.keys() and not (config_file.parent / RECIPE_NAME).is_file():
        return content, {}
    problems = [
        f"{name!r} is not a section: expected {' and '.join(SECTIONS)}.{_to_section(name)}"
        for name in content
        if name not in SECTIONS
    ]
    for name in SECTIONS:
        if not isinstance(content.get(name) or {}, dict):
            problems.append(
                f"the section {name!r} is {a_kind(content[name])}; expected names and values. Write one 'name: value' "
                "a line below it, with a space after the colon"
            )
    if problems:
        raise ConfigError([f"{config_file}: {problem}" for problem in problems])
    return dict(content.get("trainer") or {}), dict(content.get("recipe") or {})


def _to_section(name: str) -> str:
    """Say where a name belongs that stands beside the sections of a recipe's config."""
    if name in TrainerConfig.fields():
        return " It is a field of the trainer: write 'trainer:' above it, and indent it."
    return suggestion(name, SECTIONS)


def overridden(
    fields: dict[str, Any], options: dict[str, Any], overrides: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields and options with each `key=value` in its place; `recipe.key` is an option's.

    Of two with one name the last counts, as on any command line, and that is said.
    """
    fields, options = dict(fields), dict(options)
    last: dict[str, Any] = {}
    for key, value in map(_override, overrides):
        if last.setdefault(key, value) != value:
            logger.warning("%s is given more than once: the last one counts.", key)  # not the values: one may be secret
        last[key] = value
    for key, value in last.items():
        if key.startswith(OPTION_PREFIX):
            options[key.removeprefix(OPTION_PREFIX)] = value
        else:
            fields[key] = value
    return fields, options


def checked(
    folder: Path, fields: Mapping[str, Any], options: dict[str, Any], config_name: str = CONFIG_NAME
) -> LoadedRecipe:
    """Build the config; report its problems and those of the options in one error."""
    problems = [*option_problems(folder / RECIPE_NAME, options), *secret_problems(options, OPTION_PREFIX)]
    try:
        config = TrainerConfig.from_dict(fields)
    except ConfigError as error:
        source = folder / RECIPE_NAME
        known = {f"{name!r} is not a field": name for name in (options_of(source) if source.exists() else ())}
        told = [
            f"{name!r} is not a field. It is an option of the recipe: {OPTION_PREFIX}{name}=VALUE"
            if (name := known.get(each.partition(".")[0])) else each
            for each in error.problems
        ]  # fmt: skip
        raise ConfigError([*problems, *told]) from None
    if problems:
        raise ConfigError(problems)
    return LoadedRecipe(folder, config, options, config_name)


def _override(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override: expected key=value without spaces, such as batch_size=16")
    try:
        return key, parse_yaml(value, Path(key), of_lines=False)
    except ConfigError as error:
        shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
        is_open = "got the end" in str(error) or "unexpected end" in str(error)
        remedy = _unclosed(value) if is_open else _quoted(key, value)
        if not value.isprintable():
            remedy = "Take out the characters that cannot be printed."
        raise ConfigError(f"the value of {shown!r} cannot be read as YAML ({error}). {remedy}") from error


def _quoted(key: str, value: str) -> str:
    """Say how a text is written that YAML would not take for one: a shell takes the outer quotes off."""
    shown = "..." if len(value) > MOST_SHOWN or set(value) & set("'\"\\") else value
    return f"If it is a text, quote it for YAML, and once more for the shell: '{key}=\"{shown}\"'."


def _unclosed(value: str) -> str:
    """Say what a value lacks whose end came too early."""
    for opening, closing in ("[]", "{}"):
        if value.count(opening) > value.count(closing):
            return f"Its {opening!r} is not closed: end it with {closing!r}."
    if value[:1] in {"'", '"'}:
        return f"Its {value[0]} is not closed: end it with {value[0]}."
    return "Close what it opens: a bracket or a quotation mark."


def recipe_names() -> list[str]:
    """List the recipes that can be started by name."""
    return sorted(recipe_folders())


def recipe_folders() -> dict[str, Path]:
    """Return the folder of each name, in the order of names."""
    found = {folder.name: folder for folder in reversed(list_recipe_folders())}
    return dict(sorted(found.items()))


def list_recipe_folders() -> list[Path]:
    """Return the folders of all recipes, the user's own first; one name may be there twice."""
    return [path.parent for root in _roots() for path in sorted(root.glob(f"*/{RECIPE_NAME}"))]


def find_config(given: str) -> Path:
    """Return the config file that a name, a folder or a path means."""
    path = Path(given)
    if path.suffix.lower() in CONFIG_SUFFIXES and path.is_file():
        return _beside_a_recipe(path)
    folder = find_folder(given)
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"the recipe {folder} has no {CONFIG_NAME}. Name another config file of it instead.")
    return folder / CONFIG_NAME


def find_folder(given: str) -> Path:
    """Return the folder of a recipe, by its path or its name."""
    for folder in [Path(given), *(root / given for root in _roots())] if given else []:
        if (folder / RECIPE_NAME).is_file():
            return folder
    if Path(given).suffix.lower() in CONFIG_SUFFIXES and not Path(given).exists():
        raise no_such_file(
            Path(given), "Name a config file in a recipe's folder, or a recipe: `hezar-train recipes list`."
        )
    if Path(given).name == RECIPE_NAME and Path(given).is_file():
        raise ConfigError(f"{given} is the code of a recipe; expected its folder. Name that: {Path(given).parent}")
    names = recipe_names()
    raise ConfigError(
        f"there is no recipe {given!r}.{suggestion(given, names)} Recipes found: {choices(names) or 'none'}. "
        f"A recipe may also be a folder with {RECIPE_NAME} and {CONFIG_NAME}, or a config file in such a folder."
    )


def copy_recipe(name: str, target: Path | None = None) -> Path:
    """Copy a recipe to a folder, else to where names are looked up first; what is there already is not touched."""
    source = find_folder(name)
    target = OWN_RECIPES / source.name if target is None else target
    if target.exists():
        raise ConfigError(
            f"{target} is there already. Name another folder for the copy: hezar-train recipes copy {name} "
            f"{OWN_RECIPES / f'my_{source.name}'}"
        )
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    if target.name != source.name:
        for config in target.glob("*.yaml"):
            _rename(config, source.name, target)
    return target


def _rename(config: Path, before: str, target: Path) -> None:
    """Give a copied config its own folder for runs, and its own command: those of the original are another model's."""
    text = config.read_text(encoding="utf-8")
    text = re.sub(rf"(output_dir: *\S*?){re.escape(before)}\b", rf"\g<1>{target.name}", text)
    for command in (f"hezar-train train {before}", f"hezar-train train recipes/{before}"):
        text = re.sub(rf"{re.escape(command)}\b", f"hezar-train train {target.as_posix()}", text)
    config.write_text(text, encoding="utf-8")


def _roots() -> list[Path]:
    """Return the folders in which names are looked up: the user's own, and the package's."""
    return [root for root in (OWN_RECIPES, shipped_root()) if root.is_dir()]


def shipped_root() -> Path:
    """Return the folder of the recipes that came with the package: the wheel's, else the source tree's."""
    package = Path(__file__).parents[1]
    shipped = package / "_recipes"
    return shipped if shipped.is_dir() else package.parent / "recipes"


def _beside_a_recipe(config_file: Path) -> Path:
    if not (config_file.parent / RECIPE_NAME).is_file():
        raise ConfigError(
            f"{config_file} has no {RECIPE_NAME} beside it, which would say what to train. Put the file into a "
            "recipe's folder, or start from Python: Trainer(TrainerConfig.load(file), model, train_dataset).train()."
        )
    return config_file


def options_of(source: Path) -> list[str]:
    """Return the names of the options that a recipe's `build` takes."""
    return [each.arg for each in _arguments(_build(source))]


def default_options(folder: Path) -> dict[str, Any]:
    """Return the defaults of a recipe's options that are written as plain values."""
    defaults = _defaults(_build(folder / RECIPE_NAME))
    return {name: node.value for name, node in defaults.items() if isinstance(node, ast.Constant)}


def option_problems(source: Path, options: Mapping[str, Any]) -> Iterator[str]:
    """Tell of options that `build` does not take, of values that are of another type, and of what it needs."""
    if not source.is_file():
        return  # a config on its own way somewhere: its options are checked where the recipe is
    build = _build(source)
    known, defaults = {each.arg: each for each in _arguments(build)}, _defaults(build)
    for name, value in options.items():
        if name in known:
            yield from _type_problem(name, value, known[name].annotation, defaults.get(name))
        elif build.kwarg is None:
            yield (
                f"recipe.{name} is not an option of this recipe. Its build() takes: {choices(known) or 'none'}."
                f"{suggestion(name, known)}"
            )
    for name in known:
        if name not in options and name not in defaults:
            yield f"recipe.{name} is missing: the recipe's build() has no default for it. Give it: recipe.{name}=VALUE"


def _build(source: Path) -> ast.arguments:
    """Read the arguments of `build` from the source."""
    try:
        tree = ast.parse(read_file(source, MOST_SOURCE_BYTES).decode("utf-8-sig"))
    except SyntaxError as error:
        line = "" if error.text is None else f": {error.text.strip()}"
        raise ConfigError(
            f"{source}, line {error.lineno}: cannot be read as Python: {error.msg}{line}. Correct it there."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be read: {why_unreadable(error)}") from error
    except RunFolderError as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from error
    except (RecursionError, MemoryError):  # so Python says it
        raise ConfigError(
            f"{source} is nested too deeply to be read as Python; expected a module like others."
        ) from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "build":
            if node.args.posonlyargs:
                raise ConfigError(f"{source}: build() takes options by position only; expected names. Remove the '/'.")
            return node.args
    raise ConfigError(f"{source}: expected a function build(**options) that returns a hezar_train.Recipe")


def _arguments(build: ast.arguments) -> list[ast.arg]:
    return [*build.args, *build.kwonlyargs]


def _defaults(build: ast.arguments) -> dict[str, ast.expr]:
    with_default = build.args[len(build.args) - len(build.defaults) :]
    by_keyword = zip(build.kwonlyargs, build.kw_defaults, strict=True)
    return {
        **{each.arg: default for each, default in zip(with_default, build.defaults, strict=True)},
        **{each.arg: default for each, default in by_keyword if default is not None},
    }


def _type_problem(name: str, value: Any, annotation: ast.expr | None, default: ast.expr | None) -> Iterator[str]:
    is_default = value is None and isinstance(default, ast.Constant) and default.value is None
    if annotation is None or is_default or _fits(annotation, value):
        return
    expected = ast.unparse(annotation).strip("'\"")
    words = wrong_type(f"recipe.{name}", value, expected)
    if _fits(annotation, ""):  # a text that YAML reads as something else
        words += f". Text is quoted for YAML, too: recipe.{name}='\"{'' if value is None else value}\"'"
    yield words


def _fits(annotation: ast.expr, value: Any) -> bool:
    """Tell whether a value is of a type; of one that is not known here, every value is."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            return _fits_text(text, value)
        case ast.Name(id=name) if name in PLAIN_TYPES:
            return isinstance(value, PLAIN_TYPES[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _fits(left, value) or _fits(right, value)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return isinstance(value, list) and all(_fits(item, one) for one in value)
    return True


def _fits_text(annotation: str, value: Any) -> bool:
    """Judge by an annotation in quotes."""
    try:
        return _fits(ast.parse(annotation, mode="eval").body, value)
    except SyntaxError:
        return True


def hash_of(folder: Path) -> str:
    """Return the hash of a recipe."""
    return hash_of_parts(parts_of(folder))


def hash_of_parts(digests: Mapping[str, str]) -> str:
    """Return one hash of many, with their names."""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def is_hash_of(folder: Path, sha256: Any) -> bool:
    """Tell whether a recipe is the one that a hash was taken of, today or when only its source counted."""
    return any(sha256 == take(folder) for take in (_hash_of_source, hash_of))


def parts_of(folder: Path) -> dict[str, str]:
    """Return the hash of each file and folder beside `recipe.py`, and its own, by name."""
    if _is_run(folder):  # the recipe lies among the files of its own run
        return _digests(path for path in folder.glob(f"*{SOURCE_SUFFIX}") if path.is_file())
    try:
        return _digests(path for path in folder.iterdir() if not _is_unread(path.name))
    except RecursionError:
        raise ConfigError(f"{folder} has folders in folders without end; expected a recipe's own few") from None


def is_hashed(folder: Path, path: Path) -> bool:
    """Tell whether the hash of a recipe covers a file below its folder, or the link to the folder that it lies in.

    A path may go on inside a file, as that of a module in an archive does.
    """
    file = next((one for one in (path, *path.parents) if one.is_file()), path)
    names = file.relative_to(folder).parts
    if _is_run(folder):
        return len(names) == 1 and file.suffix == SOURCE_SUFFIX and _is_counted(names[0])
    is_left_out = _is_unread(names[0]) or not all(map(_is_counted, names))
    is_in_run = any(_is_run(one) for one in file.parents if one.is_relative_to(folder))
    return not is_left_out and not is_in_run and file.is_file() and file.stat().st_size <= LARGE_BYTES


def changed_parts(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Name what is not as it was when a run wrote its record of a recipe; nothing if the recipe is the same."""
    if is_hash_of(folder, record.get("sha256")):
        return []
    before, now = record.get("parts"), parts_of(folder)
    if not isinstance(before, dict):
        return [RECIPE_NAME]
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)) or [RECIPE_NAME]


def _hash_of_source(folder: Path) -> str:
    return _digest(folder / RECIPE_NAME)


def _digests(entries: Iterable[Path]) -> dict[str, str]:
    """Return the hash of each entry of a folder that counts, by name."""
    counted = (path for path in sorted(entries) if _is_counted(path.name))
    return {_text(path.name): digest for path in counted if (digest := _digest(path))}


def _digest(path: Path) -> str:
    """Return the hash of a file or a folder; empty where nothing can be read, which `build` cannot either."""
    try:
        if path.is_dir():
            return _digest_of_folder(path)
        if not path.is_file():
            return ""
        if (size := path.stat().st_size) > LARGE_BYTES:
            return f"{size} bytes"
        # What grows while it is read, or waits (a link to a file below /proc), is read as far as its size goes.
        return hashlib.sha256(read_file(path, LARGE_BYTES)).hexdigest()
    except (OSError, RunFolderError):
        return ""


def _digest_of_folder(path: Path) -> str:
    if path.is_symlink():
        return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    found = {} if _is_run(path) else _digests(path.iterdir())
    return hash_of_parts(found) if found else ""


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS_OF_A_RUN)


def _is_counted(name: str) -> bool:
    return not name.startswith(".") and name != CACHE_FOLDER


def _is_unread(name: str) -> bool:
    return name.lower() in UNREAD_NAMES or name.lower().endswith(UNREAD_SUFFIXES)


def _text(name: str) -> str:
    """Return a name that can be written to a file, also where the disk has one that is no UTF-8."""
    return name.encode(errors="replace").decode()
