"""miles' own backend of Megatron: three steps of SFT on a model of its arguments, saved and loaded after the first.

    torchrun miles_trains.py TOKENIZER WHERE LAYOUT MEAN ORDER

Prints of each step its losses and norm, and the mean log-probability of a token before it. A first run leaves the
weights that it starts from in WHERE/../weights, and runs after it start from them. MEAN: "tokens" or "sequences", of
which the loss is one. ORDER: "late" applies shim after miles was imported.
"""

import json
import os
import random
import sys
from pathlib import Path

import miles_on_cpu
import torch

import shim

STEPS = 3
OF_THE_MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --vocab-size 256 --make-vocab-size-divisible-by 8 --seq-length 256
    --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm --expert-tensor-parallel-size 1 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01 --mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.3
    --transformer-impl transformer_engine --attention-softmax-in-fp32 --seed 5
"""
OF_THE_RUN = """
    --micro-batch-size 1 --global-batch-size 8 --rollout-batch-size 8 --n-samples-per-prompt 1 --num-rollout 3
    --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0 --log-interval 1
    --loss-type sft_loss --qkv-format thd --advantage-estimator grpo
    --disable-compute-advantages-and-returns --debug-train-only --tokenizer-type NullTokenizer
    --ckpt-format torch_dist --save-interval 1 --actor-num-nodes 1 --distributed-backend gloo
    --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
"""


def configured(tokenizer, where, layout, mean):
    tp, cp = (layout.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "context"))
    words = [*OF_THE_MODEL.split(), *OF_THE_RUN.split(), "--hf-checkpoint", tokenizer]
    words += ["--save", f"{where}/saved", "--load", f"{where}/saved"]
    words += ["--data-pad-size-multiplier", str(32 // tp // cp)]  # rows are as long in each layout
    words += ["--actor-num-gpus-per-node", os.environ["WORLD_SIZE"], *(["--sequence-parallel"] if tp > 1 else [])]
    words += ["--calculate-per-token-loss"] if mean == "tokens" else []
    for name, size in layout.items():
        words += [f"--{name.replace('_', '-')}", str(size)]
    args = miles_on_cpu.parse(words)
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.local_rank = args.rank
    args.load = args.save  # its parser takes what is not there yet for a name on the hub
    args.micro_batch_size = 4  # rows in one packed row
    return args


def built(args, weights):
    """Its model and optimizer, with the weights of the first run."""
    from miles.backends.megatron_utils import initialize, model
    from miles.utils.distributed_utils import init_gloo_group

    torch.distributed.init_process_group("gloo")
    init_gloo_group()
    initialize.init(args)
    made = model.setup_model_and_optimizer(args)
    of_the_run = args.save
    if not (weights / "latest_checkpointed_iteration.txt").exists():
        args.save = str(weights)
        model.save(0, *made)
    else:
        args.load = str(weights)
        args.no_load_optim = args.no_load_rng = args.finetune = True
        loaded(args, made)
        made[1].reload_model_params()
        args.no_load_optim = args.no_load_rng = args.finetune = False
    args.save = args.load = of_the_run
    return made


def loaded(args, made):
    from miles.backends.megatron_utils import model

    model.load_checkpoint(*made, checkpointing_context={}, skip_load_to_model_and_opt=False)


def saved_and_loaded(args, made):
    """Its own checkpoint with the optimizer, into a model whose weights were spoiled."""
    from miles.backends.megatron_utils import model

    model.save(0, *made)
    with torch.no_grad():
        for chunk in made[0]:
            for weight in chunk.parameters():
                weight.add_(1)
    loaded(args, made)


def rows(ranks):
    """Of each step the data of this rank as its rollout gives them: the first four tokens are a prompt."""
    draw = random.Random(1)
    made = [torch.tensor([draw.randrange(3, 250) for _ in range(4 * draw.randrange(2, 10))]) for _ in range(8 * STEPS)]
    for step in range(STEPS):
        mine = made[8 * step : 8 * step + 8][ranks.rank :: ranks.size]
        yield {
            "tokens": mine,
            "total_lengths": [len(row) for row in mine],
            "response_lengths": [len(row) - 4 for row in mine],
            "loss_masks": [torch.ones(len(row) - 4, dtype=torch.int) for row in mine],
        }


def log_probability(args, chunks, iterator, count):
    """The mean over this step's tokens, as its actor computes them before it trains."""
    from miles.backends.megatron_utils.model import forward_only
    from miles.backends.training_utils.loss import get_log_probs_and_entropy
    from miles.backends.training_utils.parallel import get_parallel_state

    told = torch.cat(forward_only(get_log_probs_and_entropy, args, chunks, iterator, count)["log_probs"]).double()
    sums = torch.stack([told.sum(), torch.tensor(told.numel())])
    torch.distributed.all_reduce(sums, group=get_parallel_state().intra_dp_cp.group)
    return sums[0] / sums[1]


def main(tokenizer, where, layout, mean, order):
    from miles.backends.megatron_utils import model
    from miles.backends.training_utils.data import get_data_iterator
    from miles.backends.training_utils.parallel import get_parallel_state

    if order == "late":
        shim.apply()
    where = Path(where)
    args = configured(tokenizer, where, json.loads(layout), mean)
    made = built(args, where.parent / "weights")
    if order == "late":
        shim.check(list(made[0]))
    told = []
    one_step, model.train_one_step = model.train_one_step, lambda *given: told.append(one_step(*given)) or told[-1]
    model.log_train_step = lambda **given: told.append(given["extra_metrics"]["mtp_loss"]) or {}
    for step, data in enumerate(rows(get_parallel_state().intra_dp)):
        if step == 1:
            saved_and_loaded(args, made)
        iterator, count = get_data_iterator(args, made[0], data)
        before = log_probability(args, made[0], iterator, count)
        for chunk in iterator:
            chunk.reset()
        told.clear()
        model.train(step, *made, iterator, count)
        if len(told) == 2:  # the rank that logs
            (losses, norm), of_mtp = told
            print("step:", *map(float, (losses["loss"], of_mtp, norm, before)), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
