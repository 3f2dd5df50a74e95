"""Proofs of gpt-dataset-pad-token."""

from __future__ import annotations

import tempfile

import torch

from shim.patches.megatron_core._proof_corpus import Tokenizer, gpt_dataset, text_of, write_corpus
from shim.testing.proof import Here, proof

LENGTH, EOD = 8, 1
DOCUMENTS = [[*range(2, 2 + length), EOD] for length in (3, 5, 2, 9, 4, 6)]


def lost_ends() -> int:
    """Ends of documents in rows of two epochs that are not in the input, or are not a target that is trained."""
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        dataset = gpt_dataset(write_corpus(DOCUMENTS, folder), LENGTH, Tokenizer(EOD, EOD), epochs=2)
        for row in range(len(dataset)):
            end, found = text_of(dataset, row) == EOD, dataset[row]
            trained = (found["labels"] == EOD) & found["loss_mask"].bool()
            lost += int((end[:-1] & (found["tokens"] != EOD)).sum() + (end[1:] & ~trained).sum())
    return lost


@proof("{:.0f} of 22 ends are lost", right="all ends are read and trained", variants=["v0_12"])
def the_end_of_a_document_is_trained(here: Here) -> int:
    """GPTDataset never trains on the end of a document if the tokenizer pads with the same id.

    To reproduce: build a GPTDataset of some documents that end with `tokenizer.eod`, with a tokenizer whose `pad` is
    the same id. Count this id in `tokens`, and in `labels` where `loss_mask` is not zero.

    `__getitem__` takes each token of the pad id for padding: it becomes token 0, and its target is masked. Right is a
    row with the tokens of the corpus, whose ends of documents are trained unless `eod_mask_loss` is set.

    From 0.12 to 0.15. 0.16 lets -1 stand for padding then (Megatron-LM pull request 2017).
    """
    lost: int = here.run(lost_ends)[0]
    return lost


def wrong_rows() -> int:
    """Rows that are not as they should be: the corpus, and behind its end token 0, which is not trained."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        dataset = gpt_dataset(write_corpus(DOCUMENTS, folder), LENGTH, Tokenizer(None, EOD))
        for row in range(len(dataset)):
            found, text = dataset[row], text_of(dataset, row)
            trained, text = text[1:] >= 0, text.clamp(min=0)
            right = torch.equal(found["tokens"], text[:-1]) and torch.equal(found["labels"], text[1:])
            wrong += not (right and torch.equal(found["loss_mask"].bool(), trained))
    return wrong


@proof(
    "{:.0f} of 5 rows are wrong",
    right="the last row is padded",
    defect="crash",
    crashes=r"^TypeError: Cannot cast array data from dtype\('O'\)",
    beside=("gpt-dataset-loss-mask",),
)
def a_tokenizer_without_a_pad_id_pads(here: Here) -> int:
    """A row of GPTDataset that needs padding raises a TypeError if the tokenizer's pad id is None.

    To reproduce: build a GPTDataset with `Split.valid` and `drop_last_partial_validation_sequence=False`, over a corpus
    that ends within a row, with a tokenizer whose `pad` is None. MegatronTokenizer gives this for a tokenizer of
    transformers without a padding token. Ask for each row.

    The row is filled with None: "Cannot cast array data from dtype('O') to dtype('int64')". Right is padding that is
    not trained, as for a tokenizer that raises an error instead of giving a pad id.

    From 0.12 on. Both sides run with gpt-dataset-loss-mask, because without it padding also hides targets of other
    rows.
    """
    wrong: int = here.run(wrong_rows)[0]
    return wrong
