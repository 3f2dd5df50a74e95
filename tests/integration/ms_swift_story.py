"""What one process with ms-swift has to tell. It trains with mcore-bridge's models, of which mcore_bridge_story tells.

Orders: "stock" (no shim), "package" (shim.apply() runs before swift.megatron is imported, as at the top of its
package), "plugin" (shim.apply() stands in a file of --external_plugins, which ms-swift imports when it has read its
arguments, long after its patches are made).
"""

import os
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import bridge_models as models
import leftovers
import torch
import trainers
from mcore_bridge_story import OURS, PACKAGES, checked, runs_ours, states

import shim
from shim import testing

_MODULES = (
    "swift.megatron.pipelines.train.sft",
    "swift.megatron.trainers",
    "swift.megatron.utils.router_replay_utils",
    "megatron.core.models.gpt",
    "mcore_bridge.model",
    "peft",
)


def import_all():
    for name in _MODULES:
        import_module(name)


def patch_all():
    """What ms-swift patches later than at its import: with its arguments, and with its trainer."""
    from swift.megatron.init import _patch_mcore_bridge
    from swift.megatron.utils import apply_router_replay_patch, patch_torch_dist_shard

    _patch_mcore_bridge()
    apply_router_replay_patch()
    patch_torch_dist_shard(2)


def plugin():
    """Have ms-swift import a file of --external_plugins that applies shim."""
    from swift.arguments.base_args.base_args import BaseArguments

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "apply_shim.py"
        file.write_text("import shim\n\nshim.apply()\n")
        arguments = SimpleNamespace(external_plugins=[str(file)], custom_register_path=[])
        BaseArguments._import_external_plugins(arguments)


def its_own():
    """Where ms-swift's patches lie, by the module of what is found there."""
    from mcore_bridge import GPTBridge
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from torch.distributed.checkpoint import default_planner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    found = {
        "_batched_p2p_ops": p2p_communication._batched_p2p_ops,
        "MoEAlltoAllTokenDispatcher.preprocess": MoEAlltoAllTokenDispatcher.preprocess,
        "TorchDistSaveShardedStrategy.__init__": TorchDistSaveShardedStrategy.__init__,
        "GPTBridge.save_weights": GPTBridge.save_weights,
        "FileSystemReader.read_data": FileSystemReader.read_data,
        "_validate_global_plan": default_planner._validate_global_plan,
    }
    return {name: function.__module__ for name, function in found.items()}


class _SwiftRow(testing.PackedRow):
    """A row whose offsets ms-swift makes of its positions: padding has position 0, and each token is a sequence."""

    def packed_seq_params(self, **extra):
        from swift.megatron.utils import get_packed_seq_params

        return get_packed_seq_params(SimpleNamespace(cp_partition_mode="zigzag"), self.position_ids)


def packed_errors():
    """The largest difference between a packed row of ms-swift's and its sequences alone."""
    found = {}
    row = models.row_of(1)
    padding = 4
    padded = {name: torch.nn.functional.pad(value, (0, padding)) for name, value in _parts(row).items()}
    ends = (*row.ends[:-1], row.total + padding)
    for adapted in (False, True):
        model = models.build(mtp_num_layers=2)
        if adapted:
            model = models.with_lora(model)
        for name, its in {
            "plain": _SwiftRow(**_parts(row), spans=row.spans, ends=row.ends),
            "padded": _SwiftRow(**padded, spans=row.spans, ends=ends),
        }.items():
            packed, alone = testing.run_packed(model, its), testing.run_alone(model, its)
            assert alone.grads
            found[f"{'LoRA ' if adapted else ''}{name}"] = testing.worst(testing.differences(packed, alone))
    return found


def _parts(row):
    return {name: getattr(row, name) for name in ("input_ids", "labels", "position_ids", "loss_mask")}


def log_probabilities():
    """The difference of ms-swift's log-probabilities, entropies and their gradients from log_softmax, in float32."""
    from swift.megatron.trainers.vocab_parallel_utils import compute_logps_and_entropy_from_logits

    torch.manual_seed(3)
    logits = torch.randn(1, 9, 50)
    labels = torch.randint(0, 50, (1, 9))
    labels[0, 4] = -100
    ours, truth = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    taken, entropy = compute_logps_and_entropy_from_logits(ours * 1.0, labels, compute_entropy=True)
    every = truth.log_softmax(-1)
    right = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    right_entropy = -(every.exp() * every).sum(-1)
    (taken.sum() + entropy.sum()).backward()
    (right.sum() + right_entropy.sum()).backward()
    pairs = ((taken, right), (entropy, right_entropy), (ours.grad, truth.grad))
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def tell(order):
    if order == "package":
        shim.apply()
    import_all()
    patch_all()
    trainers.join()
    told = {}
    with models.on_cpu():
        if order == "plugin":
            models.error(models.build(mtp_num_layers=1), 1)
            before = leftovers.reachable((*PACKAGES, "swift"))
            plugin()
        told |= {"packed": packed_errors(), "log-probabilities": log_probabilities(), "its own": its_own()}
        if order != "stock":
            told["status"] = states(shim.status())
            told["checked"] = checked(models.build(mtp_num_layers=1))
            told["log-probabilities are ours"] = runs_ours(log_probabilities)
            shim.revert()
            after = leftovers.reachable((*PACKAGES, "swift"))
            told["ours"] = leftovers.made_by(after, OURS)
            told["its own afterwards"] = its_own()
            told["log-probabilities afterwards"] = log_probabilities()
        if order == "plugin":
            told["left"] = leftovers.changed(before, after)
    return told


def rank(order):
    """One rank of a world: what check() says, once all ranks have compared notes."""
    trainers.join()
    if order == "package":
        shim.apply()
    import_all()
    patch_all()
    if order == "plugin":
        plugin()
    with models.on_cpu():
        return checked(models.build(mtp_num_layers=1))


_TARGET = """
import os, sys

if __name__ == "__main__":
    from shim import testing

    testing.transformer_engine_on_cpu()
    first = "megatron.core" not in sys.modules
    import mcore_bridge, swift.megatron
    import shim

    state = shim.status()["mtp-packed-sequences"].state
    print("TOLD", os.environ.get("RANK", "-"), first, state, *sys.argv[1:], flush=True)
    os._exit(0)
"""


def launched(torchrun):
    """What the processes that ms-swift's launcher starts have to say, where the launcher runs under `shim run`."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "the_target.py").write_text(_TARGET)
        code = (
            "import sys; sys.argv = ['megatron', 'sft', '--model', 'm']; from swift.cli.main import cli_main; "
            "cli_main({'sft': 'the_target'}, is_megatron=True)"
        )
        command = [sys.executable, "-m", "shim", "run", "--", sys.executable, "-W", "ignore", "-c", code]
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join([directory, environ["PYTHONPATH"]])
        if torchrun:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                environ |= {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free.getsockname()[1])}
        output = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted(line for line in output.splitlines() if line.startswith("TOLD"))
