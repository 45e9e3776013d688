"""What exchanges moved, and how long their stages took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What exchanges moved between ranks, and how long their stages took.

    Parameters
    ----------
    calls : int
        Exchanges that were finished.
    plain_calls : int
        Calls that torch's own collective served.
    raw_bytes, moved_bytes : int
        Bytes of the rows that were sent to other ranks; of what was sent for them, descriptors
        included.
    encode_s, sizes_s, payload_s, decode_s : float
        Seconds of the stages. Those of one piece run beside the encoding of another.
    """

    calls: int = 0
    plain_calls: int = 0
    raw_bytes: int = 0
    moved_bytes: int = 0
    encode_s: float = 0.0
    sizes_s: float = 0.0
    payload_s: float = 0.0
    decode_s: float = 0.0


@dataclass
class TableCounters:
    """What a table's rows took, one way.

    Parameters
    ----------
    raw_bytes, moved_bytes : int
        Bytes of the rows that were sent to other ranks, and of the parts of messages for them.
    """

    raw_bytes: int = 0
    moved_bytes: int = 0
