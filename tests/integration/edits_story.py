"""Whether an edited copy of mcore-bridge trains right. Nothing here calls shim.apply(): the copy does."""

import bridge_models as models
import trainers

import shim
from shim import testing


def tell():
    import mcore_bridge  # applies shim, where it is edited
    from megatron.core.transformer import attention

    trainers.join()
    told = {"of": mcore_bridge.__file__, "SplitAlongDim": attention.SplitAlongDim is not None}
    told |= {"packed": {}, "recompute": {}}
    with models.on_cpu():
        for weights in ("whole", "LoRA"):
            model = models.build(mtp_num_layers=1)
            model = models.with_lora(model) if weights == "LoRA" else model
            for rows, align in models.ROWS.items():
                told["packed"][f"{weights}, {rows}"] = _or_raised(models.error, model, align)
            row = models.row_of(8)
            truth = models.attention_calls(model, lambda: testing.run_packed(model, row))
            for method, options in models.RECOMPUTE.items():
                with models.setting(model, **options):
                    told["recompute"][f"{weights}, {method}"] = _or_raised(_again, model, row, *truth)
        report = shim.check(model)
        told["states"] = {patch.id: patch.state for patch in map(report.__getitem__, report)}
    return told


def _again(model, row, truth, once):
    """[how much losses and gradients differ from those without recompute, how many attentions ran once more]"""
    result, calls = models.attention_calls(model, lambda: testing.run_packed(model, row))
    return [testing.worst(testing.differences(result, truth)), calls - once]


def _or_raised(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:  # whatever it is, the test asks for it
        return f"{type(error).__name__}: {error}"
