"""What plans and benches have to know of a GPU: one table of facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pallas_kernels.dispatch import device_of


@dataclasses.dataclass(frozen=True)
class Gpu:
    """sms: multiprocessors.  shared_bytes: of shared memory, for one block at most.

    copy_rate, sum_rate: bytes a second that a copy, and a sum, of device memory reach.
    product_rates: operations a second that XLA's products reach, by the operands' dtype.
    """

    sms: int
    shared_bytes: int
    copy_rate: float
    sum_rate: float
    product_rates: Mapping[str, float] = dataclasses.field(hash=False)


H200 = Gpu(
    sms=132,
    shared_bytes=227 * 1024,
    copy_rate=4.3e12,
    sum_rate=4.2e12,
    product_rates={"int8": 1512e12, "float8_e4m3fn": 1570e12, "bfloat16": 799e12},
)


def gpu() -> Gpu:
    """Of the device where new arrays are.  Where that is no GPU, kernels are lowered for an H200.
    What a device does not tell of itself (its rates) was measured on an H200."""
    device = device_of(())
    if device.platform != "gpu":
        return H200
    return dataclasses.replace(
        H200,
        sms=getattr(device, "core_count", H200.sms),
        shared_bytes=getattr(device, "shared_memory_per_block_optin", H200.shared_bytes),
    )
