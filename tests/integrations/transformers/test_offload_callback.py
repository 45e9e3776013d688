"""`OffloadCallback`: a `Trainer` trains alike, and everything is given back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.activations import planned as planned_module
from bitslab.engine.advisor.planning import CHECKPOINT, Correction, Plan, StepProfile
from bitslab.errors import ArgumentError, BitslabError
from tests.activations.test_planned import follow, plan_of
from tests.quick_measuring import measure_quickly

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure_quickly(monkeypatch, tmp_path)
    monkeypatch.setattr(
        planned_module, "compare", lambda *_, **__: Correction("holds", "The plan holds.")
    )


def made() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, intermediate_size=176, num_hidden_layers=3,
        vocab_size=100,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trained(model: Any, folder: Path, *callbacks: Any, resume: bool = False, **options: Any) -> Any:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 100, (48,), generator=draw) for _ in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3, report_to=[],
        use_cpu=True, logging_steps=1, disable_tqdm=True, seed=7,
        **{"save_strategy": "no", **options},
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def is_on(model: Any) -> bool:
    return any(getattr(each, "gradient_checkpointing", False) for each in model.modules())


def losses(trainer: Any) -> list[float]:
    history = trainer.state.log_history
    return [row[key] for row in history for key in ("loss", "eval_loss") if key in row]


def callback(**options: Any) -> Any:
    from bitslab.integrations.transformers import OffloadCallback

    return OffloadCallback(min_bytes=4096, **options)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("options", [{"memory": 600_000}, {"slowdown": 0.5}, {"policy": "raw"}])
def test_a_trainer_trains_alike(options: dict[str, Any], tmp_path: Path) -> None:
    plain, planned = made(), made()
    expected = losses(trained(plain, tmp_path))
    offloading = callback(**options)
    assert losses(trained(planned, tmp_path, offloading)) == expected
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(a, b)
    report = offloading.report()
    assert sum(site.tensors for site in report.sites) > 0
    assert offloading.offload is None
    assert not any("forward" in module.__dict__ for module in planned.modules())
    assert planned.config.use_cache == plain.config.use_cache


class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Ends the training behind a step, as a machine that is taken away does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step == self.step
        return control


@pytest.mark.drawn(1)
@pytest.mark.parametrize("options", [{"memory": 600_000}, {"policy": "raw"}])
def test_a_training_that_is_stopped_and_resumed_trains_alike(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """In other objects, as in another process: with a plan of its own."""
    plain, first, second = made(), made(), made()
    expected = losses(trained(plain, tmp_path / "plain"))
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    folder = tmp_path / "planned"
    stopped = trained(first, folder, callback(**options), Stop(4), **saving)
    assert losses(stopped) == expected[: len(losses(stopped))]
    offloading = callback(**options)
    resumed = trained(second, folder, offloading, resume=True, **saving)
    assert resumed.state.global_step == STEPS
    assert losses(resumed) == expected
    for a, b in zip(plain.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert sum(site.tensors for site in offloading.report().sites) > 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize("which", ["plan", "leave"])
def test_gradient_checkpointing_is_planned_or_left_alone(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(profile: StepProfile) -> Plan:
        return plan_of(profile, {s.site: CHECKPOINT for s in profile.sites if s.module})

    plans = follow(monkeypatch, choose)
    plain, planned = made(), made()
    names = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    new = "activation_checkpointing"  # before, it was the other name
    on = {new if new in names else "gradient_checkpointing": True}
    expected = losses(trained(plain, tmp_path, **on))
    offloading = callback(slowdown=0.1, gradient_checkpointing=which)
    seen: list[bool] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
            seen.append(is_on(kwargs["model"]))

    assert losses(trained(planned, tmp_path, offloading, Watch(), **on)) == expected
    left = which == "leave"
    assert seen == [left] * STEPS
    assert is_on(planned)
    note = offloading.report().notes[0]
    if left:
        assert note == "Gradient checkpointing is left alone: it is on."
    else:
        assert note == "Gradient checkpointing is chosen by the plan, layer by layer."
        assert len(plans[0].modules) == 3


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="gradient_checkpointing: 'on', accepted are"):
        callback(gradient_checkpointing="on")
    with pytest.raises(BitslabError, match="no training has begun yet"):
        callback().report()
