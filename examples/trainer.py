"""How a trainer uses shim: one call early, one once the model is built. Runs on CPU with any release on the path."""

import shim
from shim import testing

# As early as possible; after megatron was imported works too. Raises where the fix cannot be had on this release.
shim.apply(require=["mtp-packed-sequences"])


def main() -> None:
    # Stands in for the GPU and for initialize_model_parallel.
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
        model = testing.build_gpt(mtp_num_layers=1)  # your model provider
        print(shim.check(model))  # raises where the fix is not active on this very model, or where ranks differ

        row = testing.pack(testing.random_sequences([5, 7, 4]), align=8)  # your collator
        loss = model(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            attention_mask=None,
            labels=row.labels,
            loss_mask=row.loss_mask,
            packed_seq_params=row.packed_seq_params(),
        )
        mean = (loss * row.loss_mask).sum() / row.loss_mask.sum()
        mean.backward()
        print(f"loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
