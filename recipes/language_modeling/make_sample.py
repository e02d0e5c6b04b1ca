"""Make the bundled sample from the standard library of the Python that runs this: `python make_sample.py [FILE]`.

A document is a top-level module or package: the headers of its public classes and functions with their docstrings. A
paragraph that was there before, in whatever module, is left out, so that nothing is held out that was also trained on.
The help topics of `pydoc` are not taken: they quote each other at length.
"""

from __future__ import annotations

import ast
import json
import lzma
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from recipe import SAMPLE_FILE

LEFT_OUT = {"antigravity", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "this", "turtledemo"}
FEWEST_LETTERS, MOST_LETTERS = 500, 20_000  # of a module: no package shall speak for all


def sources(library: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield the public top-level names of a library, each with its files, without tests."""
    for path in sorted(library.iterdir()):
        if path.stem in LEFT_OUT or path.stem.startswith("_"):
            continue
        if path.suffix == ".py":
            yield path.stem, [path]
        elif (path / "__init__.py").is_file():
            inside = sorted(path.rglob("*.py"))
            yield path.name, [one for one in inside if not {"test", "tests"} & set(one.relative_to(library).parts)]


def documented(tree: ast.Module) -> Iterator[str]:
    """Yield the docstring of a module, then the header and the docstring of each public thing in it that has one."""
    if text := ast.get_docstring(tree):
        yield quoted(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if text := ast.get_docstring(node):
            node.body, node.decorator_list = [ast.Pass()], []
            header = ast.unparse(node).removesuffix("pass").rstrip()
            yield f"{header}\n{textwrap.indent(quoted(text), '    ')}"


def quoted(text: str) -> str:
    """Return a docstring as one writes it."""
    return f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'


def new_paragraphs(text: str, seen: set[str]) -> str:
    """Return a text without the paragraphs whose words were there before."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(re.findall(r"\w+", paragraph))
        if words not in seen:
            kept.append("\n".join(line.rstrip() for line in paragraph.split("\n")))
        seen.add(words)
    return "\n\n".join(kept)


def documents(library: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each module, cut at a paragraph where it is long."""
    seen: set[str] = set()
    for name, files in sources(library):
        parts = [part for file in files for part in documented(ast.parse(file.read_bytes()))]
        text = "\n\n".join(filter(None, (new_paragraphs(part, seen) for part in parts)))
        if len(text) > MOST_LETTERS:
            text = text[:MOST_LETTERS].rpartition("\n\n")[0]
        if len(text) >= FEWEST_LETTERS and text.isascii():
            yield name, text


def main() -> None:
    """Read the library, write the documents, a line of JSON each."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else SAMPLE_FILE
    found = list(documents(Path(sysconfig.get_path("stdlib"))))
    lines = "".join(json.dumps({"name": name, "text": text}) + "\n" for name, text in found)
    target.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    num_letters = sum(len(text) for _, text in found)
    sys.stdout.write(f"{len(found)} modules, {num_letters:,} letters, {target.stat().st_size:,} bytes: {target}\n")


if __name__ == "__main__":
    main()
