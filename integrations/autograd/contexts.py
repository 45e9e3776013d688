"""Context managers that take the arguments of those that they replace."""

from __future__ import annotations

from typing import Any

from bitslab import ActivationOffload
from bitslab.errors import ArgumentError, ArgumentTypeError

#: Types of devices that tensors are moved from.
DEVICE_TYPES = ("cuda", "cpu")


class save_on_cpu(ActivationOffload):  # noqa: N801 - the name of what it replaces
    """In the place of ``torch.autograd.graph.save_on_cpu``, with its arguments.

    Parameters
    ----------
    pin_memory : bool
        Accepted, and without effect: copies of a GPU's tensors are in page-locked memory, which is
        taken once and used again in every step.
    device_type : {"cuda", "cpu"}
        Accepted, and without effect: tensors are moved from the device that they are on.
    **options
        As for `bitslab.ActivationOffload`: ``policy="raw"`` moves tensors as they are.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For an argument that is none of these.

    Notes
    -----
    Unlike torch's it leaves parameters, buffers and tensors of less than 256 KiB (`min_bytes`) on
    their device, keeps the strides of what it moves, and does not make the step wait for copies.

    Examples
    --------
    >>> import torch
    >>> from bitslab.integrations.autograd import save_on_cpu
    >>> x = torch.randn(64, 4096, requires_grad=True)
    >>> with save_on_cpu(pin_memory=True, policy="raw") as saved:
    ...     y = x.sin().cos().sum()
    >>> y.backward()
    >>> saved.stats()["moved_out_bytes"]
    1048576
    """

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda", **options: Any) -> None:
        _check_flag("pin_memory", pin_memory)
        if device_type not in DEVICE_TYPES:
            accepted = " and ".join(DEVICE_TYPES)
            raise ArgumentError(f"device_type: {device_type!r:.60}, accepted are {accepted}")
        super().__init__(**options)


class OffloadActivations(ActivationOffload):
    """In the place of ``OffloadActivations`` of torchtune and of TRL, with its arguments.

    Parameters
    ----------
    use_pin_memory, use_streams : bool
        Accepted, and without effect: copies of a GPU's tensors are in page-locked memory, and cross
        on streams of their own beside what computes.
    max_fwd_stash_size : int
        Accepted, and without effect: what is under way is bounded in bytes, by `in_flight_bytes`.
    min_offload_size : int, optional
        Bytes of the smallest tensors that are moved; 256 KiB when left out, below which moving a
        tensor costs the host more than its memory is worth (1,024 bytes in those classes).
    **options
        As for `bitslab.ActivationOffload`, but for `min_bytes`: ``policy="raw"`` moves tensors as
        they are.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For an argument that is none of these.

    Examples
    --------
    >>> import torch
    >>> from bitslab.integrations.autograd import OffloadActivations
    >>> x = torch.randn(64, 4096, requires_grad=True)
    >>> with OffloadActivations(min_offload_size=1024, policy="raw") as offload:
    ...     y = x.sin().cos().sum()
    >>> y.backward()
    >>> offload.stats()["moved_tensors"]
    1
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        max_fwd_stash_size: int = 5,
        min_offload_size: int | None = None,
        **options: Any,
    ) -> None:
        _check_flag("use_pin_memory", use_pin_memory)
        _check_flag("use_streams", use_streams)
        if not isinstance(max_fwd_stash_size, int) or isinstance(max_fwd_stash_size, bool):
            raise ArgumentTypeError(
                f"max_fwd_stash_size: expected an int, got {max_fwd_stash_size!r:.60}"
            )
        if max_fwd_stash_size < 1:
            raise ArgumentError(f"max_fwd_stash_size: {max_fwd_stash_size}, accepted is 1 or more")
        if "min_bytes" in options:
            raise ArgumentTypeError("min_bytes: give min_offload_size in its place")
        if min_offload_size is not None:
            options["min_bytes"] = min_offload_size
        super().__init__(**options)


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected a bool, got {value!r:.60}")
