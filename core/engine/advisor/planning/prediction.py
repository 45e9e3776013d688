"""What a plan is predicted to make of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """What a plan makes of a step.

    Parameters
    ----------
    step_s : float
        Seconds of the step.
    peak_bytes : float
        Most bytes of the device at any moment.
    forward_stall_s, backward_stall_s : float
        Seconds in which the device waits, for memory or for a tensor.
    codec_s, recompute_s : float
        Seconds of the device that packing, and that replays and checkpoints take.
    encode_s : float
        Of `codec_s`, those of packing; the rest is unpacking.
    replay_s : float
        Of `recompute_s`, those of replays.
    link_bytes, written_bytes : float
        Bytes that leave the device, and those of them that the SSD takes.
    up_s, write_s : float
        Seconds in which the link to the host, and the writing SSD, are used.
    host_bytes : float
        Bytes in host memory at the end of the forward pass.
    """

    step_s: float
    peak_bytes: float
    forward_stall_s: float = 0.0
    backward_stall_s: float = 0.0
    codec_s: float = 0.0
    recompute_s: float = 0.0
    link_bytes: float = 0.0
    written_bytes: float = 0.0
    up_s: float = 0.0
    write_s: float = 0.0
    host_bytes: float = 0.0
    encode_s: float = 0.0
    replay_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """Seconds in which the device waits."""
        return self.forward_stall_s + self.backward_stall_s

    def scaled(self, factor: float) -> StepPrediction:
        """Return the prediction with seconds that many times as long."""
        seconds = {
            f.name: getattr(self, f.name) * factor for f in fields(self) if f.name[-2:] == "_s"
        }
        return replace(self, **seconds)

    def summary(self) -> str:
        """Return what it predicts beside compute, in words."""
        return (
            f"A step is predicted to wait {self.stall_s * 1e3:.3g} ms, to compute again for "
            f"{self.recompute_s * 1e3:.3g} ms, to pack for {self.codec_s * 1e3:.3g} ms, and to "
            f"move {self.link_bytes / 1e6:,.1f} MB out and back, of them "
            f"{self.written_bytes / 1e6:,.1f} to the disk."
        )
