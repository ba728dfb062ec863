"""The hooks of `ElasticCallback`, for both packages of Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch

from elastic_mbs.batch.join import Apart
from elastic_mbs.distributed.peers import is_spread
from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.integrations.lightning_names import LightningNames
from elastic_mbs.integrations.lightning_private import EVALUATIONS, Steps
from elastic_mbs.options import GradientOptions, Options, check_names
from elastic_mbs.runtime import ElasticMBS


class LightningHooks:
    """A callback that keeps a Lightning `Trainer` alive through out-of-memory errors.

    `Trainer(callbacks=[ElasticCallback()])`, one in a Trainer: the loader gives the batch wanted,
    the runtime cuts it. `training_step` gets pieces of the batch, and may get the same samples
    again; so do `validation_step`, `test_step` and `predict_step`. Their logs are recorded once per
    batch. With manual optimisation `training_step` gets the whole batch, and calls
    `callback.runtime.backward(loss_fn, batch)`. The sizes that were learned are saved in
    Lightning's checkpoints.

    Args:
        **options: those of `ElasticMBS`, but `model`, `scaler` and `GradientOptions(backward=)`,
            which are Lightning's.

    Raises:
        UsageError: an option makes no sense here.
        UnsupportedError: Lightning is older than all versions that were tested.
    """

    names: LightningNames

    def __init__(self, **options: Unpack[Options]) -> None:
        self.names.framework.check()
        check_names("ElasticCallback", options, taken=("scaler",))
        if getattr(options.get("gradients"), "backward", None) is not None:
            raise UsageError(
                "GradientOptions(backward=) is Lightning's: override LightningModule.backward"
            )
        if options.get("optimizers"):
            raise UsageError(
                "optimizers= cannot be guarded in Lightning, whose steps run training_step inside: "
                "leave it out"
            )
        count = options.get("count")
        if isinstance(count, Mapping):
            raise UsageError(
                "count= is a dict of several losses, and training_step returns one: give one "
                "function, or count_tokens(...)"
            )
        # a wrong option is refused now, and not when training begins
        without_log: Options = {**options, "log": None}
        ElasticMBS(torch.nn.Identity(), **without_log)
        self._options = options
        self._count = count
        self._state: dict[str, Any] = {}  # from a checkpoint, until there is a runtime
        self._module: Any = None
        self._strategy: Any = None
        self._root: Any = None  # for which the runtime was made
        self._runtime: ElasticMBS | None = None
        self._steps: Steps | None = None

    @property
    def runtime(self) -> ElasticMBS:
        """The runtime, once the Trainer has begun, for its `stats`, `last_result` and doors.

        The model in DistributedDataParallel or in shards, which a fit on several ranks makes, gets
        another one.
        """
        model = self._spread()
        if self._runtime is not None and model is not None and model is not self._root:
            self._state = self._runtime.state_dict()
            self._runtime = None
        if self._runtime is None:
            if self._module is None:
                raise UsageError(
                    "ElasticCallback.runtime is there once a Trainer with this callback has begun "
                    "to fit, validate, test or predict"
                )
            options: dict[str, Any] = {**self._options, **self._backward(self._module)}
            # a step's outputs are often read by nobody
            options["pad"] = Apart.APART if options.get("pad") is None else options["pad"]
            self._root = self._module if model is None else model
            self._runtime = ElasticMBS(self._root, **options)
            if self._state:
                self._runtime.load_state_dict(self._state)
        return self._runtime

    def _spread(self) -> Any:
        """Return the model in DistributedDataParallel or in shards, or None where there is none."""
        model = getattr(self._strategy, "model", None)
        if model is not None and is_spread([model]):
            return model
        if type(self._strategy) is self.names.model_parallel_strategy:
            raise UnsupportedError(
                "ModelParallelStrategy without fully_shard: tensor parallelism is not supported. "
                "Apply fully_shard to the model in configure_model"
            )
        return None

    def _backward(self, module: Any) -> Options:
        """Return the options of backward: the engine's, or the user's own where there is one."""
        gradients = self._options.get("gradients") or GradientOptions()
        if not module.automatic_optimization:
            return {"gradients": replace(gradients, backward=module.manual_backward)}
        own = module.backward if self.names.is_overridden("backward", module) else None
        return {
            "gradients": replace(gradients, backward=own),
            "scaler": getattr(module.trainer.precision_plugin, "scaler", None),
        }

    # ------------------------------------------------------------------ called by Lightning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the places of the steps, or refuse the trainer."""
        _check(self.names, trainer, pl_module)
        self._leave()
        if self._module is not pl_module:
            self._module, self._runtime = pl_module, None
        self._strategy = trainer.strategy
        self._steps = Steps(self.names, trainer, lambda: self.runtime, self._count)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the steps back."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the steps back."""
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned of sizes and memory, for Lightning's checkpoints."""
        return self._state if self._runtime is None else self._runtime.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what another run has learned."""
        self._state = state_dict
        if self._runtime is not None:
            self._runtime.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copied or pickled Trainer takes along: the options, and what was learned.

        The copy makes a runtime of its own when it begins.
        """
        bound = dict.fromkeys(("_module", "_strategy", "_root", "_runtime", "_steps"))
        return {**vars(self), **bound, "_state": self.state_dict()}

    def _leave(self) -> None:
        if self._steps is not None:
            self._steps.put_back()
        if self._runtime is not None:
            self._runtime.close()


def _check_strategy(names: LightningNames, trainer: Any, module: Any) -> None:
    strategy = trainer.strategy
    spread = type(strategy) in (names.ddp_strategy, names.model_parallel_strategy)
    alone = isinstance(strategy, names.single_device_strategy) and trainer.world_size == 1
    if not (spread or alone):
        raise UnsupportedError(
            f"{type(strategy).__name__} over {trainer.world_size} processes: a replay on one of "
            "them would leave the others waiting. Use Trainer(strategy='ddp'), a "
            "ModelParallelStrategy with fully_shard in configure_model (FSDP in its second "
            "version), or one device: Trainer(devices=1, strategy='auto')"
        )
    own = any(
        getattr(type(strategy), name) is not getattr(names.single_device_strategy, name)
        for name in ("pre_backward", "backward", "post_backward")
    )
    if alone and own and module.automatic_optimization:
        raise UnsupportedError(
            f"{type(strategy).__name__} has a backward of its own, which no piece runs: override "
            "LightningModule.backward, which every piece runs"
        )
    if spread and not module.automatic_optimization:
        raise UnsupportedError(
            f"manual optimization under {type(strategy).__name__}: manual_backward would sum the "
            "gradients of every piece over the ranks. Use automatic optimization, or Fabric, whose "
            "loop is yours"
        )


def _check(names: LightningNames, trainer: Any, module: Any) -> None:
    if not isinstance(trainer, names.trainer):
        raise UsageError(names.advice_for(trainer))
    _check_strategy(names, trainer, module)
    plugin = type(trainer.precision_plugin)
    if (plugin.backward, plugin.post_backward) != (
        names.precision.backward,
        names.precision.post_backward,
    ) or plugin.pre_backward not in (
        names.precision.pre_backward,
        names.mixed_precision.pre_backward,
    ):
        raise UnsupportedError(
            f"{plugin.__name__} has a backward of its own, which a replay could not undo: use one "
            "of Trainer(precision=...)"
        )
    if any(isinstance(callback, names.batch_size_finder) for callback in trainer.callbacks):
        raise UnsupportedError(
            "BatchSizeFinder waits for an out-of-memory error, and there will be none: leave it "
            "out and give the batch you want"
        )
    # with manual optimization training_step is not cut: it gives the runtime what it has fetched
    trained = ("training_step",) if module.automatic_optimization else ()
    for name in (*trained, *EVALUATIONS):
        step = getattr(module, name)  # None says that there is none
        if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
            raise UnsupportedError(
                f"{name}(dataloader_iter) fetches its batches itself, so they cannot be cut: "
                f"write {name}(batch, batch_idx)"
            )
