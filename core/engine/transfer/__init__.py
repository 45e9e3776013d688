"""Moving bytes between host, device and file."""

from .gather import gather_copied_rows, gather_packed_rows
from .lanes import (
    Mark,
    StreamLane,
    StreamTask,
    Task,
    ThreadLane,
    ThreadTask,
    record_on,
    wait_on_host,
)
from .ring import PrefetchRing
from .staging import StagingBuffer, StagingRing
from .upload import RowUploader
from .window import Window

__all__ = [
    "Mark",
    "PrefetchRing",
    "RowUploader",
    "StagingBuffer",
    "StagingRing",
    "StreamLane",
    "StreamTask",
    "Task",
    "ThreadLane",
    "ThreadTask",
    "Window",
    "gather_copied_rows",
    "gather_packed_rows",
    "record_on",
    "wait_on_host",
]
