"""The executor: it encodes copies, moves them to the host and brings them back, on one device.

On a GPU all is queued on streams, in the order in which each waits for the other, and the host
waits for nothing: a copy is encoded on one stream into a staging buffer, and written from there to
host memory on another one, by a kernel that reads the number of used bytes on the device. On the
CPU threads stand for the streams.

The original is given up when the bytes in flight are more than `in_flight_bytes`: the stream that
computes then waits until the oldest copy has been read, and its memory is used again in the order
of that stream, however far the host is ahead.

A copy that was encoded gets as much host memory as those of its site needed of late. Until it is
known to fit, what was staged of it remains on a GPU, and its original on a CPU, from which one that
does not fit is sent once more.

Copies that go on to a disk cross to host memory first, which is given up when they are written. On
the CPU a raw one is written from its original.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch

from ..engine.codecs.blob import BlobCodec, FlatCodec
from ..engine.kernels.cuda.runner import do_nothing
from ..engine.kernels.cuda.stream import current_stream
from ..engine.memory import HostPiece
from ..engine.memory.locks import call_after_fork, current_process
from ..engine.tasks import ThreadTask
from ..engine.transfer import Mark, StreamEvent, StreamLane, ThreadLane, record_on, wait_on_host
from .copies import StoredCopy
from .crossing import HostEncoder, bring, came_whole, send
from .host_packing import CodecOf, HostPacking, RawOnHost
from .host_room import HostMemory, HostRoom, Swaps
from .limits import STAGED_COPIES, usual_in_flight_bytes
from .moments import Moment, now
from .on_disk import DiskMoves
from .originals import Originals
from .staging import StagedBlob, Staging, release_in_order
from .stalls import StallTier
from .tiers import Tier, Tiers
from .traffic import Observed, SentBlob, Traffic, encode


class Executor:
    """Moves copies of one device.

    Parameters
    ----------
    device : torch.device
        The device.
    in_flight_bytes : int or None
        Bytes of originals that are kept at most while their copies are under way.
    came_back : callable
        As for `Traffic`.
    failed : callable
        Called with the name of a site and an error, when a thread could not encode or copy a tensor
        of it; the original is kept.
    observed : callable, optional
        As for `Traffic`.
    tiers : Tiers, optional
        Where copies may go; to host memory when left out.

    Attributes
    ----------
    traffic : Traffic
        What crossed.
    is_planned : bool
        Whether the bytes in flight are bounded by a plan.
    process : int
        This process.
    copies_by_address : bool
        Whether raw copies need no more than the address of their bytes.
    """

    def __init__(
        self,
        device: torch.device,
        in_flight_bytes: int | None,
        came_back: Callable[[str, int, int], None],
        failed: Callable[[str, BaseException], None],
        observed: Observed | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._waits_for_disk = in_flight_bytes is not None
        usual = usual_in_flight_bytes(device) if in_flight_bytes is None else in_flight_bytes
        self.in_flight_bytes = self._usual_in_flight_bytes = usual
        self._tiers = tiers or Tiers()
        self._inherited: dict[str, object] = {}
        self._chooses_tier = self._tiers.disk is not None or self._tiers.limit is not None
        self._came_back, self._failed, self._observed = came_back, failed, observed
        self._open_lanes()
        self.copies_by_address = self.on_gpu and self._tiers.disk is None
        self._begin()
        call_after_fork(self)

    def _open_lanes(self) -> None:
        self._encoding: StreamLane | ThreadLane
        self._out: StreamLane | ThreadLane
        self._in: StreamLane | ThreadLane
        if self.on_gpu:
            self._encoding, self._out, self._in = (StreamLane(self.device) for _ in range(3))
        else:
            # One thread for both: waking another one takes longer than copying most tensors.
            self._encoding = self._out = ThreadLane("bitslab-out")
            self._in = ThreadLane("bitslab-in")

    def _begin(self) -> None:
        self.process = current_process()
        self._lock = threading.RLock()
        self._stages = self.is_planned = False  # copies on a GPU, and the memory of each moment
        self.in_flight_bytes = self._usual_in_flight_bytes
        self._begin_event: StreamEvent | None = None  # see `_new_begin`
        self._host_encoder = HostEncoder()
        self._room = HostRoom(self.on_gpu, self._tiers.limit)
        self._packing: HostPacking | None = None
        self._swaps = Swaps(self.device)
        self.traffic = Traffic(self.device, self._came_back, self._observed)
        self._originals = Originals(self.device, self.traffic, self._failed, self._send_again)
        self._staging = Staging(self._originals.give_up, self._settle_staged, self.traffic)
        self._disk: DiskMoves | None = None
        if self._tiers.disk is not None:
            self._disk = DiskMoves(self._tiers.disk, self._room, self.traffic, self.on_gpu)

    def after_fork(self) -> None:
        """Begin anew in a forked child: locks, host memory and work under way are the parent's."""
        if self.on_gpu:  # a child must free no event and no page-locked memory
            self._inherited = dict(vars(self))
        self._begin()

    # Out

    def bound_in_flight(self, nbytes: int | None, *, now: bool = False) -> None:
        """Bound the bytes of originals from the next copy on, or `now`; None: as usual."""
        usual, self.is_planned = self._usual_in_flight_bytes, nbytes is not None
        self.in_flight_bytes = usual if nbytes is None else min(nbytes, usual)
        if now:
            with self._lock:
                self._release(self.in_flight_bytes)

    def store(
        self,
        copy: StoredCopy,
        codec: BlobCodec | None,
        sm_budget: int | None = None,
        codec_on_host: CodecOf | None = None,
        *,
        tier: Tier | None = None,
    ) -> bool:
        """Send a copy to the host, encoded or raw, and on to the disk.

        Return False for no room: nothing has changed, and the original is to be kept.

        Parameters
        ----------
        copy : StoredCopy
            With its original.
        codec : BlobCodec or None
            Encodes it; None for raw bytes.
        sm_budget : int, optional
            Multiprocessors that encoding takes at most, for it runs beside what computes.
        codec_on_host : callable, optional
            Returns what the CPU packs it with once it has crossed raw.
        tier : "host" or "disk", optional
            Where it is to go, if there is room; see `Tiers.place`.

        Raises
        ------
        HostMemoryError
            When there is no host memory; nothing has changed then.
        OutOfMemoryError
            When there is no device memory to encode it in; the original is to be kept.
        """
        flat = copy.original
        assert flat is not None
        on_gpu, encoded = self.on_gpu, codec is not None
        copy.process = self.process
        with self._lock:
            disk = None
            if self._chooses_tier:
                wanted: Tier | None = tier if codec_on_host is None else "host"
                place = self._tiers.place(copy.nbytes, wanted, on_gpu=on_gpu, encoded=encoded)
                if self._disk is not None and place != "disk":
                    self._disk.sites.discard(copy.name)
                if place is None:
                    return False
                disk = self._disk if place == "disk" else None
                if disk is not None and not on_gpu and not encoded:  # from where it is
                    if written := disk.write_original(copy):
                        self.traffic.sent_raw(copy.nbytes)
                        self._release(self.in_flight_bytes)
                    return written
            most = room = copy.nbytes
            swap = None
            if codec is not None:
                swap = self._swaps.of(codec, copy.elements, copy.dtype)
                most = swap.max_bytes
                room = self._host_room(copy, codec, most)
            host: HostMemory
            if disk is not None:
                host = disk.staging(room, copy.events)
            elif on_gpu and codec_on_host is None:
                host = self._room.cut_piece(room, copy.events)
            else:
                host = self._room.cut(room, copy.events)
            home = staged = begin = None
            if on_gpu:
                copy.home = home = current_stream(self.device)
                lane, out = self._encoding, self._out
                assert isinstance(lane, StreamLane) and isinstance(out, StreamLane)
                if encoded:
                    if self.is_planned:  # it counts from now on
                        left = self.in_flight_bytes - most
                        release_in_order(self._staging, self._originals, left, home)
                    self._stages = True
                    staged = StagedBlob(most, lane, out, home, self.process)
                # Behind what took the memory of `staged`, too: one event, recorded anew.
                begin = self._begin_event or self._new_begin(out)
                begin.record(home)
                # First: what fails below may have been launched in part.
                copy.lanes = (lane if encoded else out,)
            try:
                if swap is None:
                    done = self._store_raw(copy, flat, host, begin, codec_on_host)
                else:
                    done = self._store_encoded(copy, flat, host, staged, begin, swap, sm_budget)
            except BaseException:
                self._keep_host_memory(copy)
                raise
            if on_gpu:
                copy.events.append(copy.stored)  # type: ignore[arg-type]
            if disk is not None and codec is None:
                disk.write(copy, copy.stored, copy.nbytes)
            elif disk is not None:
                disk.write_when_sized(copy)
            if staged is not None:
                self._staging.add(copy, staged, room < most)
            elif room < most:
                assert copy.blob is not None
                self._originals.hold_until_sized(copy, copy.blob)
            else:
                self._originals.hold(copy, done)
            self._release(self.in_flight_bytes, home)
            return True

    def _new_begin(self, lane: StreamLane) -> StreamEvent:
        """Make the event behind what a stream was given; who records it waits for it at once."""
        self._begin_event = made = lane.event()
        return made

    def _keep_host_memory(self, copy: StoredCopy) -> None:
        if isinstance(self._out, StreamLane):  # maybe launched: to nobody before it is done
            copy.events.append(self._out.record())

    def _host_room(self, copy: StoredCopy, codec: BlobCodec, bound: int) -> int:
        """Return the host memory to reserve for a copy: what its site has needed of late.

        What is staged of it, or its original, remains until it is known to fit. On a GPU, where
        the host does not wait for that, these may be half of what is in flight, and others get all
        they may need, as all do in a pass whose device memory is planned.
        """
        if codec.error_bound is not None:  # read from its copy, which is thus to be whole
            return bound
        unsure_bytes = self._staging.unsure_bytes + copy.nbytes
        if self.on_gpu and (self.is_planned or unsure_bytes > self.in_flight_bytes // 2):
            return bound
        return self.traffic.sizes.room(copy.name, codec.name, copy.nbytes, bound)

    def _store_raw(
        self,
        copy: StoredCopy,
        flat: torch.Tensor,
        host: HostMemory,
        begin: StreamEvent | None,
        codec_on_host: CodecOf | None,
    ) -> Mark:
        """Send a copy as it is; return when its original has been read."""
        out = self._out
        stored: Mark
        if type(host) is HostPiece:
            assert not isinstance(out, ThreadLane)
            stored = out.copy(host.address, flat.data_ptr(), copy.nbytes, after=begin)
        else:
            stored = send(out, flat, host, copy.nbytes, begin)
        copy.stored = stored
        if codec_on_host is None:
            copy.host = host
        else:
            assert isinstance(host, torch.Tensor)
            raw = RawOnHost(host, stored, copy.elements, copy.dtype, codec_on_host)
            copy.on_host = raw
            if self._packing is None:
                self._packing = HostPacking(self.device)
            self._packing.pack(raw)
        self.traffic.sent_raw(copy.nbytes)
        return stored

    def _store_encoded(
        self,
        copy: StoredCopy,
        flat: torch.Tensor,
        host: HostMemory,
        staged: StagedBlob | None,
        begin: StreamEvent | None,
        swap: FlatCodec,
        sm_budget: int | None,
    ) -> Mark:
        """Send an encoded copy; return when its original has been read."""
        timing: list[Moment] | None = [] if self.traffic.is_due(decodes=False) else None
        codec = swap.codec
        done: Mark
        if staged is None:
            done = self._out.run(self._host_encoder.encode, swap, flat, host, timing)
            copy.stored = done
        else:
            data = staged.data
            if timing is None:
                done = staged.fill(swap.encode, flat, data, sm_budget, after=begin)
            else:
                done = staged.fill(encode, swap, flat, data, sm_budget, timing, after=begin)
            expected_bytes = self.traffic.sizes.expected(copy.name, codec.name, copy.nbytes)
            copy.stored = staged.send(host, expected_bytes)
        copy.encoded_by(codec, swap)
        blob = self._sent(copy, host, swap.max_bytes)
        if timing is not None:
            self.traffic.encoded(blob, timing)
        return done

    def _sent(self, copy: StoredCopy, host: HostMemory, bound: int) -> SentBlob:
        """Count an encoded copy that is on its way to `host`."""
        codec, stored, size = copy.codec, copy.stored, copy.dtype.itemsize
        assert codec is not None and stored is not None
        blob = SentBlob(copy.name, codec.name, copy.nbytes, size, self.device, bound, host, stored)
        copy.host, copy.blob = host, blob
        self.traffic.sent(blob)
        return blob

    def _release(self, allowed_bytes: int, current: torch.cuda.Stream | None = None) -> None:
        """Give up originals whose copies are done, or that are too many; go on with the disk."""
        traffic = self.traffic
        if traffic.unknown or traffic.timed:
            traffic.poll()
        raw_bytes = allowed_bytes
        if self._stages and self.is_planned:  # both count, and nothing beyond
            raw_bytes -= release_in_order(self._staging, self._originals, allowed_bytes, current)
        elif self._stages:
            self._staging.release(allowed_bytes, STAGED_COPIES, current)
        self._originals.release(raw_bytes, current)
        if self._disk is not None:
            self._disk.poll(allowed_bytes if self._waits_for_disk or self.is_planned else None)

    def _send_again(self, copy: StoredCopy) -> None:
        """Send a copy that was larger than its host memory to as much as it may need."""
        flat, codec = copy.original, copy.codec
        assert flat is not None and codec is not None
        swap = self._swaps.of(codec, copy.elements, copy.dtype)
        host = self._room.cut(swap.max_bytes, copy.events)
        self._originals.hold(copy, self._store_encoded(copy, flat, host, None, None, swap, None))

    def _settle_staged(self, copy: StoredCopy | None, blob: SentBlob, staged: StagedBlob) -> None:
        """Send a staged copy again that was larger than its host memory."""
        self.traffic.learn(blob)
        if copy is None or not blob.cut_off:
            return
        assert copy.codec is not None
        bound = staged.data.shape[0]
        try:
            host = self._room.cut(bound, copy.events)
            try:
                copy.stored = staged.send(host, 0)
            except BaseException:
                self._keep_host_memory(copy)
                raise
        except Exception as error:
            copy.staged = staged  # where it remains
            self._failed(copy.name, error)
            return
        copy.events.append(copy.stored)
        self._sent(copy, host, bound)
        self._staging.add(copy, staged, False)

    # And back

    def read_ahead(self, copy: StoredCopy) -> None:
        """Begin to read a copy of a GPU from the disk, if it is there."""
        with self._lock:
            away = copy.ticket is not None and not copy.is_here
            if self.on_gpu and away and self._tiers.has_room_to_read(copy.nbytes):
                assert self._disk is not None
                self._disk.read(copy)

    def fetch(self, copy: StoredCopy, *, now: bool = False, again: bool = False) -> None:
        """Begin to bring a copy back, if it is not here or coming already.

        From a disk it crosses to a GPU when it was read, or waited for `now`; `again`: not counted.
        """
        with self._lock:
            if copy.is_here:
                return
            stored, raw = copy.stored, copy.on_host
            # In this order: see `RawOnHost.packed`.
            host = copy.host if raw is None else raw.host
            used, known, short = copy.nbytes, True, False
            if copy.ticket is not None:
                assert self._disk is not None
                reading = self._disk.read(copy)
                if not self.on_gpu:
                    copy.arrived = reading
                    self.traffic.fetched(copy.name, copy.nbytes, copy.blob)
                    return
                if not now and (not reading.done() or reading.exception() is not None):
                    return  # whoever wants it waits for it, or gets the error
                self.traffic.stalls.wait(reading, "disk")
                copy.reading, stored = None, reading
                host = reading.result()
                used = host.nbytes
            elif copy.codec is not None:
                blob, planned = copy.blob, self.is_planned
                assert host is not None and stored is not None and blob is not None
                used, known = self.traffic.bytes_to_fetch(blob, stored, host, planned=planned)
                short = not known and used < host.nbytes
            assert stored is not None
            # Of the stream that computes, behind whose work it is filled and given back.
            form = copy.form
            if form is None or copy.codec is not None:
                fetched = torch.empty(used, dtype=torch.uint8, device=self.device)
            else:  # as it is given to autograd
                fetched = torch.empty(form.shape, dtype=form.dtype, device=self.device)
            begin: Mark | None = None
            if self.on_gpu:
                assert not isinstance(self._in, ThreadLane)
                home = copy.restored_on = current_stream(self.device)
                if host is None:  # a thread waits later, maybe behind the next record
                    begin = record_on(home)
                else:
                    begin = self._begin_event or self._new_begin(self._in)
                    begin.record(home)
                copy.filling = self._in  # first: what fails below may have been launched
            copy.fetched, copy.is_fetched_short = fetched, short
            arrived: Mark
            if host is None:
                assert raw is not None and raw.packed is not None and self._packing is not None
                arrived = self._packing.unpack(raw.packed, fetched, self._in, begin)
            elif known and type(host) is HostPiece:
                to, lane = fetched.data_ptr(), self._in
                assert not isinstance(lane, ThreadLane)
                arrived = lane.copy(to, host.address, used, after=begin, then_after=stored)
                copy.events[:] = (arrived,)  # which is behind those before
            else:
                expected_bytes = None
                if not known:
                    assert (codec := copy.codec) is not None
                    sizes = self.traffic.sizes
                    expected_bytes = sizes.expected(copy.name, codec.name, copy.nbytes)
                arrived = bring(self._in, fetched, host, stored, expected_bytes, begin)
                if not isinstance(arrived, ThreadTask):
                    copy.events[:] = (arrived,)
            copy.arrived = arrived
            if not again:
                self.traffic.fetched(copy.name, copy.nbytes, copy.blob)

    def bytes_of(self, copy: StoredCopy, more: bool) -> torch.Tensor:
        """Return the bytes of a copy, ``[n]`` of its dtype or of its `form`, on the device.

        Parameters
        ----------
        copy : StoredCopy
            The copy.
        more : bool
            Whether other views of it will be read soon.
        """
        with self._lock:
            current = current_stream(self.device) if self.on_gpu else None
            traffic, originals = self.traffic, self._originals
            waits = traffic.unknown or traffic.timed or self._stages or self._disk is not None
            if waits or originals.in_flight_bytes or originals.unsure_bytes:
                self._release(self.in_flight_bytes, current)
            original = copy.original
            if original is not None and not (copy.is_lossy and self._is_read_packed(copy)):
                # One with a form gives up its memory, in whatever thread, when it has crossed.
                return original if copy.form is None else original.detach()
            restored = None
            if copy.restored is not None or copy.shared is not None:
                restored = copy.still_restored()
            if restored is None:
                restored = self._restore(copy, current)
                if copy.away is not None:
                    copy.away = None
                    self.traffic.returned(copy.nbytes)
                copy.restores(restored)
            elif current is not None:
                copy.use_here(restored, current)
            copy.restored = restored if more else None
            return restored

    def _is_read_packed(self, copy: StoredCopy) -> bool:
        """Return whether a lossy copy is read from its packed bytes while its original is there.

        So are all that did not fail: gradients do not depend on how far copies have come.
        """
        stored = copy.stored
        if isinstance(stored, ThreadTask):
            self.traffic.stalls.wait(stored, "host")
            self._release(self.in_flight_bytes)  # which reports one that failed
            return stored.exception() is None
        return True

    def _restore(self, copy: StoredCopy, current: torch.cuda.Stream | None) -> torch.Tensor:
        swap = copy.swap
        if copy.staged is not None:
            encoded = copy.staged.blob()
            copy.restored_on = current
        else:
            encoded = self._fetched(copy, current)
            if swap is None:
                return encoded if encoded.dtype is copy.dtype else encoded.view(copy.dtype)
        assert swap is not None
        shape = None if copy.form is None else copy.form.shape
        if copy.blob is None or not self.traffic.is_due(decodes=True):
            return swap.decode(encoded, shape)
        begin = now(self.device)
        decoded = swap.decode(encoded, shape)
        self.traffic.decoded(copy.blob, [begin, now(self.device)])
        return decoded

    def _fetched(self, copy: StoredCopy, current: torch.cuda.Stream | None) -> torch.Tensor:
        """Return the bytes of a copy as they crossed; what computes waits for them."""
        if copy.arrived is None:
            self.fetch(copy, now=True)
        if copy.is_fetched_short and not came_whole(copy, self._in):
            self.fetch(copy, now=True, again=True)
        fetched, arrived = copy.fetched, copy.arrived
        assert arrived is not None
        copy.fetched = copy.arrived = copy.reading = None
        tier: StallTier = "host" if copy.ticket is None else "disk"
        stalls = self.traffic.stalls
        if stalls.untimed and not isinstance(arrived, ThreadTask):  # as `wait`, a call less
            stalls.untimed -= 1
            arrived.wait(current)  # type: ignore[arg-type]
        else:
            stalls.wait(arrived, tier, current)
        if isinstance(arrived, ThreadTask):
            made = arrived.result()
            if fetched is None:  # read from the disk
                fetched = made
            elif made is not None:  # an event of what a thread has unpacked
                stalls.wait(made, tier, current)
        assert fetched is not None
        if current is not None and copy.restored_on is not current:
            copy.use_here(fetched, current)  # it may have been fetched for another stream
            copy.restored_on = current
        copy.filling = None
        return fetched

    @property
    def packed_on_host(self) -> int:
        """Number of copies that the CPU has packed."""
        return 0 if self._packing is None else self._packing.tensors

    def is_on_disk(self, site: str) -> bool:
        """Return whether the last copy of a site that was moved was given to the disk."""
        return self._disk is not None and site in self._disk.sites

    def poll(self) -> None:
        """Count what is known by now, and go on with what goes to the disk; waits for nothing."""
        with self._lock:
            self.traffic.poll()
            if self._disk is not None:
                self._originals.release(sys.maxsize)  # what was cut off is sent again first
                self._disk.poll()

    def close(self) -> None:
        """Wait for the work under way, and end threads; they start again when a copy is read."""
        if self.on_gpu:
            self._out.close()  # what crosses is there then, and its size is known
        with self._lock:
            self._release(0)  # while what was cut off can be sent again
        for lane in {self._encoding, self._out, self._in}:
            if isinstance(lane, ThreadLane):
                wait_on_host(lane.run(do_nothing))  # behind all, which closing would cancel
            lane.close()
        if self._packing is not None:
            self._packing.close()
        with self._lock:
            self._release(0)
            self.traffic.poll()
            self._room.close()
            self._host_encoder = HostEncoder()
            if not self.on_gpu:
                self._open_lanes()
