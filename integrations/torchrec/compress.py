"""Replacing TorchRec's unsharded collections of a model by packed ones, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)

from bitslab import RowCodec
from bitslab.embedding import EvictionStrategy, TablesReport, give_back, live_optimizers, take_over
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.torchrec.collection import (
    DTYPES,
    CompressedEmbeddingBagCollection,
    CompressedEmbeddingCollection,
)
from bitslab.module_tensors import own_parameters, replace_modules
from bitslab.tables import Layout

Predicate = Callable[[str, torch.nn.Module], bool]
Packed = CompressedEmbeddingBagCollection | CompressedEmbeddingCollection
OURS = (CompressedEmbeddingBagCollection, CompressedEmbeddingCollection)
INTERFACES = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)


@dataclass
class CollectionsReport(TablesReport):
    """What `compress_tables` did.

    Parameters
    ----------
    compressed : dict of str to dict
        For each table that is packed now, by its name in the model: its sizes.
    left : dict of str to str
        For each collection that was left alone, by its name in the model: why.
    model : torch.nn.Module
        The model; another object than before only if that was a collection itself.
    """

    model: torch.nn.Module = field(default_factory=torch.nn.Module)


def compress_tables(
    model: torch.nn.Module,
    *,
    cache_ratio: float = 0.01,
    min_rows: int = 25_000,
    predicate: Predicate | None = None,
    device: torch.device | str | None = None,
    codec: str | RowCodec = "auto",
    layout: Layout = "compact",
    cache: Literal["rows", "packed"] = "rows",
    evict: EvictionStrategy = EvictionStrategy.LFU,
) -> CollectionsReport:
    """Replace TorchRec's collections in a model by packed ones.

    Unsharded `EmbeddingBagCollection` and `EmbeddingCollection` modules are replaced whole: weights
    are kept, and tables that require no gradient remain frozen.

    Optimizers of `torch.optim` that were made before hold the resident rows afterwards, in the
    place of the weights and with the state that they have, if they have all tables that lie
    together in one group of parameters and have taken as many steps of each. Others, such as
    TorchRec's keyed ones, are made afterwards: the step of one that was made before raises, where
    it would train nothing.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is changed; it may be a collection itself.
    cache_ratio : float
        Share of the rows that are resident on the device.
    min_rows : int
        Tables with fewer rows are resident whole; a collection of none but such is left alone.
    predicate : function, optional
        Called with name and module of each collection; those that it returns False for are left
        alone.
    device : torch.device or str, optional
        Where lookups happen; where the tables are, when left out.
    codec, layout, cache, evict
        As for `CompressedEmbeddingBagCollection`.

    Returns
    -------
    CollectionsReport
        What was done and what was left alone and why, and the model.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted, or the model holds sharded modules: those take
        `CompressedEmbeddingBagCollectionSharder`. Nothing was changed then.

    Examples
    --------
    >>> import torch
    >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    >>> from bitslab.integrations.torchrec import compress_tables
    >>> tables = [EmbeddingBagConfig(name="t", num_embeddings=30_000, embedding_dim=16)]
    >>> model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables))
    >>> report = compress_tables(model)
    >>> list(report.compressed), type(model[0]).__name__
    (['0.embedding_bags.t'], 'CompressedEmbeddingBagCollection')
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(min_rows, bool) or not isinstance(min_rows, int) or min_rows < 0:
        raise ArgumentError(f"min_rows: {min_rows!r:.60}, expected an int from 0 on")
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            raise ArgumentError(
                f"model: {name or 'it'} is sharded ({type(module).__name__}); pass "
                "CompressedEmbeddingBagCollectionSharder to DistributedModelParallel instead"
            )
    uses = Counter(
        id(p) for m in model.modules() for p in own_parameters(m).values() if p is not None
    )
    report = CollectionsReport(model=model)
    made: dict[int, Packed] = {}
    try:
        for name, module in model.named_modules():
            if not isinstance(module, INTERFACES):
                continue
            why = _why_left(module, min_rows, uses)
            if not why and predicate is not None and not predicate(name, module):
                why = "the predicate says so"
            if why:
                report.left[name or "the model"] = why
                continue
            collection = _packed(
                module,
                device=device,
                cache_ratio=cache_ratio,
                min_rows=min_rows,
                codec=codec,
                layout=layout,
                cache=cache,
                evict=evict,
            )
            made[id(module)] = collection
            for table, facts in collection.stats()["tables"].items():
                report.compressed[".".join(filter(None, (name, collection.key, table)))] = facts
    except BaseException:
        for collection in made.values():
            collection.close()
        raise
    optimizers = live_optimizers() if made else []
    for key, module in {id(m): m for m in model.modules() if id(m) in made}.items():
        weights = _weights(module)
        for group in made[key].groups:
            take_over([weights[i] for i in group.tables], group.rows, optimizers)
    report.model = replace_modules(model, made)
    return report


def restore_tables(model: torch.nn.Module) -> torch.nn.Module:
    """Replace packed collections by TorchRec's.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is changed; it may be a collection itself.

    Returns
    -------
    torch.nn.Module
        The model; another object than before only if that was a collection itself. Weights are as
        training left them, on the device where lookups happened. Gradients that no step has
        applied are lost. Optimizers of `torch.optim` hold the weights afterwards, with the state of
        all rows; others must be made again.

    Raises
    ------
    ArgumentTypeError
        When it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    packed = [module for module in model.modules() if isinstance(module, OURS)]
    made = {id(module): _plain(module) for module in packed}
    restored = replace_modules(model, made)
    optimizers = live_optimizers() if packed else []
    for module in packed:
        weights = _weights(made[id(module)])
        for group in module.groups:
            give_back(group.rows, [weights[i] for i in group.tables], optimizers)
        module.close()
    return restored


def _bags(module: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield TorchRec's modules for single tables by name."""
    owner = "embedding_bags" if isinstance(module, EmbeddingBagCollection) else "embeddings"
    yield from getattr(module, owner).items()


def _weights(module: Any) -> list[torch.nn.Parameter]:
    """Return the weights of TorchRec's collection, table by table."""
    weights: list[Any] = [bag.weight for _, bag in _bags(module)]
    return weights


def _why_left(module: Any, min_rows: int, uses: Counter[int]) -> str:
    """Return why a collection is left alone, or an empty text."""
    if isinstance(module, OURS):
        return "is packed already"
    if type(module) not in (EmbeddingBagCollection, EmbeddingCollection):
        return f"is a {type(module).__name__}, which is not known"
    if any(getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks")):
        return "has hooks"
    most, pooled = 0, isinstance(module, EmbeddingBagCollection)
    weighted = pooled and module.is_weighted()
    for config in module.embedding_bag_configs() if pooled else module.embedding_configs():
        if config.use_virtual_table:
            return f"table {config.name!r} is virtual"
        if weighted and config.pooling is not PoolingType.SUM:
            return f"table {config.name!r} averages, which weights cannot"
        most = max(most, config.num_embeddings)
    for name, bag in _bags(module):
        weight = bag.weight
        assert isinstance(weight, torch.Tensor)
        if weight.is_meta:
            return f"table {name!r} is on the meta device"
        if weight.dtype not in DTYPES:
            return f"table {name!r} is {weight.dtype}"
        if weight.grad is not None:
            return (
                f"table {name!r} has a gradient; apply it and clear it with "
                "zero_grad(set_to_none=True)"
            )
        if uses[id(weight)] > 1:
            return f"table {name!r} shares its weight with another module"
        if hasattr(weight, "_in_backward_optimizers"):
            return f"table {name!r} has an optimizer in backward; apply it after packing"
    if not most:
        return "has no rows"
    if most < min_rows:
        return f"no table has {min_rows} rows"
    return ""


def _packed(module: Any, device: torch.device | str | None, **options: Any) -> Packed:
    """Return a packed collection with the weights of TorchRec's."""
    weights = {name: bag.weight for name, bag in _bags(module)}
    options |= {
        "weights": weights,
        "freeze": {name: not weight.requires_grad for name, weight in weights.items()},
        "device": next(iter(weights.values())).device if device is None else device,
    }
    made: Packed
    if isinstance(module, EmbeddingBagCollection):
        made = CompressedEmbeddingBagCollection(
            module.embedding_bag_configs(), module.is_weighted(), **options
        )
    else:
        made = CompressedEmbeddingCollection(
            module.embedding_configs(), need_indices=module.need_indices(), **options
        )
    made.train(module.training)
    return made


def _plain(module: Packed) -> torch.nn.Module:
    """Return TorchRec's collection with the weights of a packed one."""
    meta = torch.device("meta")
    made: Any
    if isinstance(module, CompressedEmbeddingBagCollection):
        configs = module.embedding_bag_configs()
        made = EmbeddingBagCollection(configs, module.is_weighted(), meta)
    else:
        configs = module.embedding_configs()
        made = EmbeddingCollection(configs, meta, module.need_indices())
    for i, (_, bag) in enumerate(_bags(made)):
        weight = module.decoded(i).to(module.device)
        bag.weight = torch.nn.Parameter(weight, requires_grad=module.specs[i].trainable)
    made._device = module.device  # the device that TorchRec's module was made with
    restored: torch.nn.Module = made.train(module.training)
    return restored
