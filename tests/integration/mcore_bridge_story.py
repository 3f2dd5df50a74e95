"""What one process with mcore-bridge has to tell: who was first, what is right, what check() says, what revert leaves.

Orders: "stock" (no shim), "shim first", "trainer first".
"""

import contextlib
import logging
import sys
from importlib import import_module
from pathlib import Path

import bridge_models as models
import leftovers
import torch
import trainers

import shim
from shim import testing

PACKAGES = ("megatron", "transformer_engine", "mcore_bridge", "peft")
_SHIM = Path(shim.__file__).resolve().parents[1]
OURS = [f"{_SHIM / 'shim'}/_", str(_SHIM / "patches")]
_ALL = ("megatron.core.models.gpt", "megatron.core.transformer.moe.router", "mcore_bridge.model")


def import_all():
    """Everything of it that the story needs, so that nothing is imported between two looks at the modules."""
    for name in ("mcore_bridge", "peft", *_ALL):
        import_module(name)


def states(report):
    return {patch.id: [patch.state, patch.reason, list(patch.others)] for patch in map(report.__getitem__, report)}


def checked(model):
    """{"raised": None or its text, "states": ..., "said": lines of the log above INFO}."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    handler.setLevel(logging.WARNING)
    logging.getLogger("shim").addHandler(handler)
    raised = None
    try:
        report = shim.check(model)
    except shim.ShimError as error:
        raised, report = f"{type(error).__name__}: {error}", shim.status()
    finally:
        logging.getLogger("shim").removeHandler(handler)
    return {"raised": raised, "states": states(report), "said": said, "digest": report.digest}


def packed_errors():
    found = {}
    for layers in (1, 2):
        for adapted in (False, True):
            model = models.build(mtp_num_layers=layers)
            if adapted:
                model = models.with_lora(model)
            for name, align in models.ROWS.items():
                found[f"{layers} MTP {'LoRA ' if adapted else ''}{name}"] = models.error(model, align)
    return found


def kinds(with_check):
    """Of every kind of model: the error of a padded row, and what check() says."""
    found = {}
    for name, options in models.KINDS.items():
        model = models.build(**options)
        found[name] = {"error": models.error(model, 8)} | ({"checked": checked(model)} if with_check else {})
    return found


def recompute(adapted, with_check):
    """Per method: whether losses and gradients are the same to the bit, and how many layers ran twice."""
    model = models.build(mtp_num_layers=1)
    if adapted:
        model = models.with_lora(model)
    row = models.row_of(8)
    truth, once = models.attention_calls(model, lambda: testing.run_packed(model, row))
    found = {}
    for name, options in models.RECOMPUTE.items():
        with models.setting(model, **options):
            try:
                result, calls = models.attention_calls(model, lambda: testing.run_packed(model, row))
            except AssertionError as error:
                told = {"raised": str(error)}
            else:
                told = {"same": testing.differences(result, truth), "again": calls - once}
            found[name] = told | ({"checked": checked(model)} if with_check else {})
    return found


def counts():
    """Tokens per expert with and without padding behind them, or what was raised."""
    found = []
    for padding in (2, 0):
        try:
            found.append(models.counted_tokens(padding))
        except (RuntimeError, TypeError) as error:
            found.append(str(error).splitlines()[0])
    return found


def tell(order):
    if order == "shim first":
        shim.apply()
    import_all()
    trainers.join()
    told = {}
    with models.on_cpu():
        if order == "trainer first":
            models.error(models.build(mtp_num_layers=1), 1)  # what is set up at the first use, by anybody, is there
            before = leftovers.reachable(PACKAGES)
            shim.apply()
        told |= {
            "packed": packed_errors(),
            "kinds": kinds(order != "stock"),
            "counts": counts(),
            "TE names": te_names(),
        }
        if order != "stock":
            model = models.build(mtp_num_layers=1)
            told["status"] = states(shim.status())
            told["reached"] = reached()
            told["checked"] = checked(model)
            told["checked again"] = checked(model)
            told["MoE"] = checked(models.build(**models.MOE))
        told["recompute"] = {name: recompute(name == "LoRA", order != "stock") for name in ("whole", "LoRA")}
        if order != "stock":
            shim.apply(require=["mtp-packed-sequences"])
            told["required"] = checked(model)
            shim.revert()
            after = leftovers.reachable(PACKAGES)
            told["ours"] = leftovers.made_by(after, OURS)
            told["reverted"] = packed_errors()
        if order == "trainer first":
            told["left"] = leftovers.changed(before, after)
            told["broken"] = broken()
    return told


def broken():
    """The same with mcore-bridge's code changed so that it hides a fix: what is wrong then, and what check() says."""
    from mcore_bridge.model import gpt_model
    from mcore_bridge.model.modules import mtp_layer

    told = {}
    # Applied anew each time: check() remembers what it has found of an override.
    for name, module in (("roll in the layer", mtp_layer), ("roll in the loss", gpt_model)):
        with shim.patched(), putting(module, "roll_tensor", its_old_roll):
            model = models.build(mtp_num_layers=1)
            told[name] = {"error": models.error(model, 8), "checked": checked(model)}
    preprocess = gpt_model.GPTModel._preprocess

    def without_gradient(self, *args, **kwargs):
        states, *rest = preprocess(self, *args, **kwargs)
        return states.detach(), *rest

    with shim.patched(), putting(gpt_model.GPTModel, "_preprocess", without_gradient):
        model = models.with_lora(models.build(mtp_num_layers=None))
        with models.setting(model, **models.RECOMPUTE["uniform"]):
            try:
                trained = bool(testing.run_packed(model, models.row_of(1)).grads)
            except RuntimeError as error:  # backward, where nothing at all requires a gradient
                trained = str(error)
            told["frozen embeddings"] = {"trained": trained, "checked": checked(model)}
    return told


def its_old_roll(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None):
    """The roll that mcore-bridge carries for megatron-core 0.15 in place of megatron-core's. It knows no padding."""
    from mcore_bridge.utils import megatron_utils

    if packed_seq_params is None:
        return megatron_utils.roll_tensor(tensor, shifts, dims, cp_group)
    return megatron_utils._roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group)


@contextlib.contextmanager
def putting(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def reached():
    """Which patches' code runs in a call of the functions that mcore-bridge replaces, by a profiler."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe.router import TopKRouter

    config = models.build(mtp_num_layers=None).config
    [router] = [module for module in models.build(**models.MOE).modules() if isinstance(module, TopKRouter)]
    states, table = torch.randn(16, 4, 8), torch.randn(8, 1, 1, 8)
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32)
    calls = {
        # A table of positions, not of tokens: mcore-bridge's own way is for the latter.
        "rope-thd": lambda: rope_utils._apply_rotary_pos_emb_thd(states, offsets, table),
        "rope-fusion": lambda: rope_utils.apply_rotary_pos_emb(states[:8, None], table, config),
        "expert-bias-padding": lambda: TopKRouter._apply_expert_bias(router, torch.zeros(4, 4, dtype=torch.bool)),
    }
    return {patch: runs_ours(call) for patch, call in calls.items()}


def runs_ours(call):
    """Whether code of a patch runs in the call."""
    files = set()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename))
    try:
        call()
    finally:
        sys.setprofile(None)
    return any(file.startswith(str(_SHIM / "patches")) for file in files)


def te_names():
    """Whether megatron-core has the name that Transformer Engine moved."""
    attention = import_module("megatron.core.transformer.attention")
    return {"SplitAlongDim": getattr(attention, "SplitAlongDim", None) is not None}


def rank(order):
    """One rank of a world: what check() says, once all ranks have compared notes."""
    trainers.join()
    if order == "shim first":
        shim.apply()
    import_all()
    if order == "trainer first":
        shim.apply()
    with models.on_cpu():
        return checked(models.build(mtp_num_layers=1))


def context_parallel(order):
    """One of two ranks that share a row: the difference of its tokens' losses from those of the whole row, per loss."""
    trainers.join()
    if order == "shim first":
        shim.apply()
    import_all()
    if order == "trainer first":
        shim.apply()
    losses = {}
    for ranks in (1, 2):
        row = models.row_of(8)
        with models.on_cpu(testing.Layout(cp=ranks)):
            model = models.build(mtp_num_layers=2, context_parallel_size=ranks)
            result = testing.run_packed(model, row)
            losses[ranks] = torch.stack([result.main, *result.mtp])
    rank = torch.distributed.get_rank()
    # Rank r holds the chunks r and 3 - r of the four that each sequence is cut into.
    starts = [0, *row.ends[:-1]]
    chunks = [torch.arange(start, end).chunk(4) for start, end in zip(starts, row.ends)]
    own = torch.cat([torch.cat([chunk[rank], chunk[3 - rank]]) for chunk in chunks])
    whole = losses[1]
    wrong = (losses[2] - whole[:, own]).abs().amax(1) / whole.abs().amax(1)
    return wrong.tolist()
