"""Moving bytes between host, device and file."""

from .events import StreamEvent
from .gather import gather_copied_rows, gather_packed_rows
from .lanes import (
    Event,
    Mark,
    StreamLane,
    StreamTask,
    Task,
    ThreadLane,
    copy_on,
    record_on,
    wait_on_host,
)
from .ring import PrefetchRing
from .staging import StagingBuffer, StagingRing
from .upload import RowUploader
from .window import Window

__all__ = [
    "Event",
    "Mark",
    "PrefetchRing",
    "RowUploader",
    "StagingBuffer",
    "StagingRing",
    "StreamEvent",
    "StreamLane",
    "StreamTask",
    "Task",
    "ThreadLane",
    "Window",
    "copy_on",
    "gather_copied_rows",
    "gather_packed_rows",
    "record_on",
    "wait_on_host",
]
