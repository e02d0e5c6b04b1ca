"""Doors: other systems' names for the same trainer, one module each, built on the public names of `hezar_train` alone.

    from hezar_train.compat.hezar import Trainer, TrainerConfig
    from hezar_train.compat.libai import Trainer
    from hezar_train.compat.federatedscope import Trainer
    from hezar_train.compat.lernomatic import Trainer

A door's Trainer is a subclass of `hezar_train.Trainer`, as a user would write it. A run does not depend on the door it
was trained through: folder, checkpoints and bits are the same. Nothing outside of this package imports a door.
"""

__all__ = ["federatedscope", "hezar", "lernomatic", "libai"]
