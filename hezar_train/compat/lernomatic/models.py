"""lernomatic's models: a wrapper around a module that says where its classes are, and how a Trainer trains one.

`LernomaticModel` stands where lernomatic's class of that name does. What a file names is looked up among the modules
that the program has imported; nothing is imported because a file says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hezar_train.compat.lernomatic.keeping import read_file
from hezar_train.errors import CheckpointError, ConfigError

__all__ = ["LernomaticModel", "WrappedModel", "find_class", "is_wrapper", "module_of", "parameters_of", "params_of"]


class LernomaticModel:
    """A module, `net`, under the names that lernomatic's trainers call."""

    net: Any = None
    import_path: str | None = None
    module_import_path: str | None = None
    model_name: str | None = None
    module_name: str | None = None

    def __init__(self, **settings: Any) -> None:
        if settings:
            raise ConfigError(f"{type(self).__name__} was given {', '.join(settings)}: LernomaticModel takes nothing")

    def __repr__(self) -> str:
        return self.get_model_name()

    def get_net(self) -> nn.Module:
        """Return the module."""
        if not isinstance(self.net, nn.Module):
            raise ConfigError(f"{type(self).__name__} has no network: set self.net to a torch.nn.Module")
        return self.net

    def get_model_parameters(self) -> Iterator[nn.Parameter]:
        """Return the module's parameters, for an optimizer."""
        return self.get_net().parameters()

    def get_num_layers(self) -> int:
        """Count the parameter tensors."""
        return len(list(self.get_net().parameters()))

    def get_model_name(self) -> str:
        """Return the name of this class."""
        return self.model_name or type(self).__name__

    def get_model_path(self) -> str:
        """Return the module that this class is in."""
        return self.import_path or type(self).__module__

    def get_module_name(self) -> str:
        """Return the name of the network's class."""
        return self.module_name or type(self.get_net()).__name__

    def get_module_import_path(self) -> str:
        """Return the module that the network's class is in."""
        return self.module_import_path or type(self.get_net()).__module__

    def get_params(self) -> dict[str, Any]:
        """Return the weights, and where the classes are."""
        params = {
            "model_state_dict": self.get_net_state_dict(),
            "model_name": self.get_model_name(),
            "model_import_path": self.get_model_path(),
            "module_name": self.get_module_name(),
            "module_import_path": self.get_module_import_path(),
        }
        arguments = getattr(self, "get_model_args", None)
        return params if arguments is None else params | {"model_args": arguments()}

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Take over what `get_params` returned; a network of another class is made anew."""
        kind = find_class(params["module_import_path"], params["module_name"])
        if not issubclass(kind, nn.Module):
            raise CheckpointError(f"the checkpoint's network is a {kind.__name__}; expected a class of torch.nn.Module")
        self.import_path, self.model_name = params["model_import_path"], params["model_name"]
        self.module_import_path, self.module_name = params["module_import_path"], params["module_name"]
        if type(self.net) is not kind or "model_args" in params:
            self.net = kind(**params.get("model_args", {}))
        self.net.load_state_dict(params["model_state_dict"])

    def get_net_state_dict(self) -> dict[str, Any]:
        """Return the weights by name."""
        return self.get_net().state_dict()

    def set_net_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Load weights."""
        self.get_net().load_state_dict(sd)

    def set_train(self) -> None:
        """Go to training mode."""
        self.get_net().train()

    def set_eval(self) -> None:
        """Go to evaluation mode."""
        self.get_net().eval()

    def send_to(self, device: Any) -> None:
        """Go to a device."""
        self.get_net().to(device)

    def forward(self, X: Any) -> Any:  # noqa: N803 - the name that callers know
        """Run the network."""
        return self.get_net()(X)

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.get_net().zero_grad()

    def freeze_to(self, N: int) -> None:  # noqa: N803
        """Stop training the first `N` parameter tensors."""
        self._let_learn(N, learns=False)

    def unfreeze_to(self, N: int) -> None:  # noqa: N803
        """Train the first `N` parameter tensors again."""
        self._let_learn(N, learns=True)

    def freeze(self) -> None:
        """Stop training every parameter tensor but the last."""
        self._let_learn(self.get_num_layers() - 1, learns=False)

    def freeze_all(self) -> None:
        """Stop training every parameter tensor."""
        self._let_learn(self.get_num_layers(), learns=False)

    def unfreeze(self) -> None:
        """Train every parameter tensor."""
        self._let_learn(self.get_num_layers(), learns=True)

    def load_checkpoint(self, fname: str | os.PathLike[str], model_key: str = "model") -> None:
        """Take the weights over from a file that `save_checkpoint` wrote."""
        self.set_params(read_file(fname)[model_key])

    def _let_learn(self, count: int, *, learns: bool) -> None:
        for parameter in list(self.get_net().parameters())[:count]:
            parameter.requires_grad_(learns)


class WrappedModel(nn.Module):
    """A wrapper as a module, so that a Trainer can train it; every name of the wrapper is there as well."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.net = wrapped.net
        vars(self)["wrapped"] = wrapped

    def renewed(self) -> WrappedModel:
        """Take over the module of a wrapper that has made itself another one."""
        if self.net is not vars(self)["wrapped"].net:
            super().__setattr__("net", vars(self)["wrapped"].net)
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the wrapper's forward."""
        return vars(self)["wrapped"].forward(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "wrapped" in vars(self) and name != "training" and not name.startswith("_"):
            setattr(vars(self)["wrapped"], name, value)
        if "wrapped" not in vars(self) or name in {"net", "training"} or name.startswith("_"):
            super().__setattr__(name, value)


def is_wrapper(given: Any) -> bool:
    """Tell whether something is a wrapper around a module, of this class or of lernomatic's own."""
    is_one = not isinstance(given, nn.Module | type) and callable(getattr(given, "forward", None))
    return is_one and isinstance(getattr(given, "net", None), nn.Module)


def module_of(given: Any) -> nn.Module | None:
    """Return a module to train with: a wrapper's, or the module itself; None for anything else."""
    if isinstance(given, nn.Module):
        return given
    return WrappedModel(given) if is_wrapper(given) else None


def parameters_of(model: Any) -> list[nn.Parameter]:
    """Return what an optimizer trains of a model."""
    return list(model.get_model_parameters() if hasattr(model, "get_model_parameters") else model.parameters())


def params_of(model: Any) -> dict[str, Any]:
    """Return the weights and the classes of a model, as `LernomaticModel.get_params` does."""
    if hasattr(model, "get_params"):
        return dict(model.get_params())
    kind = type(model)
    names = {"model_name": kind.__name__, "model_import_path": kind.__module__}
    return {"model_state_dict": model.state_dict(), "module_name": kind.__name__,
            "module_import_path": kind.__module__} | names  # fmt: skip


def find_class(path: str, name: str) -> type[Any]:
    """Return a class of networks, or of wrappers around one, that the program has imported.

    A file may name it, and never has it imported. No other class is made because a file names it: among the modules
    that any program has imported are those that start others.
    """
    found = getattr(sys.modules.get(path), name, None) if isinstance(path, str) and isinstance(name, str) else None
    if not isinstance(found, type):
        raise CheckpointError(
            f"the checkpoint is of {path}.{name}, which this program has not imported. Import it first, or pass a "
            "model to the Trainer, whose weights are then loaded."
        )
    is_wrapper_class = all(callable(getattr(found, method, None)) for method in ("set_params", "get_net", "forward"))
    if not issubclass(found, nn.Module) and not is_wrapper_class:
        raise CheckpointError(f"the checkpoint is of {path}.{name}, which is no class of models: it is not made")
    return found
