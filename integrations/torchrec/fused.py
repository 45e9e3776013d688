"""Optimizers that a sharded kernel applies in backward, as FBGEMM's kernels do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.fused import FusedOptimizer

from bitslab.embedding import at_end_of_backward
from bitslab.errors import ArgumentError
from bitslab.integrations.torchrec.tables import TableSet

#: The learning rate and the eps that FBGEMM takes by default.
LEARNING_RATE = 0.01
EPS = 1e-8

#: Turns the state of all rows of a table's shard into what a checkpoint holds.
AsShard = Callable[[int, torch.Tensor], Any]


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum for each row: of the mean of the squares of its gradient.

    A row without gradient is left unchanged, and so is its sum.

    Parameters
    ----------
    params : iterable
        Parameters ``[N, D]``.
    lr, eps : float
        As for `torch.optim.Adagrad`.
    """

    def __init__(self, params: Any, lr: float = LEARNING_RATE, eps: float = EPS) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros(
                    parameter.shape[0], dtype=torch.float32, device=parameter.device
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = parameter.grad.float()
                total = self.state[parameter]["sum"]
                norms = torch.linalg.vector_norm(grad, dim=1)  # with no squares in memory
                total.addcmul_(norms, norms, value=1 / max(grad.shape[1], 1))
                scale = total.sqrt().add_(group["eps"])[:, None]
                if parameter.dtype is grad.dtype:
                    parameter.addcdiv_(grad, scale, value=-float(group["lr"]))
                else:
                    parameter -= (grad / scale).mul_(float(group["lr"])).to(parameter.dtype)


def wants_fused(fused_params: Mapping[str, Any]) -> bool:
    """Return whether parameters of a kernel name an optimizer that it is to apply itself."""
    return bool({"optimizer", "learning_rate"} & fused_params.keys())


def make_optimizer(
    parameters: list[torch.nn.Parameter], fused_params: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer that FBGEMM's parameters describe.

    Parameters
    ----------
    parameters : list of torch.nn.Parameter
        What it moves.
    fused_params : mapping
        ``optimizer``, an EmbOptimType, EXACT_SGD when left out; ``learning_rate``, ``eps``.

    Raises
    ------
    ArgumentError
        When the optimizer is another one, or has weight decay or momentum.
    """
    kind = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    lr = float(fused_params.get("learning_rate", LEARNING_RATE))
    eps = float(fused_params.get("eps", EPS))
    for name in ("weight_decay", "momentum", "max_gradient"):
        if fused_params.get(name):
            raise ArgumentError(f"fused_params: {name}={fused_params[name]!r} is not supported")
    if kind in (EmbOptimType.SGD, EmbOptimType.EXACT_SGD):
        return torch.optim.SGD(parameters, lr=lr)
    if kind is EmbOptimType.EXACT_ADAGRAD:
        return torch.optim.Adagrad(parameters, lr=lr, eps=eps)
    if kind in (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ROWWISE_ADAGRAD):
        return RowWiseAdagrad(parameters, lr=lr, eps=eps)
    raise ArgumentError(
        f"fused_params: optimizer {kind!r}; packed tables train with EXACT_SGD, EXACT_ADAGRAD and "
        "EXACT_ROWWISE_ADAGRAD"
    )


class KernelOptimizer(FusedOptimizer):  # type: ignore[misc]
    """What TorchRec sees of the optimizer of a kernel.

    Its state dict has the keys of FBGEMM's: ``<table>.momentum1`` for Adagrad's sums.

    Parameters
    ----------
    tables : TableSet
        The kernel's tables.
    fused_params : mapping
        As for `make_optimizer`.
    as_shard : function
        Called with the number of a table and ``[n_rows, ...]``.
    """

    def __init__(
        self, tables: TableSet, fused_params: Mapping[str, Any], as_shard: AsShard
    ) -> None:
        self._tables = tables
        self._as_shard = as_shard
        parameters = [group.rows.parameter for group in tables.groups]
        self._inner = make_optimizer(parameters, fused_params)
        tables.attach_optimizer(self._inner, row_wise=isinstance(self._inner, RowWiseAdagrad))
        # TorchRec expects a parameter for each table; a group's parameter holds several tables.
        self._handles = [torch.nn.Parameter(torch.empty(0)) for _ in tables.specs]
        self._taken: dict[torch.nn.Parameter, dict[str, Any]] = {}
        names = [f"{spec.name}.weight" for spec in tables.specs]
        group = {"params": list(self._handles), "lr": self._inner.param_groups[0]["lr"]}
        super().__init__(dict(zip(names, self._handles, strict=True)), {}, [group])

    @property
    def state(self) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """The state of each table's shard, as it is now."""
        self._taken = {handle: {} for handle in self._handles}
        # In the order of the ids: rows that are not resident included.
        states = self._inner.state_dict()["state"]
        for number, group in enumerate(self._tables.groups):
            if "sum" not in states.get(number, {}):
                continue
            for i in group.tables:
                rows = states[number]["sum"][self._tables.rows_of(i)]
                self._taken[self._handles[i]][self._name_of(i)] = self._as_shard(i, rows)
        return self._taken

    @state.setter
    def state(self, value: object) -> None:
        """Do nothing: the state is the inner optimizer's."""

    def post_load_state_dict(self) -> None:
        """Install what was loaded into the state dict that was made last."""
        held = self._inner.state_dict()
        for number, group in enumerate(self._tables.groups):
            for i in group.tables:
                shard = self._taken[self._handles[i]].get(self._name_of(i))
                for local in [] if shard is None else shard.local_shards():
                    held["state"][number]["sum"][self._tables.rows_of(i)] = local.tensor
        self._inner.load_state_dict(held)

    def _name_of(self, table: int) -> str:
        return f"{self._tables.specs[table].name}.momentum1"

    def step_after_backward(self, grad: torch.Tensor) -> None:
        """Take a step when the backward pass that is under way ends; a hook of a tensor."""
        # Gradients of rows that bypassed the cache are added to the parameter's by a callback at
        # the end of the pass too, queued during the pass: the step comes after it.
        at_end_of_backward(lambda: at_end_of_backward(self._step))

    def _step(self) -> None:
        for group in self._inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)

    def step(self, closure: Any = None) -> None:
        """Do nothing: steps are taken in backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: gradients are used up in backward."""
