"""`OffloadCallback`: activations of a `Trainer`'s model are planned, moved and computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from bitslab.activations import ActivationOffload, ActivationReport, offload_activations
from bitslab.errors import ArgumentError, BitslabError

#: What layers of transformers have that may be checkpointed: whether they are.
FLAG = "gradient_checkpointing"


class OffloadCallback(TrainerCallback):
    """Offloads the activations of a model while a `Trainer` trains it.

    Weights and losses are those of training without it, bit for bit. Micro-batches of gradient
    accumulation are distinguished by the trainer's events, and evaluation is left alone.

    Parameters
    ----------
    memory : int, str or float, optional
        The peak that the process may have on the device: bytes, text as "60GiB", or a share.
    slowdown : float, optional
        With no limit, the share of a step that saving memory may cost. With `memory` or `slowdown`
        a step is planned; with neither, tensors are moved as `bitslab.offload_activations` does.
    gradient_checkpointing : {"plan", "leave"}
        What becomes of the trainer's own gradient checkpointing. "plan": where a plan may compute
        layers again, it is turned off for the training, and the plan says which layers are; so is
        ``config.use_cache``, whose caches layers would fill twice. "leave": both are left alone.
        `report` says which it was.
    **options
        As for `bitslab.offload_activations`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For options that `bitslab.ActivationOffload` refuses, when training begins; for another
        `gradient_checkpointing` at once.

    Examples
    --------
    ::

        offload = OffloadCallback(memory="60GiB")
        Trainer(model, args, train_dataset=data, callbacks=[offload]).train()
        print(offload.report())
    """

    def __init__(
        self,
        *,
        memory: int | str | float | None = None,
        slowdown: float | None = None,
        gradient_checkpointing: str = "plan",
        **options: Any,
    ) -> None:
        if gradient_checkpointing not in ("plan", "leave"):
            raise ArgumentError(
                f"gradient_checkpointing: {gradient_checkpointing!r:.60}, accepted are 'plan' and "
                "'leave'"
            )
        self._plans = memory is not None or slowdown is not None
        self._options = {"memory": memory, "slowdown": slowdown, **options}
        self._takes_over = (
            gradient_checkpointing == "plan" and self._plans and options.get("recompute", True)
        )
        self._offload: ActivationOffload | None = None
        self._report: ActivationReport | None = None
        self._model: PreTrainedModel | None = None
        self._note = ""
        #: What is given back when training ends.
        self._use_cache: bool | None = None
        self._checkpointing: list[Any] = []
        self._micro_batch = 0

    @property
    def offload(self) -> ActivationOffload | None:
        """What is attached to the model while it is trained."""
        return self._offload

    def report(self) -> ActivationReport:
        """Return what is done with each tensor and why; of the last training, when it is over.

        Raises
        ------
        BitslabError
            Before any training.
        """
        if self._offload is not None:
            report = self._offload.report()
            self._report = replace(report, notes=[self._note, *report.notes])
        if self._report is None:
            raise BitslabError("OffloadCallback: no training has begun yet")
        return self._report

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Attach to the model."""
        self.detach()  # of a training that was interrupted
        model = kwargs["model"]
        self._choose_checkpointing(model)
        self._micro_batch = 0
        try:
            self._offload = offload_activations(model, **self._options)
        except BaseException:
            self._give_back()
            raise

    def _choose_checkpointing(self, model: Any) -> None:
        # As transformers sets it on its layers; the names of what does so have changed.
        on = [module for module in model.modules() if getattr(module, FLAG, False)]
        self._model = model
        if not self._takes_over:
            self._note = f"Gradient checkpointing is left alone: it is {'on' if on else 'off'}."
            return
        self._note = "Gradient checkpointing is chosen by the plan, layer by layer."
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", None):
            self._use_cache = True
            config.use_cache = False  # type: ignore[union-attr]
        self._checkpointing = on
        for module in on:
            setattr(module, FLAG, False)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begin with the first micro-batch."""
        self._begin_micro_batch(0)

    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Go on to the next micro-batch."""
        self._begin_micro_batch(self._micro_batch + 1)

    def _begin_micro_batch(self, number: int) -> None:
        self._micro_batch = number
        if self._offload is not None:
            self._offload.micro_batch(number)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Take everything off the model."""
        self.detach()

    def detach(self) -> None:
        """Take everything off the model, as the end of training does. Again: nothing."""
        if self._offload is not None:
            self.report()
            self._offload.micro_batch(None)
            self._offload.detach()
            self._offload = None
        self._give_back()

    def _give_back(self) -> None:
        model, self._model = self._model, None
        if model is None:
            return
        if self._use_cache is not None:
            model.config.use_cache = self._use_cache
            self._use_cache = None
        for module in self._checkpointing:
            setattr(module, FLAG, True)
        self._checkpointing = []
