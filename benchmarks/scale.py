"""Does anything grow that should not, up to 4,096 processes, 10^12 samples, 10^7 updates and 10,000 checkpoints?

    python benchmarks/scale.py [--rounds 3] [--updates 10000000] [--plot docs/explanation/scale.svg]

The real code of the main process runs with torch's fake process group, which has any number of processes and sends
nothing: its `all_reduce` leaves the values of the only process that is there. So what this process computes, keeps and
writes is real, and the network is not. Ledger, logs and histories are driven directly at their counts, through the
classes that a run uses.

What is paid in every step must be flat; what has to list n things may be linear, and its constant is printed. The
verdict is by ratios alone: at the largest size a flat cost may be 1.5 times the least (1.1 times, where bytes are
counted), and a linear one may have grown from the size before by 1.5 times as much as the size has. Times are CPU times
of the process, the least of several rounds. Exits with 1 if a law does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

WORLDS = (1, 8, 64, 512, 4096)
NUM_SAMPLES = 10**12
FLAT, LINEAR = "flat", "linear"
FLAT_TIMES, FLAT_BYTES, LINEAR_GROWTH = 1.5, 1.1, 1.5
LOG_UPDATES = 50
NUM_TIMED = 20_000
"""Updates over which a pace is measured."""


@dataclass
class Law:
    """What something costs at several sizes, and how it may grow."""

    what: str
    of: str
    """What the sizes count."""
    form: str
    unit: str
    costs: dict[int, float] = field(default_factory=dict)

    @property
    def growth(self) -> float:
        """How much more the largest size costs than it should: 1 is just the law."""
        sizes = [size for size in sorted(self.costs) if size > 1]  # one process sends nothing
        *_, before, last = sizes
        if self.form == FLAT:
            return self.costs[last] / min(self.costs[size] for size in sizes)
        return self.costs[last] / self.costs[before] / (last / before)

    @property
    def holds(self) -> bool:
        limit = LINEAR_GROWTH if self.form == LINEAR else FLAT_BYTES if self.unit == "bytes" else FLAT_TIMES
        return self.growth <= limit

    @property
    def constant(self) -> str:
        """The cost of one thing more, or of any number."""
        last = max(self.costs)
        return f"{shown(self.costs[last] / last, self.unit)} each" if self.form == LINEAR else "-"


def shown(cost: float, unit: str) -> str:
    """Return a cost as people read it."""
    steps = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")] if unit == "bytes" else [
        (1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]  # fmt: skip
    size, name = next((one for one in steps if cost >= one[0]), steps[-1])
    return f"{cost / size:.3g} {name}"


def least(call: Callable[[], object], count: int, repeats: int = 7) -> float:
    """Return the CPU seconds of one call: the least of several times `count` of them."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(count):
            call()
        found.append((time.process_time() - start) / count)
    return min(found)


def memory() -> int:
    """Return the bytes that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------- the main process of a world


def join_fake_world(count: int) -> None:
    """Be process 0 of so many, of which the others do not exist."""
    if count == 1:
        return
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hezar_train.runtime import gradient_exchange

    os.environ.update(RANK="0", WORLD_SIZE=str(count), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())

    def keep(_, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and takes no texts for them
        kept = torch.futures.Future()
        kept.set_result(bucket.buffer())
        return kept

    class Unsent(gradient_exchange.DistributedDataParallel):  # type: ignore[misc]
        """DDP whose buckets stay as they are: the fake group's own answer is none that its reducer takes."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.register_comm_hook(None, keep)

    gradient_exchange.DistributedDataParallel = Unsent  # type: ignore[misc]


def measure_world(count: int) -> dict[str, float]:
    """Return what the main process of so many pays; what is called so by its name in `WORLD_LAWS`."""
    join_fake_world(count)
    import torch

    from hezar_train import Trainer, TrainerConfig
    from hezar_train.checkpoint import SavingGroup
    from hezar_train.data import Order
    from hezar_train.data.loader import MapSource
    from hezar_train.plan import make_plan
    from hezar_train.runtime import Processes

    class Samples:
        """As many as nobody has."""

        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            point = torch.full((4,), float(index % 7))
            return point, point[:1]

    config = TrainerConfig("unused", batch_size=2, gradient_accumulation_steps=2)
    plan = make_plan(config, NUM_SAMPLES, count)
    source = MapSource(Samples(), torch.stack, Order(2, 1, shuffle=True, num_processes=count))
    source.fetch = lambda _epoch, _indices: None
    source._fetcher._fetch = source.fetch

    def first_window(position: int) -> Callable[[], object]:
        return lambda: next(source.windows(plan, 3, position - position % plan.window_samples, 1 << 60))

    def windows() -> object:
        return list(islice(source.windows(plan, 1, 0, 1 << 60), 16_384))

    processes, group = Processes(0, count), SavingGroup(0, count)
    report = {"records": {f"model.shard-{n}": {"size": 1 << 30, "sha256": "0" * 64} for n in range(3)}}
    few = max(1, 2048 // count)
    found = {
        "plan": least(lambda: make_plan(config, NUM_SAMPLES, count), 50),
        "windows": least(windows, 1, 3) / 16_384,
        "seek": least(first_window(9 * 10**11), 20),
        "agree": least(lambda: processes.agree([1, 2, 3]), 200),
        "sum": least(lambda: processes.sum_and_compare([1.0], 7), 200),
        "share": least(lambda: processes.share({"step": 1}), 200),
        "tell": least(lambda: group.broadcast({"name": "00000001"}), 200),
        "gather": least(lambda: processes.gather({"step": 1}), few, 3),
        "report": least(lambda: group.gather(report), few, 3),
    }
    with tempfile.TemporaryDirectory() as folder:
        found |= measure_updates(folder, Trainer, TrainerConfig, Samples())
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def measure_updates(folder: str, trainer_of: Any, config_of: Any, data: Any) -> dict[str, float]:
    """Train for real, and return what an update costs and what the ledger holds of each."""
    import torch

    from hezar_train import Hook

    class Clock(Hook):
        """The CPU time at the start of each step."""

        def __init__(self) -> None:
            self.stamps: list[float] = []

        def on_batch_start(self, ctx: Any) -> None:
            del ctx
            self.stamps.append(time.process_time())

    clock, every = Clock(), 100
    config = config_of(
        folder, batch_size=2, gradient_accumulation_steps=2, max_steps=2 * 600, num_epochs=1, criterion="MSELoss",
        log_steps=2 * every, save_enabled=False, use_cpu=True, trackers=[],
    )  # fmt: skip
    trainer = trainer_of(config, torch.nn.Linear(4, 1), data)
    trainer.register_hooks([clock])
    trainer.train()
    stamps = clock.stamps[2 * every :: 2 * 10]  # ten updates at a time: the clock of the CPU is no finer
    least_of_ten = min(after - before for before, after in pairwise(stamps))
    size = Path(folder, "ledger.jsonl").stat().st_size
    return {"update": least_of_ten / 10, "ledger": size / trainer.state.update_step}


WORLD_LAWS = {
    "plan": ("making the plan", FLAT, "seconds"),
    "windows": ("cutting an update's window", FLAT, "seconds"),
    "seek": ("seeking sample 9 * 10^11, first window", FLAT, "seconds"),
    "agree": ("agreeing on three numbers", FLAT, "seconds"),
    "sum": ("sum and comparison of an update", FLAT, "seconds"),
    "share": ("hearing from the main process", FLAT, "seconds"),
    "tell": ("the same while saving", FLAT, "seconds"),
    "update": ("an update of a tiny network, whole", FLAT, "seconds"),
    "memory": ("peak memory of the process", FLAT, "bytes"),
    "gather": ("gathering a value of each process", LINEAR, "seconds"),
    "report": ("gathering hashes of each one's shards", LINEAR, "seconds"),
}


def world_laws(rounds: int) -> list[Law]:
    """Measure each world in processes of its own, the worlds in turn."""
    laws = {name: Law(what, "processes", form, unit) for name, (what, form, unit) in WORLD_LAWS.items()}
    for _ in range(rounds):
        for count in WORLDS:
            command = [sys.executable, __file__, "--world", str(count)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            for name, law in laws.items():
                law.costs[count] = min(found[name], law.costs.get(count, found[name]))
    for name in ("gather", "report"):  # alone, nothing is sent
        laws[name].costs.pop(1)
    return list(laws.values())


# ------------------------------------------------------------------------------- samples, shards, checkpoints


def order_law() -> Law:
    """Measure what a sample's place in the order of an epoch costs, by the size of the epoch."""
    from hezar_train.data.sampler import Permutation

    law = Law("16,384 samples of a shuffled epoch", "samples", FLAT, "seconds")
    for size in (10**6, 10**8, 10**10, 10**12):
        order = Permutation(size, 1, 1)
        law.costs[size] = least(lambda order=order, size=size: order.chunk(size // 2, size // 2 + 16_384), 5)
    return law


def shard_laws(folder: Path) -> list[Law]:
    """Write the shards of every process of a sharded save, seal them, and open the checkpoint."""
    import torch

    from hezar_train.checkpoint.manifest import Draft, read_manifest
    from hezar_train.checkpoint.shard_files import Box, Place, ShardIndex, write_shards

    names = {"model": ["layer.weight"], "optimizer": ["state.0.exp_avg", "state.0.exp_avg_sq"]}
    laws = [
        Law("bytes of a manifest", "shards", LINEAR, "bytes"),
        Law("reading a manifest", "shards", LINEAR, "seconds"),
        Law("opening the index of shards, 3 tensors", "shards", LINEAR, "seconds"),
    ]
    for count in WORLDS[1:]:
        draft = Draft(folder / str(count))
        draft.folder.mkdir()
        for rank in range(count):
            place = Place((count, 4), Box((rank, 0), (1, 4)), is_first=True)
            boxes = {part: {name: (torch.ones(1, 4), place) for name in own} for part, own in names.items()}
            write_shards(draft, f"{rank + 1:05d}-of-{count:05d}", boxes)
        for name in ("model.safetensors", "optimizer.safetensors"):
            draft.write(name, [b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
        draft.seal(1)
        laws[0].costs[count] = (draft.folder / "manifest.json").stat().st_size
        repeats = max(2, 512 // count)
        laws[1].costs[count] = least(lambda draft=draft: read_manifest(draft.folder), 1, repeats)
        manifest = read_manifest(draft.folder)
        laws[2].costs[count] = least(lambda draft=draft, m=manifest: ShardIndex(draft.folder, m), 1, min(repeats, 5))
    return laws


def choice_laws(folder: Path) -> list[Law]:
    """Look for the newest of so many checkpoints, for one by its step, and write one more."""
    import torch

    from hezar_train.checkpoint import CheckpointStore, Contents

    laws = [
        Law("choosing the newest checkpoint", "checkpoints", LINEAR, "seconds"),
        Law("finding a checkpoint by its step", "checkpoints", FLAT, "seconds"),
        Law("saving one more, pruning one", "checkpoints", LINEAR, "seconds"),
    ]
    texts = {"train_config.yaml": "{}\n"}
    model = torch.nn.Linear(2, 2)
    for count in (10, 100, 1000, 10_000):
        store = CheckpointStore(folder / str(count))
        store.publish(1, Contents.gather(model, {}, {}, texts).write)
        for step in range(2, count):
            shutil.copytree(store.path(1), store.root / f"{step:08d}", copy_function=os.link)
        store.publish(count, Contents.gather(model, {}, {}, texts).write)
        laws[0].costs[count] = least(store.newest, 3, 5)
        laws[1].costs[count] = least(lambda store=store, step=count // 2: store.path(step), 100)
        steps = iter(range(count + 1, count + 100))

        def save(store: CheckpointStore = store, steps: Iterator[int] = steps, keep: int = count) -> None:
            store.publish(next(steps), Contents.gather(model, {}, {}, texts).write)
            store.prune(keep, protect=range(1, 3))

        laws[2].costs[count] = least(save, 1, 5)
        shutil.rmtree(store.root)
    return laws


# ------------------------------------------------------------------------------- updates


@contextmanager
def written_run(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Open what a run writes in every update: its ledger, and its storage with the writers of its logs."""
    from hezar_train.events import CSVWriter, EventStorage, JSONLinesWriter, Ledger, TensorBoardWriter

    ledger = Ledger(folder / "ledger.jsonl")
    storage = EventStorage(
        writers=[JSONLinesWriter(folder / "metrics.json"), CSVWriter(folder / "log.csv"), TensorBoardWriter(folder)]
    )
    yield ledger, storage
    ledger.close()
    storage.close()


def update_laws(folder: Path, num_updates: int) -> tuple[list[Law], dict[str, str]]:
    """Drive ledger, storage, histories and logs for so many updates; measure at each power of ten on the way."""
    from hezar_train.events import Ledger, read_rows

    marks = [10**power for power in range(4, 10) if 10**power <= num_updates]
    laws = {
        "pace": Law("measuring, ledger and logs of an update", "updates", FLAT, "seconds"),
        "ledger": Law("bytes of the ledger", "updates", LINEAR, "bytes"),
        "logs": Law("bytes of all logs, a row in 50 updates", "updates", LINEAR, "bytes"),
        "audit": Law("reading the ledger", "updates", LINEAR, "seconds"),
        "rows": Law("reading the rows of the log", "updates", LINEAR, "seconds"),
    }
    held, before = {}, memory()
    with written_run(folder) as (ledger, storage):
        update = 0
        for mark in marks:
            update = _drive(ledger, storage, update, mark - NUM_TIMED // 2)
            laws["pace"].costs[mark] = float("inf")
            for _ in range(3):
                start = time.process_time()
                after = _drive(ledger, storage, update, update + NUM_TIMED)
                laws["pace"].costs[mark] = min(laws["pace"].costs[mark], (time.process_time() - start) / NUM_TIMED)
                update = after
            ledger.flush()
            storage.flush()
            held[mark] = memory() - before  # here: what is read below is not held by a run
            laws["ledger"].costs[mark] = ledger.size * mark / update
            logs = sum(path.stat().st_size for path in folder.iterdir() if path != ledger.path)
            laws["logs"].costs[mark] = logs * mark / update
            share = mark / update  # a few were done more, for their time
            seconds = least(lambda: sum(one.updates for one in Ledger.read_lines(ledger.path)), 1, 2)
            laws["audit"].costs[mark] = seconds * share
            laws["rows"].costs[mark] = least(lambda: len(read_rows(folder / "metrics.json")), 1, 2) * share
    facts = {f"memory held after {mark:,} updates": shown(max(size, 1), "bytes") for mark, size in held.items()}
    return list(laws.values()), facts


def _drive(ledger: Any, storage: Any, update: int, end: int) -> int:
    """Do for each update what a run does beside its model: 100 updates in an epoch, a row in 50 of them."""
    while update < end:
        first, epoch = update % 100 * 32, 1 + update // 100
        update += 1
        storage.step = update
        ledger.add(update, epoch, first, 32)
        storage.put_scalar("train.step_loss", 0.5)
        if update % LOG_UPDATES == 0:
            storage.log({"train.loss": 0.25, "train.learning_rate": 1e-3, "train.grad_norm": 2.5}, update, epoch)
            storage.flush()
            ledger.flush()
    return update


# ------------------------------------------------------------------------------- what is shown


def print_table(laws: Sequence[Law]) -> None:
    """Print what was measured at each size, and whether it is as it must be."""
    for of in dict.fromkeys(law.of for law in laws):
        here = [law for law in laws if law.of == of]
        sizes = sorted({size for law in here for size in law.costs})
        print(f"\n| {of:40} | {' | '.join(f'{size:>10,}' for size in sizes)} | law    | growth | constant       |")
        print(f"| {'-' * 40} | {' | '.join('-' * 9 + ':' for _ in sizes)} | ------ | -----: | -------------: |")
        for law in here:
            cells = [f"{shown(law.costs[size], law.unit) if size in law.costs else '':>10}" for size in sizes]
            mark = "" if law.holds else "  <-- DOES NOT HOLD"
            print(
                f"| {law.what:40} | {' | '.join(cells)} | {law.form:6} | {law.growth:6.2f} | {law.constant:>14} |{mark}"
            )


def plot(laws: Sequence[Law], path: Path) -> None:
    """Draw every cost by its size, the flat ones and the linear ones of each kind apart."""
    import matplotlib as mpl

    mpl.use("svg" if path.suffix == ".svg" else "agg")
    mpl.rcParams.update({"svg.hashsalt": "scale", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot

    kinds = [("processes", FLAT), ("processes", LINEAR), ("updates", FLAT), ("updates", LINEAR)]
    figure, grid = pyplot.subplots(2, 2, figsize=(10, 7))
    for axes, (of, form) in zip(grid.flat, kinds, strict=True):
        here = [law for law in laws if law.form == form and law.unit == "seconds" and law.of == of]
        here += [
            law for law in laws if form == LINEAR and law.unit == "seconds" and {law.of, of} == {"shards", "processes"}
        ]
        here += [
            law
            for law in laws
            if law.unit == "seconds" and {law.of, of} == {"checkpoints", "updates"} and law.form == form
        ]
        for law in here:
            sizes = sorted(law.costs)
            axes.plot(sizes, [law.costs[size] for size in sizes], marker="o", markersize=3, label=law.what)
        axes.set(xscale="log", yscale="log", title=f"{form}: {' and '.join(dict.fromkeys(law.of for law in here))}")
        axes.set_ylabel("seconds of one CPU")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 30, high * 3)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=6, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    """Measure, print, draw; return 1 if a law does not hold."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--updates", type=int, default=10_000_000)
    asked.add_argument("--plot", type=Path, help="draw the costs into this file (.svg, .png)")
    asked.add_argument("--world", type=int, help=argparse.SUPPRESS)
    asked.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = asked.parse_args()
    if options.world is not None:
        print(json.dumps(measure_world(options.world)), flush=True)
        os._exit(0)  # the fake group has no end
    if options.drive is not None:
        driven, facts = update_laws(options.drive, options.updates)
        print(json.dumps([[asdict(law) for law in driven], facts]))
        return 0
    laws = [*world_laws(options.rounds), order_law()]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("shards", "checkpoints", "updates"):
            Path(folder, name).mkdir()
        laws += [*shard_laws(Path(folder, "shards")), *choice_laws(Path(folder, "checkpoints"))]
        command = [sys.executable, __file__, "--drive", f"{folder}/updates", "--updates", str(options.updates)]
        driven, facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    laws += [Law(**{**law, "costs": {int(size): cost for size, cost in law["costs"].items()}}) for law in driven]
    print_table(laws)
    print()
    for what, value in facts.items():
        print(f"{what}: {value}")
    if options.plot is not None:
        plot(laws, options.plot)
    broken = [law.what for law in laws if not law.holds]
    print(f"\nDoes not hold: {', '.join(broken)}" if broken else "\nAll laws hold.")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
