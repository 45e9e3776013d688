"""Replacing nn.Embedding and nn.EmbeddingBag of a model by cached embeddings, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bitslab import RowCodec
from bitslab.embedding import (
    CachedRows,
    CacheKind,
    CacheOptions,
    EvictionStrategy,
    TablesReport,
    give_back,
    live_optimizers,
    rows_for_ratio,
    take_over,
)
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.embedding.bag import CachedEmbeddingBag
from bitslab.integrations.embedding.single import CachedEmbedding
from bitslab.integrations.embedding.table import TableModule, notes_on_ratio
from bitslab.module_tensors import own_buffers, own_children, own_parameters, replace_modules
from bitslab.tables import Layout

#: Called with a module's name and the module.
Predicate = Callable[[str, torch.nn.Module], bool]
#: A module and its name in the model.
Named = tuple[str, torch.nn.Module]

_PLAIN = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: What wraps a model and keeps its parameters elsewhere.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DistributedModelParallel")
#: The hooks of a module: the same objects go to its stand-in, so that their handles still work.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def compress_embeddings(
    model: torch.nn.Module,
    *,
    cache_ratio: float = 0.01,
    min_rows: int = 25_000,
    predicate: Predicate | None = None,
    freeze: bool | None = None,
    device: torch.device | str | None = None,
    warmup_ratio: float = 0.7,
    buffer_size: int = 0,
    pin_weight: bool = True,
    evict_strategy: EvictionStrategy = EvictionStrategy.LFU,
    codec: str | RowCodec = "auto",
    layout: Layout = "compact",
    cache: CacheKind = "rows",
) -> TablesReport:
    """Replace `nn.Embedding` and `nn.EmbeddingBag` in a model by cached embeddings.

    Values, training mode, options, hooks and ties are kept: a module with several names remains one
    module, and modules that share a weight share their rows. One table is packed at a time, and its
    plain weight freed before the next.

    Optimizers of `torch.optim` that were made before hold the resident rows afterwards, in the
    place of the weights and with the state that they have, and train on if they are of a kind that
    cached rows take. Others, such as those of classes of one's own, are made afterwards: the step
    of one that was made before raises, where it would train nothing.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is changed.
    cache_ratio : float
        Share of the rows of each table that is resident on the device.
    min_rows : int
        Tables with fewer rows are left alone.
    predicate : function, optional
        Called with name and module of each table that could be packed; those that it returns False
        for are left alone.
    freeze : bool, optional
        For inference. Tables whose weight requires no gradient are frozen when left out; with False
        they can be unfrozen later.
    device : torch.device or str, optional
        Where lookups happen; where each weight is, when left out.
    warmup_ratio, buffer_size, pin_weight, evict_strategy, codec, layout, cache
        As in `CachedEmbeddingBag`.

    Returns
    -------
    TablesReport
        What was packed, what was left alone and why; ``print`` shows a table.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted, or the model is itself an embedding, or is wrapped for
        several processes. The model is what it was then.

    Examples
    --------
    >>> import torch
    >>> from bitslab.integrations.embedding import compress_embeddings
    >>> model = torch.nn.Sequential(torch.nn.Embedding(30_000, 16), torch.nn.Linear(16, 1))
    >>> report = compress_embeddings(model)
    >>> list(report.compressed), type(model[0]).__name__
    (['0'], 'CachedEmbedding')
    """
    _check(model, cache_ratio, min_rows, predicate)
    report = TablesReport()
    groups = _groups(model, min_rows, predicate, report)
    options = CacheOptions(
        cache_ratio=cache_ratio,
        cache=cache,
        evict=evict_strategy,
        warmup_ratio=warmup_ratio,
        buffer_rows=buffer_size,
        codec=codec,
        layout=layout,
        pin=pin_weight,
    )
    optimizers = live_optimizers()
    made: list[TableModule] = []
    try:
        # Packed modules are dropped from the list, so that their weights are freed.
        while groups:
            group = groups.pop(0)
            new = _replace_group(model, group, freeze, device, options, report)
            made += new
            take_over([_weight_of(group.pop()[1])], new[0].rows, optimizers)
    except BaseException:
        _restore(model, made)
        raise
    return report


def restore_embeddings(model: torch.nn.Module) -> torch.nn.Module:
    """Replace cached embeddings in a model by plain modules.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is changed.

    Returns
    -------
    torch.nn.Module
        The same object. Weights are as training left them, on the device where lookups happened;
        modules that shared rows share a weight. Gradients that no step has applied are lost.
        Optimizers of `torch.optim` hold the weights afterwards, with the state of all rows; others
        must be made again.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When it is no module, or itself a cached embedding, which `to_module` turns back.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, TableModule):
        raise ArgumentError(
            f"model: is itself a {type(model).__name__}, which cannot be replaced in place; use "
            "what its to_module() returns"
        )
    _restore(model, [module for module in model.modules() if isinstance(module, TableModule)])
    return model


def _check(
    model: torch.nn.Module, cache_ratio: float, min_rows: int, predicate: Predicate | None
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(min_rows, bool) or not isinstance(min_rows, int) or min_rows < 0:
        raise ArgumentError(f"min_rows: {min_rows!r:.60}, accepted are whole numbers from 0")
    if predicate is not None and not callable(predicate):
        raise ArgumentTypeError(f"predicate: expected a function, got {predicate!r:.60}")
    rows_for_ratio(1, cache_ratio)
    if type(model) in _PLAIN:
        name = type(model).__name__
        raise ArgumentError(
            f"model: is itself an nn.{name}, which cannot be replaced in place; use "
            f"Cached{name}.from_module(model)"
        )
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds.intersection(_WRAPPERS):
            raise ArgumentError(
                f"model: {name or 'it'} is a {type(module).__name__}, which keeps track of the "
                "parameters it was made with; compress the model before it is wrapped"
            )


# What is replaced


def _groups(
    model: torch.nn.Module, min_rows: int, predicate: Predicate | None, report: TablesReport
) -> list[list[Named]]:
    """Return the modules to replace, grouped by weight; add the others to the report."""
    users: dict[int, list[Named]] = {}
    for name, module in model.named_modules():
        for parameter in own_parameters(module).values():
            if parameter is not None:
                users.setdefault(_memory_of(parameter), []).append((name, module))
        for buffer in own_buffers(module).values():
            if buffer is not None:
                users.setdefault(_memory_of(buffer), []).append((name, module))
    hidden = _hidden(model)
    why: dict[int, str] = {}
    names: dict[int, str] = {}
    groups: dict[int, list[Named]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (*_PLAIN, TableModule)):
            continue
        names[id(module)] = name
        reason = _why_left(module, min_rows) or hidden.get(id(module), "")
        if not reason and predicate is not None and not predicate(name, module):
            reason = "the predicate says so"
        if reason:
            why[id(module)] = reason
        else:
            groups.setdefault(id(_weight_of(module)), []).append((name, module))
    by_themselves = dict(why)
    for key, group in list(groups.items()):
        memory = _memory_of(_weight_of(group[0][1]))
        mine = {id(module) for _, module in group}
        others = [(n, m) for n, m in users[memory] if id(m) not in mine]
        if others:
            name, other = others[0]
            reason = f"shares its weight with {name or 'the model'} ({type(other).__name__})"
            if id(other) in by_themselves:
                reason += f", which is left alone: {by_themselves[id(other)]}"
            why |= dict.fromkeys(mine, reason)
            del groups[key]
    report.left |= {names[key]: reason for key, reason in why.items()}
    return list(groups.values())


def _memory_of(t: torch.Tensor) -> int:
    """Return a key that is equal for tensors that share memory."""
    try:
        return t.untyped_storage().data_ptr() or id(t)
    except (RuntimeError, NotImplementedError):  # sparse ones, and what is not on a device yet
        return id(t)


def _why_left(module: torch.nn.Module, min_rows: int) -> str:
    """Return why a module is left alone for what it is, or an empty text."""
    kind = type(module)
    if isinstance(module, TableModule):
        return "is compressed already"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "is parametrized"
    if kind not in _PLAIN:
        return f"is a {kind.__name__}, a class of its own"
    parameters = own_parameters(module)
    weight = parameters.get("weight")
    more = len(parameters) > 1 or own_buffers(module) or own_children(module)
    if weight is None or more:
        return "has more to it than a weight, such as weight_norm or pruning add"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if weight.is_meta:
        return "is on the meta device"
    if type(weight) is not torch.nn.Parameter or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of layout {weight.layout}"
    if weight.device.type not in ("cpu", "cuda"):
        return f"is on {weight.device}"
    if weight.dtype not in _DTYPES:
        return f"holds {weight.dtype}"
    if weight.shape[0] < max(1, min_rows):
        return f"has {weight.shape[0]} rows, fewer than min_rows={min_rows}"
    if not weight.shape[1]:
        return "has empty rows"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "its weight has hooks"
    if weight.grad is not None:
        return "its weight has a gradient; apply it and clear it with zero_grad(set_to_none=True)"
    if weight.device.type == "cpu" and torch.Tensor.is_shared(weight):  # type: ignore[no-untyped-call]
        return "its weight lies in memory that processes share"
    return ""


def _hidden(model: torch.nn.Module) -> dict[int, str]:
    """Return why modules are left alone that a non-module attribute, such as a list, holds."""
    found = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_modules":
                continue
            for held in _held(value):
                where = f"{name}.{attribute}" if name else attribute
                found[id(held)] = f"is also held by {where}, where it would not be replaced"
    return found


def _held(value: Any) -> Iterator[torch.nn.Module]:
    if isinstance(value, dict):
        value = list(value.values())
    some = value if isinstance(value, (list, tuple, set)) else [value]
    yield from (item for item in some if isinstance(item, _PLAIN))


# Replacing


def _replace_group(
    model: torch.nn.Module,
    group: list[Named],
    freeze: bool | None,
    device: torch.device | str | None,
    options: CacheOptions,
    report: TablesReport,
) -> list[TableModule]:
    """Pack the weight of modules that share it, and replace them by cached modules."""
    weight = _weight_of(group[0][1])
    pads: dict[Any, None] = dict.fromkeys(
        m.padding_idx for _, m in group if m.padding_idx is not None
    )
    rows = options.pack(
        weight,
        len(weight),
        device=weight.device if device is None else device,
        trainable=not (not weight.requires_grad if freeze is None else freeze),
        pinned_ids=list(pads),
    )
    if rows.trainable:
        rows.parameter.requires_grad_(weight.requires_grad)
    made: list[TableModule] = []
    for _, old in group:
        if isinstance(old, torch.nn.Embedding):
            made.append(CachedEmbedding.from_module(old, rows=rows))
        else:
            assert isinstance(old, torch.nn.EmbeddingBag)
            made.append(CachedEmbeddingBag.from_module(old, rows=rows))
    made[0].notes += notes_on_ratio(len(weight), options.cache_ratio)
    replace_modules(model, {id(old): new for (_, old), new in zip(group, made, strict=True)})
    first = group[0][0]
    for (name, old), new in zip(group, made, strict=True):
        _pass_hooks(old, new)
        report.compressed[name] = new.stats() | ({} if name == first else {"same_rows_as": first})
    return made


def _weight_of(module: torch.nn.Module) -> torch.nn.Parameter:
    weight = module.weight
    assert isinstance(weight, torch.nn.Parameter)
    return weight


def _pass_hooks(old: torch.nn.Module, new: torch.nn.Module) -> None:
    for name in _HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]


def _restore(model: torch.nn.Module, modules: list[TableModule]) -> None:
    """Replace cached modules by plain ones, table by table; empties the list."""
    modules.sort(key=lambda module: id(module.rows))
    weight: torch.nn.Parameter | None = None
    before: CachedRows | None = None
    optimizers = live_optimizers() if modules else []
    while modules:
        old = modules.pop(0)
        assert isinstance(old, (CachedEmbedding, CachedEmbeddingBag))
        shared = weight if old.rows is before else None
        new = old.to_module(weight=shared)
        replace_modules(model, {id(old): new})
        _pass_hooks(old, new)
        if shared is None:
            give_back(old.rows, [_weight_of(new)], optimizers)
        before, weight = old.rows, _weight_of(new)
