"""KV in the memory of a GPU, which no GPU has run: the setting that allows it, and the texts. Pure."""

from __future__ import annotations

from typing import Literal

#: The setting: "unverified" allows KV in the memory of a GPU.
DeviceMemory = Literal["", "unverified"]

_NOT_RUN = "the transfer from and to it, checksums on the device and the wait for computed KV"


def device_refusal(device: str, allowed: DeviceMemory, setting: str) -> str:
    """Why KV in the memory of `device` is not handed over; "" if it is. `setting` is how a user allows it."""
    if device == "cpu" or (device == "cuda" and allowed):
        return ""
    if device == "cuda":
        return f"the memory of a GPU without {setting}: {_NOT_RUN} were never run on a GPU"
    return f"the device {device}, only cpu and cuda"


def device_warning(device: str) -> str:
    """The line for the log of an engine that starts with KV in the memory of `device`."""
    return f"the KV lies in the memory of {device}: {_NOT_RUN} were never run on a GPU"
