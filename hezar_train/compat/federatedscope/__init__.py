"""FederatedScope's trainer: `from hezar_train.compat.federatedscope import GeneralTorchTrainer, CtxVar, MODE`.

    GeneralTorchTrainer(model, data, device, config, only_for_eval, monitor)

`stand_in()` puts all of it where FederatedScope has it, so that code which imports `federatedscope.core.trainers` runs
with no import changed.

A routine (train, evaluate, finetune) is made of hooks at the moments of `HOOK_TRIGGER`; a hook is a function of the
context and is known by its name. The default hooks have FederatedScope's names (`_hook_on_batch_forward`, ...), and
`cfg`, `ctx`, `_run_routine`, `_run_epoch`, `_run_batch` are FederatedScope's, over this package's walk.

What FederatedScope calls so, and where it is:

    core.trainers                GeneralTorchTrainer, GeneralMultiModelTrainer, BaseTrainer, Context, CtxVar, lifecycle
    core.trainers.enums          MODE, LIFECYCLE, TRIGGER
    core.configs                 CN, global_cfg; `cfg.hezar_train` has fields of ours, such as save_steps
    core.monitors                Monitor, MetricCalculator, register_metric
    core.auxiliaries             get_trainer, get_optimizer, get_scheduler, get_criterion, get_regularizer, use_diff,
                                 ReIterator, param2tensor, merge_param_dict, get_trainable_para_names, move_to
    register                     register_trainer, register_optimizer, register_scheduler, register_criterion,
                                 register_regularizer; register_plugin for what get_trainer adds by a config
    core.trainers.trainer_*      wrap_fedprox_trainer, wrap_regularized_optimizer; others run as they are written

Over a `TrainerConfig` there are, with the plain Trainer's hooks and context: Trainer(config, model, data),
DittoTrainer, MultiModelTrainer (models by name), CopiedModelsTrainer (a number of models alike), and FedProx, SAM and
ASAM as hooks.
"""

from hezar_train.compat.federatedscope.builders import (
    get_criterion,
    get_optimizer,
    get_regularizer,
    get_scheduler,
    register_criterion,
    register_optimizer,
    register_regularizer,
    register_scheduler,
)
from hezar_train.compat.federatedscope.config import CN, global_cfg, unknown_keys
from hezar_train.compat.federatedscope.context import Context, lifecycle
from hezar_train.compat.federatedscope.exchange import (
    filter_by_specified_keywords,
    format_log_hooks,
    get_trainable_para_names,
    merge_param_dict,
    move_to,
    param2tensor,
)
from hezar_train.compat.federatedscope.feeds import ReIterator
from hezar_train.compat.federatedscope.general import GeneralTorchTrainer, use_diff
from hezar_train.compat.federatedscope.monitor import Monitor
from hezar_train.compat.federatedscope.multi_model import GeneralMultiModelTrainer
from hezar_train.compat.federatedscope.registry import (
    BaseTrainer,
    get_trainer,
    register_plugin,
    register_trainer,
    wrap_DittoTrainer,
    wrap_fedprox_trainer,
    wrap_regularized_optimizer,
)
from hezar_train.compat.federatedscope.stand_in import stand_in
from hezar_train.compat.federatedscope.trainer import CopiedModelsTrainer, DittoTrainer, MultiModelTrainer, Trainer
from hezar_train.config import TrainerConfig
from hezar_train.federated import (
    ASAM,
    PLUGIN_ORDER,
    SAM,
    FedProx,
    MetricCalculator,
    RegularizedOptimizer,
    is_larger_better,
    register_metric,
    wrap_sam_trainer,
)
from hezar_train.loop import HOOK_TRIGGER, LIFECYCLE, TRIGGER, CtxVar
from hezar_train.plan import calculate_batch_epoch_num
from hezar_train.types import Mode

MODE = Mode

__all__ = [
    "ASAM",
    "CN",
    "HOOK_TRIGGER",
    "LIFECYCLE",
    "MODE",
    "PLUGIN_ORDER",
    "SAM",
    "TRIGGER",
    "BaseTrainer",
    "Context",
    "CopiedModelsTrainer",
    "CtxVar",
    "DittoTrainer",
    "FedProx",
    "GeneralMultiModelTrainer",
    "GeneralTorchTrainer",
    "MetricCalculator",
    "Monitor",
    "MultiModelTrainer",
    "ReIterator",
    "RegularizedOptimizer",
    "Trainer",
    "TrainerConfig",
    "calculate_batch_epoch_num",
    "filter_by_specified_keywords",
    "format_log_hooks",
    "get_criterion",
    "get_optimizer",
    "get_regularizer",
    "get_scheduler",
    "get_trainable_para_names",
    "get_trainer",
    "global_cfg",
    "is_larger_better",
    "lifecycle",
    "merge_param_dict",
    "move_to",
    "param2tensor",
    "register_criterion",
    "register_metric",
    "register_optimizer",
    "register_plugin",
    "register_regularizer",
    "register_scheduler",
    "register_trainer",
    "stand_in",
    "unknown_keys",
    "use_diff",
    "wrap_DittoTrainer",
    "wrap_fedprox_trainer",
    "wrap_regularized_optimizer",
    "wrap_sam_trainer",
]
