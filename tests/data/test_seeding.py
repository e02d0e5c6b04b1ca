from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hezar_train.data import preserved_randomness, sample_seed, seed_device, seed_python_numpy_torch, seeding, step_seed
from hezar_train.data.seeding import DrawWatch, SeedStream, _seed_accelerator


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def draws_of(value: int) -> tuple[float, float, float]:
    seed_python_numpy_torch(value)
    return draws()


def test_seeds_never_change_between_versions_processes_and_platforms() -> None:
    # A resumed run draws again what it drew: these numbers may never change.
    assert sample_seed(42, 3, 1000) == 2559923444120479629
    assert step_seed(42, 1000, 3) == 6773607473038093533
    assert SeedStream(-5, "other", 2**70).at(2**40) == 8666400491155621879


def test_equal_seeds_give_equal_draws_in_all_three_generators() -> None:
    value = sample_seed(1, 2, 3)
    assert draws_of(value) == draws_of(value)


def test_another_seed_epoch_or_index_gives_other_draws_in_all_three_generators() -> None:
    seeds = [sample_seed(1, 2, 3), sample_seed(0, 2, 3), sample_seed(1, 3, 3), sample_seed(1, 2, 4)]
    for drawn_by_one_generator in zip(*map(draws_of, seeds), strict=True):
        assert len(set(drawn_by_one_generator)) == len(seeds)


def test_seeding_forgets_a_half_used_pair_of_normal_draws() -> None:
    def normals() -> tuple[float, float, float]:
        return random.gauss(0, 1), float(np.random.normal()), torch.randn(()).item()

    seed_python_numpy_torch(5)
    first = normals()
    seed_python_numpy_torch(5)
    assert normals() == first


def test_no_two_of_many_samples_share_a_seed() -> None:
    seeds = [sample_seed(7, epoch, index) for epoch in range(4) for index in range(25_000)]
    assert len(set(seeds)) == 100_000
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


@pytest.mark.parametrize("first", [0, 2**31, 2**32 - 50_000])
def test_no_two_samples_of_an_epoch_share_the_word_that_numpy_takes(first: int) -> None:
    # By chance alone, one pair among 100,000 would.
    stream = SeedStream(7, "sample", 0)
    assert len({stream.at(index) % 2**32 for index in range(first, first + 100_000)}) == 100_000


def test_samples_and_steps_draw_from_different_streams() -> None:
    samples = {sample_seed(7, number, index) for number in range(10) for index in range(100)}
    steps = {step_seed(7, index, number) for number in range(10) for index in range(100)}
    assert not samples & steps


def test_no_two_processes_draw_alike_in_a_step() -> None:
    seeds = {step_seed(1, step, rank) for step in range(200) for rank in range(8)}
    assert len(seeds) == 200 * 8


def test_prefixes_that_read_alike_are_different_streams() -> None:
    prefixes = [(1, 23), (12, 3), ("1", 23), (1, "23"), ("1, 23",), (123,), ()]
    assert len({SeedStream(0, *prefix).at(0) for prefix in prefixes}) == len(prefixes)


def test_numpy_integers_give_the_seeds_of_python_ones() -> None:
    assert SeedStream(np.int64(3), np.int32(1)).at(5) == SeedStream(3, 1).at(5)  # type: ignore[arg-type]


def test_every_bit_of_consecutive_seeds_is_a_fair_coin() -> None:
    num_seeds = 20_000
    seeds = np.array([sample_seed(3, 0, index) for index in range(num_seeds)], dtype=np.int64)
    bits = seeds[:, None] >> np.arange(63) & 1
    limit = 4.9 / 2 * num_seeds**0.5  # what a fair coin exceeds once in a million
    assert np.abs(bits.sum(axis=0) - num_seeds / 2).max() < limit
    flips = (bits[1:] != bits[:-1]).sum(axis=0)
    assert np.abs(flips - num_seeds / 2).max() < limit


def test_first_draws_of_consecutive_samples_are_uncorrelated_and_even() -> None:
    drawn = np.array([draws_of(sample_seed(3, 0, index)) for index in range(4000)]).T
    for one in drawn:
        counts = np.bincount((one * 20).astype(int), minlength=20)
        assert ((counts - 200) ** 2 / 200).sum() < 60  # chi-square, 19 degrees of freedom: once in two million
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 4.9 / 4000**0.5
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 4.9 / 4000**0.5


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_without_a_generator_of_its_own_needs_no_more(device: str) -> None:
    seed_device(77, torch.device(device))
    assert draws() == draws_of(77)


def _backend(num_devices: int, current: int) -> SimpleNamespace:
    """Stand in for torch.cuda: lazily made generators, one for each device."""
    backend = SimpleNamespace(default_generators=(), is_initialized=lambda: bool(backend.default_generators))
    backend.init = lambda: setattr(backend, "default_generators", [torch.Generator() for _ in range(num_devices)])
    backend.current_device = lambda: current
    return backend


@pytest.mark.parametrize(("index", "seeded"), [(0, 0), (2, 2), (None, 1)])
def test_only_the_device_in_use_is_seeded(index: int | None, seeded: int) -> None:
    backend = _backend(num_devices=3, current=1)
    _seed_accelerator(backend, index, 123)
    seeds = [generator.initial_seed() for generator in backend.default_generators]
    assert [number for number, seed in enumerate(seeds) if seed == 123] == [seeded]


def test_a_backend_with_one_generator_is_seeded_by_its_own_function() -> None:
    seen: list[int] = []
    _seed_accelerator(SimpleNamespace(manual_seed=seen.append), 0, 123)
    assert seen == [123]


def test_preserved_randomness_puts_all_three_generators_back() -> None:
    expected = [draws_of(5), draws(), draws()][1:]
    draws_of(5)
    with preserved_randomness():
        draws_of(99)
    assert [draws(), draws()] == expected


def test_preserved_randomness_puts_generators_back_after_an_error() -> None:
    draws_of(5)
    expected = draws()
    draws_of(5)
    with pytest.raises(ZeroDivisionError), preserved_randomness():
        _ = draws()[0] / 0
    assert draws() == expected


def half_used_pairs() -> None:
    """Leave the second of a pair of normal draws waiting in each generator."""
    random.gauss(0, 1), np.random.randn(), torch.randn(1, dtype=torch.float64)


DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python's second normal draw": lambda: random.gauss(0, 1),
    "all words of python's": lambda: [random.getrandbits(32) for _ in range(624)],
    "numpy": np.random.random,
    "numpy's second normal draw": np.random.randn,
    "all words of numpy's": lambda: np.random.bytes(4 * 624),
    "torch": lambda: torch.rand(1),
    "torch's second normal draw": lambda: torch.randn(1, dtype=torch.float64),
    "all words of torch's": lambda: torch.empty(624, dtype=torch.int32).random_(),
    "a seed for python": lambda: random.seed(1),
    "a seed for numpy": lambda: np.random.seed(1),
    "a seed for torch": lambda: torch.manual_seed(1),
}


@pytest.mark.parametrize("form", ["memory", "state"])
@pytest.mark.parametrize("what", DRAWS)
def test_a_watch_sees_every_draw(what: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "state":  # of a python, numpy or torch whose memory has another form
        monkeypatch.setattr(seeding, "_python_words", None)
        monkeypatch.setattr(seeding, "_numpy_generator", None)
        monkeypatch.setattr(seeding, "_torch_memory", None)
    watch = DrawWatch()
    for prepare in (lambda: seed_python_numpy_torch(7), half_used_pairs, draws):
        prepare()
        watch.begin()
        assert not watch.has_drawn()
        DRAWS[what]()
        assert watch.has_drawn()


def test_the_generators_of_this_python_and_torch_are_looked_at_in_their_memory() -> None:
    assert seeding._python_words is not None
    assert seeding._torch_memory is not None


def test_a_watch_sees_draws_from_another_generator_put_in_the_place_of_numpys() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        watch = DrawWatch()
        watch.begin()
        assert not watch.has_drawn()
        np.random.random()
        assert watch.has_drawn()
    finally:
        np.random.set_bit_generator(own)


def test_a_watch_leaves_generators_as_they_are() -> None:
    expected = draws_of(5)
    seed_python_numpy_torch(5)
    DrawWatch().begin()
    assert draws() == expected
