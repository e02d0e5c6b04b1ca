"""A run's folder that somebody gave me: nothing of it runs, is imported or chooses what I read, unless I say so."""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from hezar_train.cli import root
from hezar_train.config import TrainerConfig
from hezar_train.config.named_code import CODE_FIELDS, OUTSIDE_FIELDS
from hezar_train.errors import ConfigError
from hezar_train.recipes import import_recipe, load_recipe, load_run, recipe_of_hash
from hezar_train.recipes.recipe import hash_of
from hezar_train.recipes.trust import is_shipped, remember, trust_file

RECIPE = """\
from pathlib import Path

import torch

from hezar_train import Recipe

Path("ran").touch()


def build(width: int = 2, data: str = "zeros") -> Recipe:
    xs = torch.arange(24.0).reshape(12, 2) / 24
    pairs = torch.utils.data.TensorDataset(xs, xs.sum(dim=1, keepdim=True))
    return Recipe(torch.nn.Linear(width, 1), pairs, pairs)


def read(given, preprocessor):
    return (torch.tensor([float(part) for part in given.split()]),)
"""
CONFIG = "trainer: {output_dir: runs/sums, task: regression, batch_size: 4, criterion: MSELoss, learning_rate: 0.1}\n"
Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run `hezar-train` in `tmp_path`, as a user who remembers nothing yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEZAR_TRAIN_CACHE", str(tmp_path / "cache"))
    return lambda *arguments, **given: CliRunner().invoke(root, arguments, catch_exceptions=False, **given)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its run, trained by somebody else."""
    folder = tmp_path_factory.mktemp("made")
    home = folder / "recipes" / "sums"
    home.mkdir(parents=True)
    (home / "recipe.py").write_text(RECIPE)
    (home / "config.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HEZAR_TRAIN_CACHE", str(folder / "cache"))
        assert CliRunner().invoke(root, ["train", "sums"], catch_exceptions=False).exit_code == 0
    (folder / "ran").unlink()
    shutil.rmtree(folder / "cache")
    return folder


@pytest.fixture
def gift(made: Path, tmp_path: Path) -> Path:
    """A run `runs/sums`, with its recipe beside, that came from elsewhere."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs" / "sums"


COMMANDS = {
    "evaluate": ["evaluate", "runs/sums"],
    "predict": ["predict", "runs/sums", "-"],
    "resume": ["resume", "runs/sums", "num_epochs=2", "accept_changes=true"],
    "train": ["train", "runs/sums/train_config.yaml", "output_dir=runs/again"],
    "find-lr": ["find-lr", "runs/sums/train_config.yaml", "--num-steps", "2"],
}


@pytest.mark.usefixtures("gift")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipe_that_came_with_a_run_is_not_run(invoke: Invoke, command: str) -> None:
    refused = invoke(*COMMANDS[command], input="1 2\n")
    assert refused.exit_code == 2
    assert "you have not trained with that recipe on this machine" in refused.stderr
    assert "--trust, once" in refused.stderr
    assert not Path("ran").exists()


@pytest.mark.usefixtures("gift")
def test_trust_is_asked_for_once_and_one_command_resumes_a_run_of_ones_own(invoke: Invoke) -> None:
    assert invoke("evaluate", "runs/sums", "--trust").exit_code == 0
    assert Path("ran").exists()
    assert invoke("evaluate", "runs/sums").exit_code == 0
    assert invoke("resume", "runs/sums").exit_code == 0
    assert trust_file().stat().st_uid == os.getuid()
    assert trust_file().parent.stat().st_mode & 0o077 == 0
    assert not list(Path("runs").rglob("trusted.json"))


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_recipe_planted_above_a_run_is_not_run(invoke: Invoke, gift: Path, is_recorded: bool) -> None:
    shutil.rmtree("recipes")
    Path("recipes/sums").mkdir(parents=True)
    Path("recipes/sums/recipe.py").write_text(RECIPE + "\nPath('planted').touch()\n")
    if is_recorded:
        record = json.loads((gift / "recipe.json").read_text())
        sha256 = hash_of(Path("recipes/sums"))
        (gift / "recipe.json").write_text(json.dumps({**record, "sha256": sha256}))
    refused = invoke("evaluate", str(gift))
    assert refused.exit_code == 2
    assert "you have not trained with that recipe on this machine" in refused.stderr
    assert not Path("planted").exists()


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.usefixtures("gift")
def test_a_recipe_of_ones_own_that_has_changed_is_refused_for_a_look_too(invoke: Invoke, command: str) -> None:
    remember(load_recipe("sums"))
    with Path("recipes/sums/recipe.py").open("a") as file:
        file.write("\nPath('changed').touch()\n")
    refused = invoke(*COMMANDS[command], input="1 2\n")
    assert refused.exit_code == 2
    assert "has changed since this run began (recipe.py)" in refused.stderr
    assert "--trust" in refused.stderr
    assert not Path("changed").exists()
    remember(load_recipe("sums"))  # another run was trained with it as it is now; these weights were not
    refused = invoke(*COMMANDS[command], input="1 2\n")
    assert refused.exit_code == 2
    assert "so it is not what these weights were trained with" in refused.stderr
    assert not Path("changed").exists()
    assert invoke(*COMMANDS[command], "--trust", input="1 2\n").exit_code == 0


def test_no_process_of_a_launcher_trusts_more_than_the_user_said(tmp_path: Path, gift: Path, invoke: Invoke) -> None:
    helped = f"import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\nimport helper\n{RECIPE}"
    mine, planted = tmp_path / "recipes/sums", tmp_path / "gift/sums"
    planted.mkdir(parents=True)
    for folder, help_of in ((mine, "mine"), (planted, "planted")):
        (folder / "config.yaml").write_text(CONFIG)
        (folder / "recipe.py").write_text(helped)
        (folder / "helper.py").write_text(f"from pathlib import Path\nPath({help_of!r}).touch()\n")
    remember(load_recipe("sums"))
    record = json.loads((gift / "recipe.json").read_text())
    source = hashlib.sha256(helped.encode()).hexdigest()  # what both have in common: runs were once recorded with it
    (gift / "recipe.json").write_text(json.dumps({**record, "path": "sums", "sha256": source, "parts": None}))
    run = shutil.move(gift, tmp_path / "gift/run")
    command = [sys.executable, "-m", "hezar_train", "resume", run, "num_epochs=2", "--num-processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert not Path("planted").exists(), done.stderr
    assert done.returncode == 0, done.stderr
    assert Path("mine").exists()
    assert invoke("evaluate", str(run)).exit_code == 0  # as in one process


OLD_HASH = "the recipe's hash when it was mine"
NEW_HASH = "its hash now"


@pytest.mark.parametrize("claimed", [OLD_HASH, NEW_HASH, "that of recipe.py alone", None])
@pytest.mark.parametrize("command", COMMANDS)
def test_another_recipe_where_a_trusted_one_was_is_not_run_whatever_the_run_says_of_it(
    invoke: Invoke, gift: Path, command: str, claimed: str | None
) -> None:
    remember(load_recipe("sums"))
    old, home = json.loads((gift / "recipe.json").read_text()), Path("recipes/sums")
    (home / "recipe.py").write_text(RECIPE + "\nPath('planted').touch()\n")
    hashes = {OLD_HASH: old["sha256"], NEW_HASH: load_recipe("sums").record()["sha256"], None: None}
    hashes["that of recipe.py alone"] = hashlib.sha256((home / "recipe.py").read_bytes()).hexdigest()
    (gift / "recipe.json").write_text(json.dumps({**old, "sha256": hashes[claimed], "parts": None}))
    refused = invoke(*(one for one in COMMANDS[command] if one != "accept_changes=true"), input="1 2\n")
    assert refused.exit_code == 2
    assert "has changed since this run began" in refused.stderr or "you have not trained with" in refused.stderr
    assert not Path("planted").exists()
    trusted = ["accept_changes=true"] if command == "resume" else []
    allowed = invoke(*COMMANDS[command], *trusted, "--trust", input="1 2\n")
    assert Path("planted").exists(), allowed.stderr


@pytest.mark.parametrize("recorded", ["as it is now", "as nothing is"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipe_that_took_the_place_of_one_that_i_trust_is_not_run(
    invoke: Invoke, gift: Path, command: str, recorded: str
) -> None:
    remember(load_recipe("sums"))
    with Path("recipes/sums/recipe.py").open("a") as file:
        file.write("\nPath('exchanged').touch()\n")
    sha256 = hash_of(Path("recipes/sums")) if recorded == "as it is now" else "0" * 64
    record = json.loads((gift / "recipe.json").read_text())
    (gift / "recipe.json").write_text(json.dumps({**record, "sha256": sha256}))
    refused = invoke(*(one for one in COMMANDS[command] if one != "accept_changes=true"), input="1 2\n")
    assert refused.exit_code == 2
    assert "you have not trained with" in refused.stderr
    assert "--trust" in refused.stderr
    assert not Path("exchanged").exists()


@pytest.mark.parametrize("name", ["logs_dir", "checkpoints_dir"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_config_of_a_run_leads_no_command_out_of_it(invoke: Invoke, gift: Path, command: str, name: str) -> None:
    remember(load_recipe("sums"))
    config = gift / "train_config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), name: str(gift.parents[1] / "elsewhere")}))
    refused = invoke(*COMMANDS[command], input="1 2\n")
    assert refused.exit_code == 2
    assert "leads out of" in refused.stderr
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"lr_scheduler": "pydoc.pipepager", "lr_scheduler_kwargs": {"cmd": "touch ran_by_config"}},
        {"optimizer": "os.path.join"},
        {"criterion": "os.getcwd"},
        {"regularizer": "os.getcwd"},
        {"momentum_scheduler": "os.getcwd"},
        {"finetune_optimizer": "os.getcwd"},
        {"finetune_lr_scheduler": "os.getcwd"},
        {"metrics": ["evaluate:gift/m.py"]},
        {"metrics": [{"name": "evaluate:gift/m.py"}]},
        {"generation_kwargs": {"custom_generate": "me/model"}},
    ],
)
def test_code_that_the_config_of_a_run_names_is_neither_imported_nor_run(
    invoke: Invoke, gift: Path, fields: dict[str, object]
) -> None:
    remember(load_recipe("sums"))
    config = gift / "train_config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **fields}))
    refused = invoke("evaluate", "runs/sums")
    assert refused.exit_code == 2
    assert "names code" in refused.stderr
    assert "--trust" in refused.stderr
    assert not Path("ran_by_config").exists()


@pytest.mark.usefixtures("gift")
def test_code_that_i_named_when_i_trained_is_mine_in_the_run(invoke: Invoke) -> None:
    own = "optimizer=torch.optim.adamw.AdamW"
    assert invoke("train", "sums", own, "output_dir=runs/mine").exit_code == 0
    assert invoke("evaluate", "runs/mine").exit_code == 0
    assert invoke("resume", "runs/mine").exit_code == 0


def test_a_run_does_not_choose_where_i_push(invoke: Invoke, gift: Path) -> None:
    config = yaml.safe_load((gift / "train_config.yaml").read_text())
    config |= {"push_to_hub": True, "hub_model_id": "evil/x", "hub_private": False}
    (gift / "train_config.yaml").write_text(yaml.safe_dump(config))
    home = gift.parents[1] / "recipes" / "sums"
    refused = invoke("resume", str(gift), "--recipe", str(home))
    assert refused.exit_code == 2
    assert "would push the run to 'evil/x'" in refused.output
    assert load_run(gift, ["push_to_hub=false"], str(home)).config.push_to_hub is False
    assert load_run(gift, ["hub_model_id=me/mine"], str(home)).config.hub_model_id == "me/mine"
    remember(load_run(gift, [], str(home), trust=True))
    assert load_run(gift, [], str(home)).config.hub_model_id == "evil/x"
    assert invoke("evaluate", str(gift), "--recipe", str(home)).exit_code == 0


OUTSIDE = {
    "init_weights_from": "/somewhere/else",
    "trackers": ["wandb"],
    "resume_from_checkpoint": "hub://evil/x",
}


def rewrite(gift: Path, **fields: object) -> None:
    """Let the config of a run say something else."""
    config = gift / "train_config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **fields}))


@pytest.mark.filterwarnings("ignore:.*no supported trackers")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("train", name) for name in OUTSIDE),
        *(("resume", name) for name in OUTSIDE if name != "resume_from_checkpoint"),  # that is what resume says itself
        *((command, "init_weights_from") for command in ("evaluate", "predict", "find-lr")),
        ("find-lr", "trackers"),
    ],
)
def test_a_run_does_not_choose_whose_weights_are_loaded_nor_who_is_told(
    invoke: Invoke, gift: Path, command: str, name: str
) -> None:
    remember(load_recipe("sums"))
    rewrite(gift, **{name: OUTSIDE[name]})
    refused = invoke(*COMMANDS[command], input="1 2\n")
    assert refused.exit_code == 2
    assert "leads to weights or services that you have not trained sums with" in refused.stderr
    assert "--trust, once" in refused.stderr
    assert not Path("ran").exists()
    remember(load_run(gift, trust=True))  # what I have trained with once is mine
    assert "leads to weights or services" not in invoke(*COMMANDS[command], input="1 2\n").stderr


def test_what_a_run_leads_to_is_mine_if_i_say_so_or_if_my_recipe_does(invoke: Invoke, gift: Path) -> None:
    remember(load_recipe("sums"))
    rewrite(gift, trackers=["tensorboard", "wandb"], init_weights_from="hub://me/x")
    said = ["trackers=[]", "init_weights_from=null"]
    assert load_run(gift, said).config.trackers == []
    with pytest.raises(ConfigError, match=r"leads to.* trackers=\[wandb\]\. If"):
        load_run(gift, ["init_weights_from=hub://me/x"])
    home = gift.parents[1] / "recipes" / "sums"
    (home / "config.yaml").write_text(CONFIG.replace("{", "{trackers: [wandb], init_weights_from: 'hub://me/x', "))
    assert load_run(gift).config.trackers == ["tensorboard", "wandb"]


WITH_RULES_OF_THEIR_OWN = {"output_dir", "checkpoints_dir", "logs_dir", "hub_model_id", "hub_revision"}
LEAD_NOWHERE = {
    "task", "device", "mixed_precision", "sharding", "gradient_compression", "length_column", "loss_weight",
    "metric_for_best_model",
    "early_stopping_mode", "early_stopping_metric", "stop_when", "save_freq", "batch_or_epoch", "local_param",
    "finetune_batch_or_epoch", "finetune_freeze_param", "finetune_param", "hub_strategy", "hub_card",
}  # fmt: skip


def test_every_field_that_holds_a_text_is_known_to_lead_somewhere_or_nowhere() -> None:
    texts = {name for name, one in TrainerConfig.fields().items() if re.search("str|Path|Any|dict|list", str(one.type))}
    code = {name for name in texts if name in CODE_FIELDS or name.endswith("_kwargs")}
    assert texts - code == {*OUTSIDE_FIELDS, *WITH_RULES_OF_THEIR_OWN, *LEAD_NOWHERE}


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_look_at_a_run_tells_no_service_and_needs_no_word_for_it(invoke: Invoke, gift: Path, command: str) -> None:
    remember(load_recipe("sums"))
    rewrite(gift, trackers=["wandb"], resume_from_checkpoint="hub://evil/x", push_to_hub=True, hub_model_id="evil/x")
    assert invoke(*COMMANDS[command], input="1 2\n").exit_code == 0


@pytest.mark.parametrize("fields", [{"init_weights_from": "evil/x"}, {"init_weights_from": "/etc/x"}])
def test_a_repository_does_not_choose_whose_weights_are_loaded(fields: dict[str, str]) -> None:
    shipped = load_recipe("text_classification")
    sha256, theirs = shipped.record()["sha256"], {"output_dir": "runs/again", **fields}
    with pytest.raises(ConfigError, match=r"the config of the repository leads to .*say so yourself: init_weights"):
        recipe_of_hash(sha256, theirs, {})
    said = [f"{name}={value}" for name, value in fields.items()]
    assert recipe_of_hash(sha256, theirs, {}, said).config.init_weights_from == fields["init_weights_from"]


@pytest.mark.parametrize("name", ["path", "config", "sha256", "parts", "options"])
@pytest.mark.parametrize("value", [5, 1e308, True, ["x"], "a" * 5000, "a/" * 3000, "\0"])
def test_a_record_of_nonsense_is_refused(invoke: Invoke, gift: Path, name: str, value: Any) -> None:
    record = json.loads((gift / "recipe.json").read_text())
    (gift / "recipe.json").write_text(json.dumps({**record, name: value}))
    for command in (*COMMANDS.values(), ["config", "show", "runs/sums"]):
        assert invoke(*command, input="1 2\n").exit_code in (0, 2)


def test_a_recipe_of_folders_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "/".join("a" * 400)).mkdir(parents=True)
    (tmp_path / "/".join("a" * 400) / "data").write_text("x")
    with pytest.raises(ConfigError, match="without end"):
        hash_of(tmp_path)


def test_an_option_of_a_run_that_names_a_file_must_have_been_mine(invoke: Invoke, gift: Path) -> None:
    remember(load_recipe("sums"))
    record = json.loads((gift / "recipe.json").read_text())
    (gift / "recipe.json").write_text(json.dumps({**record, "options": {"data": "/etc/passwd"}}))
    refused = invoke("evaluate", "runs/sums")
    assert refused.exit_code == 2
    assert "recipe.data='/etc/passwd'" in refused.stderr


@pytest.mark.parametrize(
    "place", ["/etc/passwd", "https://evil.example/x", "../secret.csv", "~/x", "owner/data", "here"]
)
def test_a_repository_does_not_choose_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").touch()
    shipped = load_recipe("text_classification")
    assert is_shipped(shipped.folder)
    record, fields = shipped.record(), {"output_dir": "runs/again"}
    with pytest.raises(ConfigError, match=r"files or addresses that you have not named: recipe\.data="):
        recipe_of_hash(record["sha256"], fields, {"data": place})
    said = recipe_of_hash(record["sha256"], fields, {"data": place}, [f"recipe.data={place}"])
    assert said.options["data"] == place
    assert recipe_of_hash(record["sha256"], fields, shipped.options).options == shipped.options


def test_a_recipe_of_the_right_hash_that_was_put_beside_me_is_not_run_for_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes/sums").mkdir(parents=True)
    Path("recipes/sums/recipe.py").write_text(RECIPE)
    Path("recipes/sums/config.yaml").write_text(CONFIG)
    sha256 = load_recipe("sums").record()["sha256"]
    with pytest.raises(ConfigError, match="give the same command with --recipe recipes/sums"):
        recipe_of_hash(sha256, {"output_dir": "run"}, {})
    assert recipe_of_hash(sha256, {"output_dir": "run"}, {}, recipe="sums").folder.name == "sums"


def test_the_bytecode_beside_a_recipe_is_not_run(tmp_path: Path) -> None:
    source = tmp_path / "recipe.py"
    source.write_text("found = 'compiled'\n")
    py_compile.compile(str(source))
    before = source.stat()
    source.write_text("found = 'original'\n")  # of the same size and time: Python would take the bytecode
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert import_recipe(source).found == "original"


HELPED = """\
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / {folder!r}))
try:
    import beside_the_recipe
finally:
    del sys.path[0]
    sys.modules.pop("beside_the_recipe", None)


def build(): ...
"""


def with_helper(place: Path, folder: str = "") -> Path:
    """Make a recipe that imports a module from a folder of its own; return the module's file."""
    (place / folder).mkdir(parents=True, exist_ok=True)
    (place / "recipe.py").write_text(HELPED.format(folder=folder))
    helper = place / folder / "beside_the_recipe.py"
    helper.write_text("found = 'original'\n")
    return helper


def test_the_bytecode_of_what_a_recipe_imports_is_not_run(tmp_path: Path) -> None:
    helper = with_helper(tmp_path / "recipe")
    helper.write_text("found = 'planted'\n")
    py_compile.compile(str(helper), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    helper.write_text("found = 'original'\n")
    assert import_recipe(tmp_path / "recipe" / "recipe.py").beside_the_recipe.found == "original"
    (tmp_path / "elsewhere.py").write_text("found = 'linked'\n")
    helper.unlink()
    helper.symlink_to(tmp_path / "elsewhere.py")
    assert import_recipe(tmp_path / "recipe" / "recipe.py").beside_the_recipe.found == "linked"


@pytest.mark.parametrize("folder", ["", "parts", "parts/more", "__pycache__2"])
def test_what_a_recipe_imports_from_its_folder_is_in_its_hash(tmp_path: Path, folder: str) -> None:
    helper = with_helper(tmp_path / "recipe", folder)
    for is_run in (False, True):
        if is_run:
            (tmp_path / "recipe" / "train_config.yaml").touch()
            if folder:
                break  # among the files of a run only those beside recipe.py count
        before = hash_of(tmp_path / "recipe")
        assert import_recipe(tmp_path / "recipe" / "recipe.py").beside_the_recipe.found == "original"
        helper.write_text("found = 'exchanged'\n")
        assert hash_of(tmp_path / "recipe") != before
        helper.write_text("found = 'original'\n")


@pytest.mark.parametrize("folder", [".hidden", "__pycache__", "runs/first", "parts/.hidden/more", "out", "link"])
def test_what_the_hash_of_a_recipe_leaves_out_is_not_imported(tmp_path: Path, folder: str) -> None:
    helper = with_helper(tmp_path / "recipe", ".target" if folder == "link" else folder)
    if folder == "out":
        (helper.parent / "train_config.yaml").touch()
    if folder == "link":
        (tmp_path / "recipe" / "link").symlink_to(helper.parent)
        (tmp_path / "recipe" / "recipe.py").write_text(HELPED.format(folder=folder))
    before = hash_of(tmp_path / "recipe")
    helper.write_text("raise SystemExit('exchanged')\n")
    assert hash_of(tmp_path / "recipe") == before
    with pytest.raises(ConfigError, match=r"imports beside_the_recipe from .* which its hash does not cover"):
        import_recipe(tmp_path / "recipe" / "recipe.py")


def test_what_a_recipe_imports_from_elsewhere_is_found_as_ever(tmp_path: Path) -> None:
    (tmp_path / ".elsewhere").mkdir()
    (tmp_path / ".elsewhere" / "beside_the_recipe.py").write_text("found = 'elsewhere'\n")
    with_helper(tmp_path / "recipe").unlink()
    (tmp_path / "recipe" / "recipe.py").write_text(HELPED.format(folder="../.elsewhere"))
    assert import_recipe(tmp_path / "recipe" / "recipe.py").beside_the_recipe.found == "elsewhere"
    (tmp_path / "recipe" / "common").symlink_to(tmp_path / ".elsewhere")  # the link is in the hash
    (tmp_path / "recipe" / "recipe.py").write_text(HELPED.format(folder="common"))
    assert import_recipe(tmp_path / "recipe" / "recipe.py").beside_the_recipe.found == "elsewhere"


@pytest.mark.usefixtures("gift")
def test_a_list_of_trusted_recipes_that_another_user_wrote_is_not_believed(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(load_recipe("sums"))
    if os.getuid() == 0:
        os.chown(trust_file(), 65534, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: -1)
    assert invoke("evaluate", "runs/sums").exit_code == 2


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o646])
@pytest.mark.usefixtures("gift")
def test_a_list_of_trusted_recipes_that_others_can_write_to_is_not_believed(
    invoke: Invoke, mode: int, is_closed: bool
) -> None:
    remember(load_recipe("sums"))
    assert trust_file().stat().st_mode & 0o777 == 0o600
    trust_file().chmod(mode)
    trust_file().parent.chmod(0o700 if is_closed else 0o755)
    is_believed = is_closed or not mode & 0o022
    assert invoke("evaluate", "runs/sums").exit_code == (0 if is_believed else 2)


@pytest.mark.usefixtures("gift")
def test_a_list_of_trusted_recipes_behind_a_link_is_not_believed(invoke: Invoke, tmp_path: Path) -> None:
    remember(load_recipe("sums"))
    trust_file().rename(tmp_path / "a_file_of_mine.json")
    trust_file().symlink_to(tmp_path / "a_file_of_mine.json")
    assert invoke("evaluate", "runs/sums").exit_code == 2


def test_validate_names_code_and_does_not_import_it(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("output_dir: run\noptimizer: nowhere.to.be.Found\n")
    done = invoke("config", "validate", "own.yaml")
    assert done.exit_code == 0
    assert "own.yaml names code that a run would import: nowhere.to.be.Found" in done.output


def test_a_run_is_loaded_in_python_by_the_same_rules(invoke: Invoke, gift: Path) -> None:
    with pytest.raises(ConfigError, match="you have not trained with that recipe"):
        load_run(gift)
    assert load_run(gift, trust=True).folder.name == "sums"
    assert load_run(gift, recipe="sums").folder.name == "sums"
