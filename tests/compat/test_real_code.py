"""The draw of real files is decided by files and seed alone, and changed lines are counted as a reader would."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

USES = {
    "federatedscope": "from federatedscope.core.trainers import GeneralTorchTrainer\n",
    "libai": "from libai.engine import DefaultTrainer\n",
    "lernomatic": "    from lernomatic.train import trainer\n",
    "hezar": "from hezar.models import Model\nfrom hezar import (\n    Dataset,\n    Trainer,\n)\n",
}


@pytest.fixture(scope="module")
def real_code() -> ModuleType:
    """The script, which lies beside the package."""
    path = Path(__file__).parents[2] / "benchmarks" / "real_code.py"
    spec = importlib.util.spec_from_file_location("real_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["real_code"] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def clone(root: Path, files: dict[str, str]) -> Path:
    """A repository's files."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def printed(real_code: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    real_code.main([str(one) for one in arguments])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("system", USES)
def test_a_draw_is_the_same_for_the_same_seed_and_another_for_another(
    system: str, real_code: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = clone(tmp_path / "a", {f"contrib/own_{number}.py": USES[system] for number in range(30)})
    lines = printed(real_code, capsys, "draw", system, root, "--seed", 14, "--count", 10)
    assert len(lines) == 11
    assert len(set(lines)) == 11
    assert lines == printed(real_code, capsys, "draw", system, root, "--seed", 14, "--count", 10)
    assert lines[1:] != printed(real_code, capsys, "draw", system, root, "--seed", 15, "--count", 10)[1:]


def test_a_draw_leaves_out_the_trainer_itself_what_imports_it_not_and_what_only_speaks_of_it(
    real_code: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uses = USES["federatedscope"]
    root = clone(
        tmp_path / "a",
        {
            "federatedscope/core/trainers/torch_trainer.py": uses,
            "federatedscope/core/trainers/trainer_own.py": uses,
            "federatedscope/nlp/loss.py": "import torch\n",
            "federatedscope/nlp/old.py": f"# {uses}",
            "build/lib/copy.py": uses,
            ".ipynb_checkpoints/own.py": uses,
            "contrib/own.py": "from federatedscope.register import (\n    register_data,\n    register_trainer)\n",
        },
    )
    head, *lines = printed(real_code, capsys, "draw", "federatedscope", root)
    assert head.startswith("2 different files import")
    assert sorted(lines) == ["a  contrib/own.py", "a  federatedscope/core/trainers/trainer_own.py"]


def test_what_forks_share_is_drawn_once_as_the_first_clones(
    real_code: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uses = USES["federatedscope"]
    each = {"a": uses, "b": uses, "c": f"{uses}x = 1\n"}
    roots = [clone(tmp_path / name, {"contrib/own.py": text}) for name, text in each.items()]
    head, *lines = printed(real_code, capsys, "draw", "federatedscope", *roots)
    assert head.startswith("2 different files import")
    assert lines == ["a  contrib/own.py"]


def test_own_files_and_strangers_take_turns_and_no_stranger_fills_the_sample(
    real_code: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uses = USES["federatedscope"]
    own = clone(tmp_path / "own", {f"own_{number}.py": uses for number in range(9)})
    many = clone(tmp_path / "many", {f"copy_{number}.py": uses for number in range(100)})
    few = clone(tmp_path / "few", {f"few_{number}.py": uses for number in range(9)})
    _, *lines = printed(real_code, capsys, "draw", "federatedscope", own, many, few, "--count", 12)
    of = [line.split()[0] for line in lines]
    assert of[::2] == ["own"] * 6
    assert set(of[1::2]) == {"few", "many"}


def test_a_clone_that_is_not_there_is_told(real_code: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no such folder: .*nowhere"):
        real_code.main(["draw", "hezar", str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("import torch\n\nfrom libai.engine import DefaultTrainer\nx = torch.ones(3)\n", (0, 0)),
        ("import torch as flow\nfrom libai.engine import DefaultTrainer\nx = flow.ones(3)\n", (0, 0)),
        ("import oneflow as flow\nfrom ours import DefaultTrainer\nx = flow.ones(3)\n", (1, 0)),
        ("import torch\nfrom libai.engine import DefaultTrainer\nx = torch.ones(4)\ny = x\n", (0, 2)),
        ("import torch\nx = torch.ones(3)\n", (1, 0)),
    ],
)
def test_changed_lines_are_counted_without_those_that_turn_oneflow_into_torch(
    changed: str, expected: tuple[int, int], real_code: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = "import oneflow as flow\nfrom libai.engine import DefaultTrainer\nx = flow.ones(3)\n"
    (tmp_path / "original.py").write_text(original, encoding="utf-8")
    (tmp_path / "changed.py").write_text(changed, encoding="utf-8")
    (line,) = printed(real_code, capsys, "changes", tmp_path / "original.py", tmp_path / "changed.py")
    imports, others = expected
    assert line == f"{imports + others} changed lines: {imports} imports, {others} others"
