"""DistDGL: rows pulled from other machines cross the network packed.

A server packs the rows of each pull on request, directly from DGL's own tensor. It keeps no packed
copy, because the copy would become stale: trainers on the server's machine write to that tensor
through shared memory, without a message to the server.

A client requests packed rows by the name of the tensor: a `str` that pickles as "this tensor,
packed by that codec". So a server's handler still answers all other requests as before: sampler
processes, trainers without compression, and DGL's own pull in C++. The reply pickles as a call of
the function that unpacks it, so DGL at the receiver gets the tensor that it expects.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from dgl import utils
from dgl.distributed import DistTensor, dist_context, kvstore

from bitslab.dtypes import dtype_from_name, dtype_name, flat_bytes
from bitslab.engine.codecs import PackedRows, RawCodec, RowCodec, elements, row_codec_class
from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.tables import MIN_SAMPLE_ROWS, SAMPLE_BYTES, choose_codec

#: Version of handlers and replies; a process that reads another version does not pack.
WIRE_VERSION = 1
#: Number of replies after which the measured time of packing decides.
MEASURED_REPLIES = 8

Handler = Callable[[Mapping[str, torch.Tensor], str, torch.Tensor], torch.Tensor]
WireTensor = tuple[str, tuple[int, ...], "np.ndarray[Any, Any]"]  # dtype, shape, bytes


def compress_pulls(
    store: Any,
    name: str | None = None,
    *,
    codec: str | RowCodec = "auto",
    link_gb_per_s: float | None = None,
    **options: Any,
) -> CompressedPulls:
    """Send the rows of a distributed tensor over the network packed from now on.

    Every client of the same role must call this, in the same order, as DGL demands of
    `register_pull_handler`. Bitslab must be installed where the servers run. Rows on the client's
    own machine are read through shared memory, as before.

    Parameters
    ----------
    store : dgl.distributed.DistTensor or KVClient
        The tensor, such as ``graph.ndata["feat"]``; or the client of the store.
    name : str, optional
        Name of the tensor in the store, with a client only.
    codec : str or RowCodec
        As in `CompressedTable.from_tensor`; it is fitted on up to 8 MiB of rows, which every client
        pulls from all over the tensor. Where packing would not make them smaller, nothing changes.
    link_gb_per_s : float, optional
        Rate of the network in 1e9 bytes a second. When the first pulls show that packing takes
        longer than a network of that rate needs for the bytes saved, this client goes back to raw
        rows, and ``notes`` in `stats` says so. When left out, packed rows are always requested.
    **options
        For the codec's `fit`.

    Returns
    -------
    CompressedPulls
        Its `stats` counts bytes, its `detach` restores the store.

    Raises
    ------
    ArgumentTypeError
        When `store` or `codec` is of another type.
    ArgumentError
        When the store has no tensor of that name, its pulls are compressed already, or the rate
        is not above 0.

    Notes
    -----
    Packing takes time at the server, unpacking at the client. ``stats()["gains_below_gb_per_s"]``
    is the rate of a network below which that pays: on two cores, 0.5 for sparse rows packed to a
    sixtieth, 0.03 for normally distributed ones. DGL itself joins and orders rows more slowly for a
    tensor with a handler that is not its own, which that figure leaves out.

    All dtypes are restored bit for bit. The next pull after a push returns the new rows.

    In a training script, in every trainer::

        pulls = compress_pulls(graph.ndata["feat"])
        rows = graph.ndata["feat"][ids]
        print(pulls.stats()["ratio"])
    """
    client, key = _client_and_name(store, name)
    if link_gb_per_s is not None and not (
        isinstance(link_gb_per_s, (int, float)) and link_gb_per_s > 0
    ):
        raise ArgumentError(f"link_gb_per_s: {link_gb_per_s!r:.60}, accepted are rates above 0")
    if not isinstance(key, str) or key not in client.data_name_list():
        known = ", ".join(sorted(client.data_name_list())) or "none"
        raise ArgumentError(f"name: no tensor {key!r} in the store; there are {known}")
    override = vars(client).get("pull")
    if isinstance(override, _Pull) and key in override.pulls:
        raise ArgumentError(f"name: pulls of {key!r} are compressed already; detach() them first")
    sample = _sample(client, key)
    fitted = choose_codec(sample, codec, client.get_data_meta(key)[1][0], options)
    return CompressedPulls(client, key, fitted, link_gb_per_s)


class CompressedPulls:
    """Pulls of one tensor by one client, compressed; made by `compress_pulls`.

    Attributes
    ----------
    name : str
        Name of the tensor in the store.
    codec : RowCodec
        Codec of its rows.
    form_id : str
        Name of its packed form in requests.

    Notes
    -----
    For one thread, as DGL's clients are.
    """

    def __init__(
        self, client: Any, name: str, codec: RowCodec, link_gb_per_s: float | None = None
    ) -> None:
        self.name = name
        self.codec = codec
        self._client = client
        self._link_gb_per_s = link_gb_per_s
        self._form = _Form(codec)
        self.form_id = _form_id(name, codec)
        self._standalone = isinstance(client, kvstore.SA_KVClient)
        self._handler: PackingHandler | None = None
        self._notes: list[str] = []
        self._attach()

    def _attach(self) -> None:
        client, name = self._client, self.name
        if self._standalone:
            self._notes.append("standalone: this client has no servers, no row crosses a network")
        else:
            inner = _handlers_of(client)[name]
            handler = PackingHandler(inner, self.form_id, self.codec)
            _forms[self.form_id] = self._form
            # Even where packing saves nothing, because it is a barrier: other clients wait in it.
            client.register_pull_handler(name, handler)
            if self.codec.keeps_raw:
                self._notes.append("raw: packing would not make these rows smaller")
                _handlers_of(client)[name] = inner
            self._handler = handler
        override = vars(client).get("pull")
        if not isinstance(override, _Pull):
            override = client.pull = _Pull(client)
        override.pulls[name] = self

    def detach(self) -> None:
        """Restore DGL's handler, here and on the servers; a second call does nothing.

        Every client of the role must call it, as `compress_pulls`.
        """
        override = vars(self._client).get("pull")
        if not isinstance(override, _Pull) or override.pulls.get(self.name) is not self:
            return
        del override.pulls[self.name]
        if not override.pulls:
            override.remove()
        if self._handler is None:
            return
        # A deleted tensor has no handlers any more, and stopped servers need none.
        if dist_context.is_initialized() and self.name in self._client.data_name_list():
            self._client.register_pull_handler(self.name, self._handler.inner)
        _forms.pop(self.form_id, None)

    def stats(self) -> dict[str, Any]:
        """Return counts of the rows received from other machines since `compress_pulls`.

        Returns
        -------
        dict
            ``rows``, ``raw_bytes`` (of those rows), ``moved_bytes`` (that crossed the network for
            them), ``ratio`` of the two (1 before the first pull), ``replies`` and ``raw_replies``
            (whose rows packing would not have made smaller), ``pack_seconds`` (at the servers) and
            ``unpack_seconds`` (here), ``gains_below_gb_per_s`` (rate of a link, in 1e9 bytes a
            second, below which packed rows are faster than raw ones; 0 where no byte was saved),
            ``codec`` and ``notes``.
        """
        form = self._form
        return {
            "rows": form.rows,
            "raw_bytes": form.raw_bytes,
            "moved_bytes": form.moved_bytes,
            "ratio": form.raw_bytes / form.moved_bytes if form.moved_bytes else 1.0,
            "replies": form.replies,
            "raw_replies": form.raw_replies,
            "pack_seconds": form.pack_seconds,
            "unpack_seconds": form.unpack_seconds,
            "gains_below_gb_per_s": form.gains_below_gb_per_s,
            "codec": self.codec.describe(),
            "notes": list(self._notes),
        }

    def __repr__(self) -> str:
        """Return name and codec of the tensor as text."""
        return f"<CompressedPulls of {self.name!r}, {self.codec.describe()}>"

    def wants_packed(self) -> bool:
        """Return whether to request packed rows."""
        handler = self._handler
        if handler is None or self.codec.keeps_raw:
            return False
        # Another handler: the tensor was deleted, and its name may belong to another one now.
        handlers = _handlers_of(self._client)
        if handlers.get(self.name) is not handler:
            return False
        gain = self._form.gains_below_gb_per_s
        if self._link_gb_per_s is None or self._form.replies < MEASURED_REPLIES:
            return True
        if gain >= self._link_gb_per_s:
            return True
        self._notes.append(
            f"raw: packing gains below {gain:.3g} GB/s, the network has {self._link_gb_per_s:.3g}"
        )
        # DGL pulls faster with its own handler, and servers answer its requests with raw rows.
        handlers[self.name] = handler.inner
        return False


# What a client does


def _handlers_of(client: Any) -> Any:
    """Return a client's own handlers of pulls by tensor, a dict which may be changed."""
    return client._pull_handlers


class _Pull:
    """Replaces a client's `pull` and requests packed rows for the compressed tensors."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.pulls: dict[str, CompressedPulls] = {}
        self._before = vars(client).get("pull")  # an override by other code

    def __call__(self, name: str, id_tensor: Any) -> torch.Tensor:
        client = self.client
        pulls = self.pulls.get(name)
        if pulls is not None and pulls.wants_packed():
            id_tensor = utils.toindex(id_tensor).tousertensor()
            if not id_tensor.shape[0]:
                # With a handler that is not its own, DGL would join no replies and fail.
                handler = _handlers_of(client)[name]
                rows: torch.Tensor = handler(client.data_store, name, id_tensor)
                return rows
            name = _WantedName(name, pulls.form_id)
        if self._before is not None:
            pulled: torch.Tensor = self._before(name, id_tensor)
        else:
            pulled = type(client).pull(client, name, id_tensor)
        return pulled

    def remove(self) -> None:
        if self._before is not None:
            self.client.pull = self._before
        elif vars(self.client).get("pull") is self:
            del self.client.pull


class _WantedName(str):
    """A tensor's name at a client that requests packed rows; it unpickles as an _AskedName.

    There are two classes because a client's handler gets this name too, for the rows on its own
    machine, which are not packed.
    """

    form_id: str

    def __new__(cls, name: str, form_id: str) -> _WantedName:
        made = super().__new__(cls, name)
        made.form_id = form_id
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _AskedName, (str(self), self.form_id)


class _AskedName(_WantedName):
    """A tensor's name at the server, in a request for packed rows."""


def _client_and_name(store: Any, name: str | None) -> tuple[Any, Any]:
    if isinstance(store, DistTensor):
        if name is not None:
            raise ArgumentTypeError(
                f"name: {name!r:.60} together with a DistTensor, which has its own"
            )
        return store.kvstore, store.kvstore_key
    if not isinstance(store, (kvstore.KVClient, kvstore.SA_KVClient)):
        raise ArgumentTypeError(
            f"store: expected a DistTensor or a KVClient of DGL, got {type(store).__name__}"
        )
    return store, name


def _sample(client: Any, name: str) -> torch.Tensor:
    """Pull rows from all over a tensor; every client gets the same."""
    n_rows = client.get_data_meta(name)[1][0]
    if not n_rows:
        # DGL's pull of no rows fails; the local part has none either, and the right shape.
        rows: torch.Tensor = client.data_store[name]
        return rows
    first = client.pull(name, torch.zeros(1, dtype=torch.int64))
    wanted = min(n_rows, max(MIN_SAMPLE_ROWS, SAMPLE_BYTES // max(1, first.nbytes)))
    ids = torch.arange(wanted, dtype=torch.int64) * n_rows // wanted
    sample: torch.Tensor = client.pull(name, ids)
    return sample


# What a server does


class PackingHandler:
    """A pull handler that packs rows on request, and answers all other requests as before.

    Parameters
    ----------
    inner : callable
        The handler that returns the rows, usually DGL's own.
    form_id : str
        Identifies the codec in requests and replies.
    codec : RowCodec
        Packs the rows.
    """

    def __init__(self, inner: Handler, form_id: str, codec: RowCodec) -> None:
        self.inner = inner
        self._form_id = form_id
        self._codec = codec

    def __call__(
        self, data_store: Mapping[str, torch.Tensor], name: str, ids: torch.Tensor
    ) -> torch.Tensor | _Reply:
        """Return the rows ``[n, ...]`` of local `ids` ``[n]``, packed if requested."""
        rows = self.inner(data_store, str(name), ids)
        if not isinstance(name, _AskedName):
            return rows
        form = _forms.get(name.form_id)
        if form is None or not form.takes(rows):
            return rows
        return _packed(name.form_id, form.codec, rows)

    def __eq__(self, other: object) -> bool:
        """Compare by the inner handler: for ordinary requests this handler acts like it.

        When a new client maps the shared data, backup servers require that their handler equals
        the client's, which is DGL's own.
        """
        plain = other.inner if isinstance(other, PackingHandler) else other
        return bool(self.inner == plain)

    def __hash__(self) -> int:
        return hash(self.inner)

    def __getstate__(self) -> tuple[Any, ...]:
        return WIRE_VERSION, self.inner, self._form_id, self._codec.name, self._codec.to_config()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, self.inner = state[:2]
        if version != WIRE_VERSION:
            return
        self._form_id, codec_name, config = state[2:]
        self._codec = row_codec_class(codec_name).from_config(config)
        # Clients that fitted their codec before and after a push have different codecs: keep all.
        _forms.setdefault(self._form_id, _Form(self._codec))


class _Reply:
    """Packed rows as a reply, which pickles as a call of `_unpacked`."""

    def __init__(self, form_id: str, packed: PackedRows, seconds: float) -> None:
        self._form_id = form_id
        self._packed = packed
        self._seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        parts = {name: _bytes_of(part) for name, part in self._packed.parts.items()}
        return _unpacked, (WIRE_VERSION, self._form_id, self._packed.n_rows, parts, self._seconds)


def _packed(form_id: str, codec: RowCodec, rows: torch.Tensor) -> _Reply:
    began = time.perf_counter()
    packed = codec.encode(rows)
    if packed.nbytes >= rows.nbytes:
        packed = PackedRows(rows.shape[0], {"rows": rows.contiguous()})
    return _Reply(form_id, packed, time.perf_counter() - began)


# Used by both


class _Form:
    """A codec known to client and server, and the client's counts of rows packed by it."""

    def __init__(self, codec: RowCodec) -> None:
        self.codec = codec
        self.rows = self.raw_bytes = self.moved_bytes = self.replies = self.raw_replies = 0
        self.pack_seconds = self.unpack_seconds = 0.0
        # Compiles or loads the kernels, so that the first pull does not wait for them.
        one = codec.encode(torch.zeros((1, *codec.row_shape), dtype=codec.dtype))
        codec.decode(codec.adopt(1, one.parts))

    @property
    def gains_below_gb_per_s(self) -> float:
        """Bytes saved over the time spent, in 1e9 bytes a second; 0 where no byte was saved."""
        saved = self.raw_bytes - self.moved_bytes
        return saved / (self.pack_seconds + self.unpack_seconds) / 1e9 if saved > 0 else 0.0

    def takes(self, rows: torch.Tensor) -> bool:
        """Return whether the codec fits these rows: the name may belong to another tensor now."""
        return rows.dtype == self.codec.dtype and tuple(rows.shape[1:]) == self.codec.row_shape


#: Packed forms by id, in clients and servers.
_forms: dict[str, _Form] = {}


def _form_id(name: str, codec: RowCodec) -> str:
    config = json.dumps([codec.name, codec.to_config()], sort_keys=True)
    return f"{name}/{hashlib.sha256(config.encode()).hexdigest()[:16]}"


def _unpacked(
    version: int, form_id: str, n_rows: int, parts: Mapping[str, WireTensor], pack_seconds: float
) -> torch.Tensor:
    """Unpack a reply; pickle calls it at the receiver."""
    form = _forms.get(form_id)
    if form is None or version != WIRE_VERSION:
        raise BitslabError(
            f"a server sent rows packed as {form_id!r}, version {version}, which this client "
            f"(version {WIRE_VERSION}) did not ask for"
        )
    began = time.perf_counter()
    tensors = {name: _tensor_of(*part) for name, part in parts.items()}
    raw = set(tensors) == {"rows"}
    codec = RawCodec(form.codec.row_shape, form.codec.dtype) if raw else form.codec
    packed = codec.adopt(n_rows, tensors)
    rows = tensors["rows"] if raw else codec.decode(packed)
    form.replies += 1
    form.raw_replies += raw
    form.rows += n_rows
    form.raw_bytes += rows.nbytes
    form.moved_bytes += packed.nbytes
    form.pack_seconds += pack_seconds
    form.unpack_seconds += time.perf_counter() - began
    return rows


def _bytes_of(t: torch.Tensor) -> WireTensor:
    # NumPy pickles a copy of the bytes; torch pickles an archive, which is slow.
    flat = flat_bytes(t)
    return dtype_name(t.dtype), tuple(t.shape), flat.numpy()


def _tensor_of(dtype: str, shape: tuple[int, ...], data: np.ndarray[Any, Any]) -> torch.Tensor:
    if not elements(shape):
        return torch.empty(shape, dtype=dtype_from_name(dtype))
    return torch.from_numpy(data).view(dtype_from_name(dtype)).view(shape)
