"""Reading and writing small files: mappings as YAML or JSON, plain values, and the one atomic writer.

A file written here is either the old one or the whole new one, whatever happens meanwhile. YAML is read by the rules of
YAML 1.2 where its elder surprises: `1e-5` is a number, `no` is a word, a date is text. A key that appears twice is an
error.

Files may be anybody's, so reading has limits: on the size of a file, on how many values it makes once its aliases are
followed (ten lines of YAML can stand for a billion), on the digits of a number; and it waits for no FIFO.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from hezar_train.config.names import is_importable
from hezar_train.errors import ConfigError, a_kind, nearest, why_unreadable
from hezar_train.run_folder import RunFolderError, read_file

__all__ = [
    "CONFIG_SUFFIXES",
    "fsync_folder",
    "is_disk_full",
    "load_json",
    "no_such_file",
    "parse_yaml",
    "read_json",
    "read_mapping",
    "refuse_endless_yaml",
    "to_json",
    "to_plain",
    "to_yaml",
    "write_atomically",
    "write_mapping",
]

JSON_SUFFIXES = (".json",)
CONFIG_SUFFIXES = (".yaml", ".yml", *JSON_SUFFIXES)
FULL_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # the last is what a file-size limit says
NO_FOLDER_FSYNC_ERRNOS = frozenset({errno.EINVAL, errno.ENOTSUP})
PREFIX_OF_TAGS = "tag:yaml.org,2002:"
FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")
"""A number as YAML 1.2 writes it: `1e-5`, which YAML 1.1 takes for text."""
MOST_FILE_BYTES = 64 << 20
MOST_YAML_BYTES = 1 << 20
MOST_YAML_VALUES = 100_000
"""Of a YAML file, its aliases followed; a long text counts as several."""
LONG_TEXT = 100
MOST_JSON_VALUES = 4_000_000
MOST_DIGITS = 400
NUMBER_TAGS = (f"{PREFIX_OF_TAGS}int", f"{PREFIX_OF_TAGS}float")


def to_plain(value: Any) -> Any:
    """Return `value` in numbers, text, lists and mappings; functions and classes become dotted paths."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if is_importable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file so that it is never seen half written, making its folder if need be; return its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)
    return target


def fsync_folder(folder: Path) -> None:
    """Make the names inside a folder survive a power cut."""
    if os.name != "posix":  # other systems cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot fsync a folder: there the server keeps the order of renames by itself.
        if error.errno not in NO_FOLDER_FSYNC_ERRNOS:
            raise
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Tell whether an error, or what caused it, means that there is no room left."""
    return any(_says_disk_full(link) for link in _causes(error))


def _says_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL_DISK_ERRNOS
    # Libraries written in Rust (tokenizers, safetensors) report the system's words in an error class of their own.
    return any(f"(os error {number})" in str(error) for number in FULL_DISK_ERRNOS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def to_yaml(mapping: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in its own order."""
    return yaml.dump(to_plain(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quote text that would read back as something else.

    That is text with a line break of any kind (in other styles some breaks read back as spaces), and what only this
    package's reader takes for a number.
    """

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if text and (text.splitlines() != [text] or FLOAT.fullmatch(text)) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_json(mapping: Mapping[str, Any]) -> str:
    """Return a mapping as indented JSON, in its own order."""
    return json.dumps(to_plain(mapping), indent=2, ensure_ascii=False) + "\n"


def write_mapping(path: str | os.PathLike[str], mapping: Mapping[str, Any]) -> Path:
    """Write a mapping atomically, as YAML or JSON by the file's suffix."""
    write = to_json if _suffix(Path(path)) in JSON_SUFFIXES else to_yaml
    return write_atomically(path, write(mapping))


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file; what is wrong with the file is told with its line."""
    source = Path(path)
    parse = _parse_json if _suffix(source) in JSON_SUFFIXES else parse_yaml
    try:
        content = read_file(source, MOST_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError, RunFolderError) as error:
        raise ConfigError(f"{source}: cannot be read: {why_unreadable(error)}") from error
    value = parse(content, source)
    if not isinstance(value, dict):
        given = "nothing: the file is empty" if value is None else a_kind(value)
        raise ConfigError(f"{source}, line 1: expected a mapping of names to values (batch_size: 16), got {given}")
    return {str(key): item for key, item in value.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping; empty where there is none that can be read."""
    try:
        found = load_json(read_file(path, MOST_FILE_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def load_json(content: bytes | str) -> Any:
    """Read JSON of a size that is bearable; whatever is wrong with it is a ValueError."""
    text = content if isinstance(content, bytes) else content.encode()
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_JSON_VALUES:
        raise ValueError(f"it holds more than {MOST_JSON_VALUES:,} values")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in CONFIG_SUFFIXES:
        raise ConfigError(f"{path}: expected a name that ends in .yaml, .yml or .json")
    return suffix


def _json_remedy(content: str, error: json.JSONDecodeError) -> str:
    """Say what is no JSON at the place where reading it ended, though Python or YAML would take it."""
    if content[: error.pos].rstrip().endswith(","):
        return "Take out the comma before it, or the comment: JSON has neither a last comma nor comments."
    return "Write names and texts in double quotes, or save the file as .yaml."


def no_such_file(path: Path, otherwise: str) -> ConfigError:
    """Return the refusal of a config file that is not there; `otherwise` is said where none beside it is near."""
    beside = [one for one in path.parent.glob("*") if one.suffix.lower() in CONFIG_SUFFIXES]
    stem = nearest(path.stem, [one.stem for one in beside])  # the ends alone make no two names alike
    near = nearest(path.name, [one.name for one in beside if one.stem == stem])
    remedy = otherwise if near is None else f"Did you mean {str(path.with_name(near))!r}?"
    return ConfigError(f"{path}: there is no such file. {remedy}")


def _parse_json(content: str, source: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            counted = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counted.items() if count > 1)
            raise ConfigError(f"{source}: the key {twice!r} appears twice: keep one")
        return mapping

    try:
        return json.loads(content, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}, line {error.lineno}: {error.msg}. {_json_remedy(content, error)}") from error
    except RecursionError:
        raise ConfigError(f"{source}: it is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{source}: {error}") from error


ONE_A_LINE = (
    "Write one 'name: value' a line; all of one section begin in the same column, moved in by spaces and not by tabs"
)
UNREADABLE = (yaml.scanner.ScannerError, yaml.parser.ParserError)


def parse_yaml(content: str, source: Path, *, of_lines: bool = True) -> Any:
    """Read YAML text, of lines or a single value; `source` is named in errors."""
    if len(content) > MOST_YAML_BYTES:
        raise ConfigError(f"{source}: it has {len(content):,} characters; at most {MOST_YAML_BYTES:,} are read")
    try:
        return yaml.load(content, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        if of_lines and (told := _left_open(error)):
            raise ConfigError(f"{source}, {told}") from error
        mark = error.problem_mark
        if str(error.problem) == "could not find expected ':'":  # that is told of the line after it
            mark = error.context_mark or mark
        line = f", line {mark.line + 1}" if mark else ""
        is_unreadable = of_lines and isinstance(error, UNREADABLE)
        remedy = f". {ONE_A_LINE}" if is_unreadable else ""
        problem = str(error.problem or error.context).replace("'<stream end>'", "the end")
        if problem == "found unhashable key":
            remedy = ". A value that begins with '{{' is no text: quote it, or write the value itself"
        raise ConfigError(f"{source}{line}: {problem}{remedy}") from error
    except yaml.reader.ReaderError as error:
        which = f"the character #x{error.character:04x} at place {error.position + 1} of its text"
        raise ConfigError(
            f"{source}: {which} is none that can be printed{'. Take it out' if of_lines else ''}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{source}: it is nested too deeply") from None
    # The library's own constructors raise these for a tag that does not fit its text, such as !!int x.
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, OverflowError) as error:
        raise ConfigError(f"{source}: a value does not fit its tag: {error}") from error


def _left_open(error: yaml.MarkedYAMLError) -> str:
    """Say where a quote or a bracket is opened that is not closed; nothing for other errors."""
    start, end, problem = error.context_mark, error.problem_mark, str(error.problem)
    if start is None or end is None:
        return ""
    if problem == "found unexpected end of stream":
        return f"line {start.line + 1}: a quote is opened there and not closed. Close it."
    if (found := re.match(r"expected ',' or '([\]}])', but got (.+)", problem)) is None:
        return ""
    opened = f"line {start.line + 1}: a {'[' if found[1] == ']' else '{'!r} is opened there and not closed"
    if found[2] == "'<stream end>'":
        return f"{opened}. Close it."
    if start.line == end.line:
        return ""
    return f"{opened} where line {end.line + 1} begins. Close it, or put a comma between its values."


def refuse_endless_yaml(content: str) -> None:
    """Raise a ValueError if a text is no YAML, or YAML that stands for values without bound; it may be anybody's."""
    try:
        _Bounded(content).get_single_node()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Bounded(yaml.SafeLoader):
    """Build plain values only, and refuse values without bound."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        if self._num_nodes > MOST_YAML_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_YAML_VALUES:,} values")
        return super().compose_node(parent, index)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and self._size(node) > MOST_YAML_VALUES:
            problem = f"its aliases stand for more than {MOST_YAML_VALUES:,} values"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def _size(self, node: yaml.Node) -> int:
        """Return how many values a node stands for, each alias counted as what it names."""
        if isinstance(node, yaml.ScalarNode):
            if node.tag in NUMBER_TAGS and len(node.value) > MOST_DIGITS:
                raise yaml.composer.ComposerError(None, None, f"more than {MOST_DIGITS} digits", node.start_mark)
            return 1 + len(node.value) // LONG_TEXT
        if id(node) not in self._sizes:
            self._sizes[id(node)] = MOST_YAML_VALUES + 1  # of one that holds itself, until it is known
            parts = (
                node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
            )
            self._sizes[id(node)] = 1 + sum(map(self._size, parts))
        return self._sizes[id(node)]


class _Loader(_Bounded):
    """Refuse a key that appears twice, too."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} appears twice: keep one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return node


def _follow_yaml_1_2() -> None:
    replaced = {f"{PREFIX_OF_TAGS}bool", f"{PREFIX_OF_TAGS}timestamp"}
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if tag not in replaced]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _Loader.add_implicit_resolver(
        f"{PREFIX_OF_TAGS}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
    )
    _Loader.add_implicit_resolver(
        f"{PREFIX_OF_TAGS}float",
        FLOAT,
        list("-+.0123456789"),
    )


_follow_yaml_1_2()
