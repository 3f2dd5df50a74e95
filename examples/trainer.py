"""How a trainer uses shim: one call early, one once the model is built. Runs on CPU with any release on the path."""

import torch

import shim
from shim import testing
from shim.ops import Packing, fp8_alignment

# As early as possible; after megatron was imported also works. Raises if this release needs the fix and cannot get it.
shim.apply(require=["mtp-packed-sequences"])


def main() -> None:
    # Stands in for the GPU and for initialize_model_parallel.
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
        from megatron.core.packed_seq_params import PackedSeqParams

        model = testing.build_gpt(mtp_num_layers=1)  # your model provider
        print(shim.check(model))  # raises if the fix is not active on this model, or if ranks differ

        tokens = torch.randint(1, 64, (3, 8))  # your batch [B, S], padded on the right
        mask = torch.arange(7) < torch.tensor([[5], [7], [4]])
        packing = Packing.from_mask(mask, alignment=fp8_alignment("delayed"), sequence_alignment=8)
        loss_mask = packing.valid.float()
        loss = model(
            input_ids=packing.pack(tokens[:, :-1])[None],
            position_ids=packing.positions[None],
            attention_mask=None,
            labels=packing.pack(tokens[:, 1:])[None],
            loss_mask=loss_mask[None],
            packed_seq_params=PackedSeqParams(**packing.thd_arguments()),
        )
        mean = (loss[0] * loss_mask).sum() / loss_mask.sum()
        mean.backward()
        print(f"loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
