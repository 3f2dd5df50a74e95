"""One training step on a packed row with padding: docs/tutorial.md. With `--shim`, shim is applied first."""

import sys
import warnings

warnings.filterwarnings("ignore")  # megatron-core's, about kernels that a CPU has no use for

import shim  # noqa: E402

if "--shim" in sys.argv:
    report = shim.apply(require=["mtp-packed-sequences"])
    print(report["mtp-packed-sequences"].state)

from shim import testing  # noqa: E402

with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
    model = testing.build_gpt(mtp_num_layers=1)
    if "--shim" in sys.argv:
        print(shim.check(model)["mtp-packed-sequences"].state)
    row = testing.pack(testing.random_sequences([5, 7, 4]), align=8)  # lengths 5, 7, 4 in 8, 8, 8 places
    packed = testing.run_packed(model, row)  # a forward and a backward pass
    alone = testing.run_alone(model, row)  # the truth: each sequence in a separate pass
    for name, difference in testing.differences(packed, alone).items():
        print(f"{name:8}{'right' if difference < 1e-6 else f'off by {difference:.0e}'}")
