"""`Plan`: what follows from a config, the number of samples and the number of processes, as one pure function.

A step is one micro-batch on each process, an update is one window of steps. An epoch is cut into windows of
`window_samples`; the last may be short, or is dropped with `drop_last`. Every `*_steps` field of the config becomes a
period in updates here, once, and `exactness_changes` tells what keeps a run from going on exactly. No torch, no files
but the plan's own, and nothing here knows where the run is: that is the state's.
"""

from hezar_train.plan.batches_and_epochs import BatchAndEpochNumbers, calculate_batch_epoch_num
from hezar_train.plan.changes import exactness_changes, schedule_changes
from hezar_train.plan.making import make_plan, steps_of
from hezar_train.plan.plan import UNLIMITED, End, Plan, WindowSpan, is_due, one_pass

__all__ = [
    "UNLIMITED",
    "BatchAndEpochNumbers",
    "End",
    "Plan",
    "WindowSpan",
    "calculate_batch_epoch_num",
    "exactness_changes",
    "is_due",
    "make_plan",
    "one_pass",
    "schedule_changes",
    "steps_of",
]
