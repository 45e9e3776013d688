"""Compressing what the sharded collections of a model send to other ranks, and undoing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_use_sync_collectives
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist
from torchrec.distributed.types import ShardedModule

from bitslab.distributed import AdaptiveBound, CompressedAllToAll, ErrorBound, Table
from bitslab.engine.codecs import VectorLzCodec
from bitslab.errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from bitslab.integrations.torchrec.output_dists import (
    Bound,
    CompressedAllToAllDist,
    CompressedDist,
    CompressedReduceScatterDist,
    CompressedSequenceDist,
    Message,
    messages_of,
)
from bitslab.integrations.torchrec.row_ids import Column, columns_of

#: TorchRec's output dists and what takes their place.
REPLACED: dict[type, type[CompressedDist]] = {
    TwPooledEmbeddingDist: CompressedAllToAllDist,
    RwPooledEmbeddingDist: CompressedReduceScatterDist,
    TwSequenceEmbeddingDist: CompressedSequenceDist,
    RwSequenceEmbeddingDist: CompressedSequenceDist,
}
#: Those that are left, and why.
LEFT: dict[type, str] = {
    DpPooledEmbeddingDist: "every rank has the tables: no rows are sent",
    DpSequenceEmbeddingDist: "every rank has the tables: no rows are sent",
    TwRwPooledEmbeddingDist: "sums within a host come before the exchange",
    GridPooledEmbeddingDist: "sums within a host come before the exchange",
}
COLLECTIONS = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


@dataclass
class CommunicationReport:
    """What `compress_communication` did; ``print`` shows it.

    Parameters
    ----------
    compressed : dict of str to dict
        For each sharding of a collection whose messages are compressed, by the collection's name in
        the model and the sharding's: ``tables``, ``error_bound`` (a text, or None) and
        ``backward``.
    left : dict of str to str
        For each that was left alone, and each other sharded module: why.
    """

    compressed: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    exchanges: dict[str, CompressedAllToAll] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Return a line for each sharding."""
        lines = [
            f"{name}: {', '.join(facts['tables'])}; "
            f"{'every bit' if facts['error_bound'] is None else facts['error_bound']} forward, "
            f"{facts['backward']} backward"
            for name, facts in self.compressed.items()
        ]
        if self.left:
            lines += ["left alone:", *(f"  {name}: {why}" for name, why in self.left.items())]
        return "\n".join(lines) or "no sharded collections"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return {
            "compressed": {name: dict(facts) for name, facts in self.compressed.items()},
            "left": dict(self.left),
        }

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return what `CompressedAllToAll.stats` does for each sharding."""
        return {name: exchange.stats() for name, exchange in self.exchanges.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return by what a resumed run goes on with its bounds, on this rank."""
        return {name: exchange.state_dict() for name, exchange in self.exchanges.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises
        ------
        CorruptedDataError
            When the state is damaged, or of other tables or another plan.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.exchanges):
            raise CorruptedDataError(
                f"state: of {_names(state)}, expected that of {_names(self.exchanges)}"
            )
        before = self.state_dict()
        try:
            for name, exchange in self.exchanges.items():
                exchange.load_state_dict(state[name])
        except CorruptedDataError:
            for name, exchange in self.exchanges.items():
                exchange.load_state_dict(before[name])
            raise


def compress_communication(
    model: torch.nn.Module,
    error_bound: Bound | Mapping[str, Bound] = None,
    backward: str | float | ErrorBound = "lossless",
    *,
    row_ids: bool = True,
    error_feedback: int = 0,
    codec: str = "auto",
) -> CommunicationReport:
    """Compress what the sharded collections of a model send to other ranks, both ways.

    The output dists of `ShardedEmbeddingBagCollection` and `ShardedEmbeddingCollection` modules are
    replaced: table-wise, column-wise and row-wise, with and without pooling, with unequal batches
    and with batches that differ by feature. All ranks call it, with the same arguments, between two
    steps. A row that repeats for a rank crosses once, and so does the sum of its gradients where
    its bags have exactly one id and no weight; what reaches a row of a table is then the same but
    for the order of additions. Row-wise sums of bags are made by the receiving rank. Exchanges are
    under way from an output dist's call to its awaitable's ``wait()``, and back from there on to
    what was looked up; ranks wait for the outputs of several collections in one order.

    Parameters
    ----------
    model : torch.nn.Module
        A `DistributedModelParallel`, or another module with sharded collections.
    error_bound : float, ErrorBound, AdaptiveBound, "adaptive" or mapping, optional
        How far a delivered element may be from the one that was looked up, as for
        `bitslab.distributed.CompressedAllToAll`, for each table; every bit is kept when left out. A
        mapping gives one to each table that it names. Row-wise, each of W ranks gets 1 / W of the
        bound of bags, so that the sum keeps it. Of sequences on a GPU the host waits for their
        lengths where there is a bound.
    backward : "lossless", float or ErrorBound
        Of gradients; within a bound they are rounded stochastically.
    row_ids : bool
        Whether gradients of copies of a row go back as their sum. Without, each goes back by
        itself, and training is that of the plain exchange bit for bit (row-wise, of two ranks).
        Of tables on a GPU they are found there, and the host does not wait for them.
    error_feedback : int
        Rows of each table of which a rank keeps what rounding took from their gradients, to add it
        the next time, where bags have exactly one id and no weight; those that were met longest ago
        go first. The ids then cross with the rows; of tables on a GPU not while torch's own
        collective brings gradients back. 0: none. Only with a bound of gradients.
    codec : str
        ``"auto"``: what takes less time as measured, which is a plain exchange on a fast link;
        ``"compressed"`` or ``"raw"``: always so.

    Returns
    -------
    CommunicationReport
        What is compressed, what is left and why, and the counters.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted; when the model has no sharded collection, a registry of
        QuantizedCommCodecs, or is compiled; or when TorchRec's synchronous collectives are on.
        Nothing was changed then.

    Examples
    --------
    >>> import torch
    >>> from bitslab.integrations.torchrec import compress_communication
    >>> compress_communication(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    bitslab.errors.ArgumentError: model: has no sharded collection; give a DistributedModelParallel
    """
    options: dict[str, Any] = {
        "backward": backward,
        "codec": codec,
        "error_feedback": error_feedback,
    }
    CompressedAllToAll(**options)  # what is not accepted is refused here
    if not isinstance(row_ids, bool):
        raise ArgumentTypeError(f"row_ids: expected a bool, got {row_ids!r:.60}")
    modules = dict(_sharded(model))
    if not modules:
        raise ArgumentError("model: has no sharded collection; give a DistributedModelParallel")
    _refuse_other_ways(model, modules)
    bound_of = _bounds(error_bound, modules)
    report = CommunicationReport()
    made: list[tuple[Any, int, CompressedDist]] = []
    for name, module in modules.items():
        for place, (kind, sharding) in enumerate(_shardings(module)):
            key = f"{name}.{kind}" if name else kind
            plain = _dists(module)[place]
            why = _why_left(module, plain, sharding)
            if why:
                report.left[key] = why
                continue
            compressed = _compressed(plain, sharding, bound_of, row_ids=row_ids, **options)
            made.append((module, place, compressed))
            tables = dict.fromkeys(c.table for part in compressed.columns for c in part)
            bounds = {str(bound) for t in tables if (bound := bound_of(t)) is not None}
            report.compressed[key] = {
                "tables": list(tables),
                "error_bound": ", ".join(sorted(bounds)) or None,
                "backward": str(backward),
            }
            report.exchanges[key] = compressed.exchange
    for name, other in _inner(model).named_modules():
        if isinstance(other, ShardedModule) and not isinstance(other, COLLECTIONS):
            report.left[name] = f"is a {type(other).__name__}, which is not known"
    try:
        for module, place, compressed in made:
            _dists(module)[place] = compressed
            if row_ids or error_feedback:
                compressed.watch(module._lookups[place])
    except BaseException:  # an interrupt, say: no rank goes on with a part of them
        for module, place, compressed in made:
            compressed.unwatch()
            _dists(module)[place] = compressed.plain
        raise
    return report


def restore_communication(model: torch.nn.Module) -> list[str]:
    """Give the sharded collections of a model TorchRec's output dists back.

    All ranks call it, between two steps.

    Parameters
    ----------
    model : torch.nn.Module
        As for `compress_communication`.

    Returns
    -------
    list of str
        The collections that had others, by name.

    Raises
    ------
    ArgumentTypeError
        When it is no module.
    """
    restored = []
    for name, module in _sharded(model):
        dists = _dists(module)
        for place, found in enumerate(dists):
            if isinstance(found, CompressedDist):
                found.unwatch()
                dists[place] = found.plain
                restored.append(name)
    return list(dict.fromkeys(restored))


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """Return what was given to DistributedModelParallel, whose names have no wrappers."""
    return model.module if isinstance(model, DistributedModelParallel) else model


def _sharded(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the sharded collections of a model by name."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in _inner(model).named_modules():
        if isinstance(module, COLLECTIONS):
            yield name, module


def _dists(module: Any) -> list[torch.nn.Module]:
    """Return the output dists of a collection: its own list, which may be changed."""
    dists: list[torch.nn.Module] = module._output_dists
    return dists


def _shardings(module: Any) -> list[tuple[str, Any]]:
    """Return the shardings of a collection by type, as its output dists are."""
    if isinstance(module, ShardedEmbeddingBagCollection):
        return list(zip(module._sharding_types, module._embedding_shardings, strict=True))
    return list(module._sharding_type_to_sharding.items())


def _refuse_other_ways(model: torch.nn.Module, modules: Mapping[str, Any]) -> None:
    """Refuse a model whose rows cross in a way that cannot be compressed."""
    if get_use_sync_collectives():
        raise ArgumentError(
            "model: TorchRec's synchronous collectives are on, which a compressed exchange cannot "
            "replace; call set_use_sync_collectives(False) first"
        )
    for name, module in modules.items():
        if any((module.qcomm_codecs_registry or {}).values()):
            raise ArgumentError(
                f"model: {name or 'it'} has a registry of QuantizedCommCodecs, which cannot carry "
                "messages of sizes that differ; make its sharder without qcomm_codecs_registry and "
                "give an error_bound instead"
            )
    sharded = {id(module) for module in modules.values()}
    for name, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled and any(id(part) in sharded for part in module.modules()):
            raise ArgumentError(
                f"model: {name or 'it'} is compiled together with a sharded collection, and a "
                "graph knows no sizes of compressed messages; compile the dense part alone"
            )


def _bounds(
    given: Bound | Mapping[str, Bound], modules: Mapping[str, Any]
) -> Callable[[str], Bound]:
    """Return the bound of a table by name."""
    tables = {
        column.table
        for module in modules.values()
        for _, sharding in _shardings(module)
        if hasattr(sharding, "_grouped_embedding_configs_per_rank")
        for part in columns_of(sharding)
        for column in part
    }
    bounds = dict(given) if isinstance(given, Mapping) else dict.fromkeys(tables, given)
    for name in bounds:
        if name not in tables:
            raise ArgumentError(f"error_bound: no table {name!r:.60}; there are {_names(tables)}")
    for bound in {id(bound): bound for bound in bounds.values()}.values():
        Table("bound", 1, error_bound=bound)  # what is no bound is refused here
    return bounds.get


def _why_left(module: Any, plain: Any, sharding: Any) -> str:
    """Return why the output dist of a sharding is left alone, or an empty text."""
    if isinstance(plain, CompressedDist):
        return "is compressed already; call restore_communication first"
    if type(plain) not in REPLACED:
        return LEFT.get(
            type(plain), f"its output dist is a {type(plain).__name__}, not a known one"
        )
    if _group(sharding).size() == 1:
        return "there is one rank: no rows are sent"
    device = getattr(module._device, "type", "cpu")
    if device not in VectorLzCodec.device_types:
        accepted = " and ".join(VectorLzCodec.device_types)
        return f"its rows are on {device}; they are compressed on {accepted}"
    return ""


def _compressed(
    plain: Any,
    sharding: Any,
    bound_of: Callable[[str], Bound],
    **options: Any,
) -> CompressedDist:
    """Return what takes the place of an output dist."""
    group, columns = _group(sharding), columns_of(sharding)
    kind = REPLACED[type(plain)]
    if kind is CompressedSequenceDist and all(
        bound_of(column.table) is None for part in columns for column in part
    ):
        messages = [_one_message(columns)]
    else:
        ranks = group.size() if kind is CompressedReduceScatterDist else 1
        messages = messages_of(columns, lambda table: _share(bound_of(table), ranks))
    return kind(plain, group, columns, messages, **options)


def _group(sharding: Any) -> dist.ProcessGroup:
    """Return the ranks of a sharding."""
    group: dist.ProcessGroup = sharding._pg
    return group


def _one_message(columns: list[list[Column]]) -> Message:
    """Return the message of a sequence sharding, whose rows are all as wide."""
    first = next(column for part in columns for column in part)
    table = Table("rows", first.dim, first.dtype)
    return Message(table, [list(range(len(part))) for part in columns])


def _share(bound: Bound, ranks: int) -> Bound:
    """Return what each of so many parts of a sum may be off by."""
    if bound == "adaptive":
        bound = AdaptiveBound()
    if isinstance(bound, (ErrorBound, AdaptiveBound)):
        return replace(bound, value=bound.value / ranks)
    return bound / ranks if isinstance(bound, (int, float)) else bound


def _names(given: Any) -> str:
    names = sorted(map(str, given)) if isinstance(given, (Mapping, set)) else [repr(given)]
    return f"{', '.join(names):.200}"
