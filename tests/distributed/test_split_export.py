"""A large model of transformers: filled on meta from files of the Hub's form, trained in shares, and given back so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before the forks: it takes seconds
from cases import distance
from ranks import on_ranks, outcomes_on
from safetensors import safe_open
from spread import climb, tower
from torch import nn

from hezar_train import Trainer, TrainerConfig, without_weights
from hezar_train.checkpoint import CheckpointStore, export_model, initial_weights, read_tensors
from hezar_train.checkpoint.split_files import most_bytes, write_split_tensors
from hezar_train.errors import ConfigError
from hezar_train.runtime.sharding import is_sharded

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 64}  # fmt: skip


def llama(*, is_tied: bool = True) -> Any:
    """Return a new Llama: rotary frequencies are buffers that no file holds."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=is_tied))


def mixtral() -> Any:
    """Return a new Mixtral: its experts are one tensor in memory and many in files."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=3))


MODELS = {"tied Llama": llama, "untied Llama": lambda: llama(is_tied=False)}
TEXTS = [{"input_ids": ids, "labels": ids} for ids in torch.randint(37, (16, 9), generator=torch.Generator())]


def trainer_of(model: nn.Module, out: Path, **changes: Any) -> Trainer:
    settings = {"task": "language_modeling", "batch_size": 2, "global_batch_size": 8, "optimizer": "sgd",
                "learning_rate": 0.1, "trackers": [], "save_steps": 1, **changes}  # fmt: skip
    return Trainer(TrainerConfig(out, **settings), model, TEXTS)


def names_in(folder: Path) -> dict[str, list[int]]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("count", [2, 4])
def test_transformers_reads_the_export_with_the_same_logits(which: str, count: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS[which]().save_pretrained(tmp_path / "hub", max_shard_size="10KB")
    assert (tmp_path / "hub/model.safetensors.index.json").exists()

    def work(sharding: str) -> Any:
        made = MODELS[which]() if sharding == "none" else without_weights(MODELS[which])
        out = tmp_path / f"run-{sharding}"
        trainer = trainer_of(made, out, sharding=sharding, init_weights_from=tmp_path / "hub")
        assert is_sharded(trainer.model) == (sharding == "full")
        trainer.train()
        trainer.save(tmp_path / sharding, max_shard_size="10KB")
        return trainer.get_model_para()

    copies, spread = on_ranks(count, work, "none"), on_ranks(count, work, "full")
    assert distance(spread[0], copies[0]) <= 1e-5
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    state = again.state_dict()
    assert all(torch.equal(state[name], value) for name, value in spread[0].items())
    plain = MODELS[which]()
    plain.load_state_dict({name: value for name, value in spread[0].items() if name in plain.state_dict()})
    ids = torch.stack([row["input_ids"] for row in TEXTS])
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, plain.eval()(ids).logits)
    assert names_in(tmp_path / "full") == names_in(tmp_path / "hub")
    index = json.loads((tmp_path / "full/model.safetensors.index.json").read_text())
    theirs = json.loads((tmp_path / "hub/model.safetensors.index.json").read_text())
    assert index["metadata"] == theirs["metadata"]
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert all((tmp_path / "full" / file).exists() for file in index["weight_map"].values())


def test_names_and_forms_are_those_of_the_library_where_it_has_others_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mixtral()
    trainer_of(model, tmp_path / "run").save(tmp_path / "ours", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    assert any(".experts.2." in name for name in names_in(tmp_path / "ours"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = torch.stack([row["input_ids"] for row in TEXTS])
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


def test_a_checkpoint_of_shares_is_exported_file_by_file_by_one_process(tmp_path: Path) -> None:
    one, _ = on_ranks(2, lambda: climb(tmp_path / "run"))
    store = CheckpointStore(tmp_path / "run/checkpoints")
    found, _ = store.newest()
    assert found is not None
    export_model(found, tmp_path / "split", max_shard_size=200)
    files = sorted(path.name for path in (tmp_path / "split").iterdir())
    assert files[0].startswith("model-00001-of-")
    assert files[-1] == "model.safetensors.index.json"
    tensors = {name: value for path in (tmp_path / "split").glob("*.safetensors")
               for name, value in read_tensors(path).items()}  # fmt: skip
    index = json.loads((tmp_path / "split/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert int(tensors.pop("num_samples")) > 0
    assert distance({**tensors, "tied.weight": tensors["last.weight"]}, one["weights"]) == 0.0
    (trainer,) = on_ranks(1, lambda: tower(tmp_path / "again", init_weights_from=tmp_path / "split").get_model_para())
    assert distance(trainer, one["weights"]) == 0.0


def test_files_hold_at_most_the_size_and_one_that_fits_is_called_as_ever(tmp_path: Path) -> None:
    tensors = {name: torch.ones(size) for name, size in {"a": 10, "b": 10, "c": 100, "d": 5}.items()}
    write_split_tensors(tmp_path, tensors, 80)
    sizes = [sum(t.nbytes for t in read_tensors(path).values()) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert sizes == [80, 400, 20]
    write_split_tensors(tmp_path, tensors, 10_000)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]  # nothing of before is left
    write_split_tensors(tmp_path, tensors, 80)
    assert not (tmp_path / "model.safetensors").exists()
    model = nn.ParameterDict({name: torch.zeros(len(one)) for name, one in tensors.items()})
    assert initial_weights(model, tmp_path).missing == []


@pytest.mark.parametrize(("size", "count"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2 << 20), (7, 7)])
def test_sizes_are_those_of_the_hub(size: int | str, count: int) -> None:
    assert most_bytes(size) == count


@pytest.mark.parametrize("size", ["5", "large", "-1GB", 0, True, 1.5])
def test_what_is_no_size_is_refused_before_anything_is_written(size: Any, tmp_path: Path) -> None:
    for one in outcomes_on(1, lambda: tower(tmp_path / "run").save(tmp_path / "out", max_shard_size=size)):
        assert "is no size. Expected bytes (int), or a text such as '5GB' or '500MB'" in one.error
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError):
        most_bytes(size)


def test_a_merged_export_is_split_too(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path / "run")
        trainer.save(tmp_path / "merged", merge=True, max_shard_size=200)
        return trainer.get_model_para()

    (weights,) = on_ranks(1, work)
    assert (tmp_path / "merged/model.safetensors.index.json").exists()
    (read,) = on_ranks(1, lambda: tower(tmp_path / "b", init_weights_from=tmp_path / "merged").get_model_para())
    assert distance(read, weights) == 0.0
