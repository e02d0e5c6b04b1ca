"""Write docs/reference/config.md from the fields of TrainerConfig and the sentences beneath them.

    python docs/make_config.py [--check]

With --check nothing is written; the exit code is 1 if the page is not current.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hezar_train.config import TrainerConfig
from hezar_train.config.trainer_config import GROUPS

PAGE = Path(__file__).parent / "reference" / "config.md"

INTRODUCTION = """\
# The config

`TrainerConfig` is one flat dataclass: what you asked for, and nothing else. It is never changed by a run and reads back
from the file it was written to. All mistakes are told in one error, when it is built; unknown names come with the
nearest known one. This page is made from the source by `docs/make_config.py`.

```python
from hezar_train import TrainerConfig

config = TrainerConfig("runs/first", task="text_classification", num_epochs=3, batch_size=16)
file = config.save("configs")
assert TrainerConfig.load(file) == config
assert TrainerConfig.load(file, batch_size=32).batch_size == 32
```

```python
from hezar_train.errors import ConfigError

try:
    TrainerConfig("runs/first", lr=1e-3, optimiser="adam", batch_size=0, num_epochs="3", device="gpu")
except ConfigError as error:
    assert len(error.problems) == 5
    print(error)
```

`hezar-train config validate FILE` does the same for a file, without importing torch.

Every `*_steps` field counts steps (calls of `training_step`), or is a share of the whole run if it is a float below 1.
It becomes a number of updates when the run is planned: what falls due inside an accumulation window happens at its end.
With `global_batch_tokens` or `max_tokens_per_batch` it counts updates: the steps of one depend on its samples.
"""


def make_page() -> str:
    """Return the page."""
    return "\n".join([INTRODUCTION, *(line for group in GROUPS for line in _section(group))])


def _section(group: type) -> Iterator[str]:
    title, _, rest = (inspect.getdoc(group) or "").partition(":")
    yield f"## {title.removesuffix('.')}"
    yield ""
    if rest := rest.strip():
        yield f"{rest[0].upper()}{rest[1:]}\n"
    yield "| field | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    for name, kind, meaning in _documented(group):
        default = "required" if defaults[name] is dataclasses.MISSING else f"`{defaults[name]!r}`"
        yield f"| `{name}` | `{_cell(kind)}` | {default} | {_cell(meaning)} |"
    yield ""


def _documented(group: type) -> Iterator[tuple[str, str, str]]:
    """Yield each field's name, type and the sentence beneath it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            yield node.target.id, ast.unparse(node.annotation), " ".join(ast.literal_eval(following.value).split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write or check the page."""
    assert set(TrainerConfig.fields()) == {field.name for group in GROUPS for field in dataclasses.fields(group)}
    page = make_page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page:
        sys.exit("docs/reference/config.md is not current: run make docs")


if __name__ == "__main__":
    main()
