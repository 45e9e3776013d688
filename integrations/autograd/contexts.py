"""Context managers that take the arguments of those that they replace."""

from __future__ import annotations

from typing import Any

from bitslab import ActivationOffload
from bitslab.errors import ArgumentError, ArgumentTypeError

#: Types of devices that tensors are moved from.
DEVICE_TYPES = ("cuda", "cpu")
#: Tensors of a forward stash; more is a size in bytes, which TRL's class has in this place.
MOST_STASHED = 255


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
    """In the place of torchtune's ``OffloadActivations``, with its arguments in their order.

    Parameters
    ----------
    use_pin_memory : bool
        Accepted, and without effect: copies of a GPU's tensors are in page-locked memory.
    use_streams : bool or None
        Accepted, and without effect: tensors cross on streams of their own beside what computes.
        None is what torchtune 0.4 has for "where they can".
    max_fwd_stash_size : int
        1 to 255. Accepted, and without effect: what is under way is bounded in bytes, by
        `in_flight_bytes`.
    min_offload_size : int, optional
        Bytes of the smallest tensors that are moved. With None that is 256 KiB, below which moving
        a tensor costs the host more than its memory is worth.
    **options
        As for `bitslab.ActivationOffload`, but for `min_bytes`: ``policy="raw"`` moves tensors as
        they are.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For an argument that is none of these.

    Notes
    -----
    TRL's class of this name has `min_offload_size` third and `max_fwd_stash_size` fourth: name both
    where it is replaced. A third argument that is a size, as 1,024 in a call by TRL's positions, is
    refused.

    Examples
    --------
    >>> import torch
    >>> from bitslab.integrations.autograd import OffloadActivations
    >>> x = torch.randn(64, 4096, requires_grad=True)
    >>> with OffloadActivations(max_fwd_stash_size=5, policy="raw") as offload:
    ...     y = x.sin().cos().sum()
    >>> y.backward()
    >>> offload.stats()["moved_tensors"]
    1
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool | None = True,
        max_fwd_stash_size: int = 5,
        min_offload_size: int | None = 1024,
        **options: Any,
    ) -> None:
        _check_flag("use_pin_memory", use_pin_memory)
        if use_streams is not None:
            _check_flag("use_streams", use_streams)
        if not isinstance(max_fwd_stash_size, int) or isinstance(max_fwd_stash_size, bool):
            raise ArgumentTypeError(
                f"max_fwd_stash_size: expected an int, got {max_fwd_stash_size!r:.60}"
            )
        if not 1 <= max_fwd_stash_size <= MOST_STASHED:
            hint = (
                ""
                if max_fwd_stash_size < 1
                else ("; TRL's class has min_offload_size in this place: name both")
            )
            raise ArgumentError(
                f"max_fwd_stash_size: {max_fwd_stash_size}, accepted are 1 to {MOST_STASHED} "
                f"tensors{hint}"
            )
        if "min_bytes" in options:
            raise ArgumentTypeError("min_bytes: give min_offload_size in its place")
        if min_offload_size is not None:
            options["min_bytes"] = min_offload_size
        super().__init__(**options)


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected a bool, got {value!r:.60}")
