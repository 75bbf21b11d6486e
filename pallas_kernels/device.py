"""What plans and benches have to know of a GPU: one table of facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from pallas_kernels.dispatch import device_of


class Cost(NamedTuple):
    """Microseconds of one family of kernels: to start, and for a unit of each amount of work
    (``matmul.predict``)."""

    start: float
    serial: tuple[float, ...] = ()
    shared: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Gpu:
    """sms: multiprocessors.  shared_bytes: of shared memory, for one block at most.

    copy_rate, sum_rate: bytes a second that a copy, and a sum, of device memory reach.
    product_rates: operations a second that XLA's products reach, by the operands' dtype.
    costs: of kernels and of XLA's forms by family, as ``bench.fit`` prints them.
    """

    sms: int
    shared_bytes: int
    copy_rate: float
    sum_rate: float
    product_rates: Mapping[str, float] = dataclasses.field(hash=False)
    costs: Mapping[str, Cost] = dataclasses.field(hash=False)


H200 = Gpu(
    sms=132,
    shared_bytes=227 * 1024,
    copy_rate=4.3e12,
    sum_rate=4.2e12,
    product_rates={"int8": 1512e12, "float8_e4m3fn": 1570e12, "bfloat16": 799e12},
    costs={
        "between kernels": Cost(1.3),  # in a CUDA graph; not fitted
        "pair float": Cost(start=0.679, serial=(0.733, 0.0303, 0.573), shared=(0.201, 5.69, 155.0)),
        "pair float8_e4m3fn": Cost(
            start=2.74, serial=(0.867, 0.787, 0.847), shared=(0.144, 1.65, 101.0)
        ),
        "pair int8": Cost(start=2.82, serial=(0.0, 0.896, 0.0), shared=(0.188, 9.4, 98.1)),
        "row float": Cost(start=1.74, serial=(0.0, 0.0, 0.00433), shared=(0.207, 0.226)),
        "row int4": Cost(start=2.81, serial=(0.0, 0.0, 0.0), shared=(0.166, 0.381)),
        "row int8": Cost(start=1.8, serial=(0.605, 0.0, 0.0272), shared=(0.143, 0.378)),
        "tile float": Cost(
            start=1.69, serial=(0.0, 0.0103, 0.0431, 0.0), shared=(0.221, 8.23, 7.69e-06)
        ),
        "tile int4": Cost(
            start=2.24, serial=(0.0605, 0.0499, 0.027, 0.0), shared=(0.0743, 4.2, 0.0)
        ),
        "tile int4 fold": Cost(
            start=2.73, serial=(0.871, 0.0482, 0.0, 0.0), shared=(0.166, 4.55, 0.0)
        ),
        "tile int8": Cost(
            start=2.15, serial=(0.0878, 0.0686, 0.0216, 229.0), shared=(0.189, 5.73, 0.0)
        ),
        "weight int4": Cost(
            start=2.91, serial=(1.97, 2.66, 2.88, 1.56, 5.92, 17.6, 0.0), shared=(0.174,)
        ),
        "weight int4 x 8 bits": Cost(
            start=4.05, serial=(0.851, 24.9, 237.0, 2.61, 10.1, 11.4, 0.0), shared=(0.106,)
        ),
        "weight int8": Cost(
            start=1.97, serial=(2.7, 2.92, 0.0, 5.23, 11.4, 12.8, 0.0), shared=(0.0586,)
        ),
        "xla 8 bits": Cost(start=3.71, serial=(2.11, 5.7), shared=(0.313, 3.35, 0.341)),
        "xla copy": Cost(start=4.29, serial=(0.0, 7.84), shared=(0.35, 3.72)),
        "xla float": Cost(start=5.21, serial=(3.07, 69.0), shared=(0.201, 0.0, 0.0)),
        "xla row float": Cost(start=1.44, serial=(0.0486, 0.0641), shared=(0.263,)),
        "xla row float8_e4m3fn": Cost(start=2.98, serial=(0.0, 0.0), shared=(0.355,)),
        "xla row int8": Cost(start=2.62, serial=(0.0381, 0.0324), shared=(0.316,)),
        "xla row sums": Cost(start=3.16, serial=(1.87, 2.86, 0.0), shared=(0.248, 0.367, 12.1)),
        "xla sums": Cost(start=4.57, serial=(0.0, 0.0, 30.9, 4.05, 2.81), shared=(0.181, 21.1)),
        "xla w4a8 row": Cost(start=2.13, serial=(0.272,), shared=(1.01,)),
        "xla words": Cost(start=4.45, serial=(0.0,), shared=(0.292, 191.0)),
        "xla around": Cost(start=0.0, serial=(1.88, 0.0, 0.863, 2.08), shared=()),
        "xla widened": Cost(start=0.0, serial=(3.13,), shared=()),
        "xla zeros": Cost(start=4.77, serial=(), shared=()),
    },
)
TABLES = {"NVIDIA H200": H200}  # by the device's kind


def gpu() -> Gpu:
    """Of the device where new arrays are.  A device without a table, and a CPU, for which kernels
    are lowered as for an H200, have the H200's rates and costs."""
    device = device_of(())
    if device.platform != "gpu":
        return H200
    table = TABLES.get(getattr(device, "device_kind", ""), H200)
    return dataclasses.replace(
        table,
        sms=getattr(device, "core_count", table.sms),
        shared_bytes=getattr(device, "shared_memory_per_block_optin", table.shared_bytes),
    )
