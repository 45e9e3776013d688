"""CacheState: what cached rows consist of, for the modules that work on it.

`CachedRows` is one with the public methods. The modules of lookups, steps and the rest take a
`CacheState`, and know of each other what the protocols here say. Who owns what: the parameter has
the rows in slots; `slot_table` says which these are, and `device_slots` while ids come on a GPU
(`owned_by_device`); `row_store` has all rows; `training` the gradients that wait, and the
optimizers with their state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..tables.build import rows_per_batch
from ..tables.table import CompressedTable
from .arguments import CacheKind
from .device_slots import DeviceSlots, DeviceUses
from .gradients import Array, BackwardPass, PinnedLookup
from .resident_bags import ResidentBags
from .resident_cache import MissRate, ResidentCache
from .row_exchange import RowExchange
from .row_state import RowState
from .slots import SlotTable
from .statistics import Statistics
from .store import RowStore

State = dict[str, torch.Tensor]


@dataclass(slots=True)
class WantedSlots:
    """How many slots lookups on the device want; outlives `DeviceSlots`."""

    #: Slots that would have been enough so far.
    slots: int = 0
    #: Lookups to be done by the host before the next attempt to allocate.
    pause: int = 0


class Adapter(Protocol):
    """One optimizer's state of rows in slots; see `OptimizerAdapter`."""

    def states(self) -> State:
        """Return the tensors of the state that have a row for each slot."""
        ...

    def widened(self, more: int) -> State:
        """Return copies of the state with `more` slots appended."""
        ...

    def follow(self, states: State) -> None:
        """Use other tensors as the state."""
        ...

    def move(self, slots: torch.Tensor, to: torch.Tensor) -> None:
        """Copy state of rows to other slots."""
        ...


class OptimizerStates(Protocol):
    """The state of all optimizers; see `Adapters`."""

    def __iter__(self) -> Iterator[Adapter]:
        """Yield the adapter of each optimizer."""
        ...

    def of(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the `OptimizerAdapter` of an optimizer, or None."""
        ...

    def attach(self, optimizer: torch.optim.Optimizer, *, row_wise: bool = False) -> None:
        """Make an optimizer's state follow the rows."""
        ...

    def followed_states(self) -> list[tuple[torch.Tensor, RowState]] | None:
        """Return optimizer state of rows in slots, and that of all rows."""
        ...

    def save(self, slots: Array, ids: Array) -> None:
        """Save optimizer state of rows that leave their slots."""
        ...

    def restore(self, slots: Array, ids: Array) -> None:
        """Load optimizer state of rows that were put into slots."""
        ...

    def stores(self) -> list[dict[str, RowState]]:
        """Return the optimizers' state of all rows."""
        ...


class Gradients(Protocol):
    """Changes of the parameter's gradient; see `GradientWatch`."""

    def raise_known(self) -> None:
        """Raise if a GPU has reported a gradient that is refused."""
        ...

    def forget_origin(self) -> None:
        """Forget what stands for the parameter in graphs."""
        ...

    def follow(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """Treat a gradient as its predecessor."""
        ...

    def record_reuse(self, slots: Array) -> None:
        """Record that slots get other rows."""
        ...

    def record_reuse_from(self, number: int) -> None:
        """Record that a GPU gives slots to the rows of batch `number`."""
        ...

    def reuse_known(self, device_slots: DeviceSlots) -> None:
        """Read from the GPU which slots have got other rows."""
        ...

    def before_backward(
        self, grad: torch.Tensor | None = None, this: BackwardPass | None = None
    ) -> None:
        """Record whether others have changed the gradient."""
        ...

    def after_backward(self) -> None:
        """Record the gradient after a pass."""
        ...


class Ledger(Protocol):
    """Gradients that may come or wait for a step, and optimizers; see `Training`."""

    @property
    def adapters(self) -> OptimizerStates:
        """What makes the optimizers' state follow the rows."""
        ...

    @property
    def gradients(self) -> Gradients:
        """Changes of the gradient."""
        ...

    @property
    def live(self) -> list[PinnedLookup]:
        """The lookups whose graph is alive."""
        ...

    @property
    def idle(self) -> bool:
        """Whether no gradient is pending, and the parameter was not written to."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether a gradient is pending, or may still be computed."""
        ...

    @property
    def in_pass(self) -> bool:
        """Whether a backward pass is under way."""
        ...

    @property
    def pass_under_way(self) -> BackwardPass | None:
        """The backward pass that this code runs in."""
        ...

    @property
    def held(self) -> bool:
        """Whether a gradient waits for a step."""
        ...

    @property
    def step_may_come(self) -> bool:
        """Whether a step could change rows."""
        ...

    @property
    def oldest_kept(self) -> int | None:
        """The first batch on the device whose rows have to remain."""
        ...

    def hold(
        self,
        matrix: torch.Tensor,
        slots: Array,
        ids: Array,
        *,
        whole: bool,
        on_device: torch.Tensor | None = None,
        number: int = 0,
    ) -> torch.Tensor:
        """Return rows of a batch with a graph that reports their gradient."""
        ...

    def hold_result(self, on_device: torch.Tensor, number: int) -> PinnedLookup | None:
        """Pin slots of a batch, of which only what is computed from them reports the gradient."""
        ...

    def pin(self) -> None:
        """Set `pinned` of the slots whose rows may not leave."""
        ...

    def release(self) -> None:
        """Release all pending lookups."""
        ...

    def release_applied(self) -> None:
        """Release pending lookups whose gradients a step has applied."""
        ...

    def release_zeroed(self) -> bool:
        """Release slots whose gradient was set to zero."""
        ...

    def retire_steps(self) -> None:
        """Release lookups of finished steps, and make the host owner of the cache."""
        ...

    def sync_slots(self, held: Array, device_slots: DeviceSlots) -> None:
        """Read from the GPU which slots its lookups use."""
        ...

    def has_grown(self) -> None:
        """Look whether the parameter has rows beyond the cache, to be removed."""
        ...

    def moved(self) -> None:
        """Watch the parameter after it has become another object."""
        ...

    def before_step(self, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
        """Check an optimizer's options and the gradient, and align its state."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept the values of a step, and release its lookups."""
        ...


class Writes(Protocol):
    """Writes to the parameter that are no step's; see `ParameterWatch`."""

    @property
    def changed(self) -> bool:
        """Whether the parameter was written to, or has other memory."""
        ...

    def accept(self) -> None:
        """Accept the parameter as it is now."""
        ...

    def accept_step(self) -> None:
        """Accept what an optimizer's step has written."""
        ...

    def accept_loaded(self, begin: int, end: int) -> None:
        """Record that rows begin..end were loaded."""
        ...

    def check(self) -> None:
        """Refuse writes to the parameter outside of an optimizer's step."""
        ...

    def refuses(self) -> bool:
        """Return whether `check` refuses what was written; else accept it."""
        ...

    def set_data(self, data: torch.Tensor) -> None:
        """Give the parameter other memory."""
        ...


class CacheState:
    """Rows of a table, some of them in slots on a device; whoever works on it holds `lock`."""

    #: Guards everything here.
    lock: threading.RLock
    closed: bool
    device: torch.device
    #: ``[slots, D]`` on the device.
    parameter: torch.nn.Parameter
    #: Whether rows may change.
    trainable: bool
    #: Whether rows in slots lie raw in `parameter`, or packed in slabs of `row_store`.
    cache: CacheKind
    #: Rows that are always resident.
    pinned_ids: tuple[int, ...]
    #: The most rows that are fetched at once; 0 for no bound.
    buffer_rows: int
    row_store: RowStore
    slot_table: SlotTable
    statistics: Statistics
    watch: Writes
    training: Ledger
    #: While a GPU finds, evicts and fetches rows by itself: its slots, and what moves rows.
    device_slots: DeviceSlots | None
    exchange: RowExchange | None
    wanted_slots: WantedSlots
    #: Uses on a GPU of rows that are all resident.
    device_uses: DeviceUses | None
    #: For inference on a GPU: resident rows as its kernels read them, and the share that misses.
    resident_cache: ResidentCache | None
    miss_rate: MissRate
    #: For inference on a CPU, with whether all rows of the last plain lookup were resident.
    resident_bags: ResidentBags
    all_hit: bool
    # Kept by `numbers`.
    _numbers: torch.Tensor | None
    _first_numbers: torch.Tensor | None

    @property
    def table(self) -> CompressedTable:
        """The rows on the host; older than resident ones, and than others while a GPU owns them."""
        return self.row_store.table

    def __len__(self) -> int:
        """Return the number of rows of the table."""
        return len(self.table)

    @property
    def shape(self) -> torch.Size:
        """``[N, D]``."""
        return self.table.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.table.dtype

    @property
    def row_dim(self) -> int:
        """Elements of a row, D."""
        return int(self.table.shape[1])

    @property
    def cache_rows(self) -> int:
        """Rows that `parameter` holds between steps, those of `pinned_ids` included."""
        return self.slot_table.capacity_rows

    @property
    def all_resident(self) -> bool:
        """Whether every row is resident; then each lies in the slot of its own number."""
        return self.slot_table.capacity_rows == self.slot_table.n_rows

    @property
    def owned_by_device(self) -> bool:
        """Whether a GPU finds, evicts and fetches rows by itself."""
        return self.device_slots is not None

    def numbers(self, n: int) -> torch.Tensor:
        """Return int64 0 to n - 1 on the device, kept for the next time."""
        kept, first = self._numbers, self._first_numbers
        if kept is None or first is None or kept.shape[0] < n or kept.device != self.device:
            self._numbers = kept = first = torch.arange(max(n, 1024), device=self.device)
            if self.device.type == "cuda":
                # Other streams may read it.
                torch.cuda.current_stream(self.device).synchronize()
        if first.shape[0] != n:
            first = kept[:n]
        self._first_numbers = first
        return first

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield rows begin..end in pieces of bounded size: the first, and the last + 1."""
        step = rows_per_batch(self.table.row_bytes)
        for at in range(begin, end, step):
            yield at, min(at + step, end)
