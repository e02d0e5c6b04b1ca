"""What each example shows beside its measure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from hezar_train.compat.lernomatic import Trainer as LernomaticTrainer
from hezar_train.loop import Context

Import = Callable[[str], ModuleType]


def test_the_loss_of_the_vae_is_the_closed_form(example: Import) -> None:
    drawn, pixels = torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0, 0.0]])
    mean, log_variance = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    found = example("vae").vae_loss(drawn, pixels, mean, log_variance)
    cross_entropy = -(torch.tensor(0.5).log() + torch.tensor(0.75).log()) / 2
    normal = torch.distributions.Normal
    divergence = torch.distributions.kl_divergence(normal(mean, (log_variance / 2).exp()), normal(0.0, 1.0)).sum()
    assert torch.allclose(found, cross_entropy + divergence / 2, atol=1e-6)


def test_the_autoencoder_ignores_labels(example: Import, tmp_path: Path) -> None:
    module = example("autoencoder")
    pixels, labels = module.labelled()[0].tensors
    weights = []
    for number, told in enumerate((labels, labels.flip(0))):
        trainer = module.build(tmp_path / str(number), max_steps=20, train_dataset=TensorDataset(pixels, told))
        trainer.train()
        weights.append(trainer.model[0][0].weight.detach())
    assert torch.equal(*weights)


def test_both_modules_of_the_denoising_autoencoder_learn_and_are_saved(example: Import, tmp_path: Path) -> None:
    module = example("denoising_autoencoder")
    trainer = module.build(tmp_path / "run", max_steps=5)
    before = {name: value.clone() for name, value in trainer.encoder.state_dict().items()}
    trainer.train()
    resumed = module.build(tmp_path / "run", max_steps=5, resume_from_checkpoint=True)
    assert {name.split(".")[0] for name in resumed.model.state_dict()} == {"encoder", "decoder"}
    saved = resumed.encoder.state_dict()
    assert not any(torch.equal(before[name], saved[name]) for name in saved)


def test_the_discriminator_gets_no_gradient_from_the_generators_step(example: Import, tmp_path: Path) -> None:
    trainer = example("gan").build(tmp_path / "run", max_steps=2)
    judge, seen = list(trainer.discriminator.parameters()), []

    def note(*_: Any) -> None:
        seen.append([one.detach().clone() for one in judge])

    for optimizer in (trainer.optim_d, trainer.optim_g):
        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
    trainer.train()
    is_kept = [all(map(torch.equal, *seen[at : at + 2])) for at in range(0, len(seen), 2)]
    assert is_kept == [False, True] * 2
    assert all(map(torch.equal, *seen[3:5])) is True  # nor do its gradients reach the next step


def test_the_gan_tells_the_losses_of_both_for_every_step(example: Import, tmp_path: Path) -> None:
    trainer = example("gan").build(tmp_path / "run", max_steps=30)
    trainer.train()
    assert trainer.loss_iter == 30
    assert (trainer.g_loss_history[:30] != trainer.d_loss_history[:30]).all()
    assert {"train.g_loss", "train.d_loss"} <= set(trainer.load_csv_logs())


def test_all_four_optimizers_of_the_adversarial_autoencoder_come_back(example: Import, tmp_path: Path) -> None:
    module = example("adversarial_autoencoder")
    first = module.build(tmp_path / "run", max_steps=7)
    first.train()
    again = module.build(tmp_path / "run", max_steps=7, resume_from_checkpoint=True)
    for name in ("q_encoder_optim", "p_decoder_optim", "d_optim", "q_deceiver_optim"):
        moments, back = (getattr(one, name).state_dict()["state"][0]["exp_avg"] for one in (first, again))
        assert moments.abs().sum() > 0
        assert torch.equal(moments, back)


@pytest.mark.parametrize("name", ["autoencoder", "denoising_autoencoder", "vae", "gan", "adversarial_autoencoder"])
def test_a_trainer_as_lernomatics_users_write_it_is_under_forty_lines(example: Import, name: str) -> None:
    kinds = [
        one for one in vars(example(name)).values() if isinstance(one, type) and issubclass(one, LernomaticTrainer)
    ]
    (kind,) = [one for one in kinds if one is not LernomaticTrainer]
    assert len(inspect.getsource(kind).splitlines()) < 40


def test_clients_of_fedprox_stay_nearer_to_the_common_model_than_without(example: Import, tmp_path: Path) -> None:
    runs = {mu: example("fedprox").build(tmp_path / str(mu), mu=mu, num_rounds=2) for mu in (0.0, 0.1)}
    for run in runs.values():
        run.train()
    assert all(near < 0.9 * far for near, far in zip(runs[0.1].drifts, runs[0.0].drifts, strict=True))


def test_personal_models_of_ditto_know_their_clients_digits_better_than_the_common_one(
    example: Import, tmp_path: Path
) -> None:
    module = example("ditto")
    run = module.build(tmp_path, num_rounds=3)
    run.train()
    assert module.measure(run) > run.accuracy() + 0.1


def test_the_server_weighs_clients_by_the_samples_that_a_round_counts(example: Import, tmp_path: Path) -> None:
    run = example("ditto").build(tmp_path, num_rounds=1)
    counts: list[int] = []

    def note(ctx: Context) -> None:
        if ctx.cur_model_idx == 1:
            counts.append(ctx.num_samples)

    for client in run.clients:
        client.register_hook_in_train(note, "on_fit_end", model_idx=None)
    run.train()
    sizes = [len(client.train_dataset) for client in run.clients]
    assert len(set(sizes)) > 1
    assert counts == [3 * size for size in sizes]
    given = [client.get_model_para() for client in run.clients]
    mean = sum(n * one["0.bias"] for n, one in zip(counts, given, strict=True)) / sum(counts)
    assert torch.allclose(run.server.state_dict()["0.bias"], mean)


def test_clients_have_different_digits_and_share_one(example: Import) -> None:
    parts = example("digits").by_owner(4)
    classes: list[Any] = [set(train.tensors[1].tolist()) for train, _ in parts]
    assert classes == [{0, 1, 9}, {2, 3, 9}, {4, 5, 9}, {6, 7, 9}]
    assert [set(test.tensors[1].tolist()) for _, test in parts] == classes


@pytest.mark.parametrize(
    ("step", "moment"),
    [(0, "on_fit_start"), (25, "on_batch_start"), (42, "on_fit_end"), (42, "on_batch_start"), (77, "on_update")],
)
def test_a_federation_goes_on_after_a_kill_anywhere_in_a_round(
    example: Import, tmp_path: Path, step: int, moment: str
) -> None:
    module, settings = example("fedprox"), {"num_rounds": 2, "local_update_steps": 3, "resume_from_checkpoint": True}

    def kill(ctx: Context) -> None:
        if ctx.state.global_step == step:
            raise KeyboardInterrupt

    unbroken, broken = (module.build(tmp_path / name, **settings) for name in ("unbroken", "broken"))
    unbroken.train()
    broken.clients[1].register_hook_in_train(kill, moment)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = module.build(tmp_path / "broken", **settings)
    resumed.train()
    for name, value in unbroken.server.state_dict().items():
        assert torch.equal(resumed.server.state_dict()[name], value)
