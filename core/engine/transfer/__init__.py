"""Moving bytes between host, device and file."""

from .gather import gather_copied_rows, gather_packed_rows
from .lanes import StreamLane, StreamTask, Task, ThreadLane, ThreadTask
from .ring import PrefetchRing
from .staging import StagingBuffer, StagingRing
from .upload import RowUploader
from .window import Window

__all__ = [
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
]
