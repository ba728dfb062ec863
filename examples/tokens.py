"""A language model on padded text, whose loss is a mean over tokens and not over samples.

Run it: python examples/tokens.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryBudget, count_tokens

STEPS, BATCH, LENGTH, BUDGET = 20, 64, 32, "6MiB"
PADDING, IGNORED = 0, -100


class LanguageModel(nn.Module):
    """A predictor of each byte from the bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.embed(text))[0])
        return logits


def padded_lines() -> dict[str, Tensor]:
    """Return lines of this file as bytes, padded to one length, with the padding ignored."""
    with open(__file__, "rb") as file:
        lines = [line.strip()[:LENGTH] for line in file if line.strip()]
    rows = [list(line.ljust(LENGTH, bytes([PADDING]))) for line in (lines * 2)[:BATCH]]
    text = torch.tensor(rows)
    return {"input_ids": text, "labels": text.masked_fill(text == PADDING, IGNORED)}


def main() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    batch = padded_lines()

    def loss_fn(piece: dict[str, Tensor]) -> Tensor:
        logits, targets = model(piece["input_ids"])[:, :-1], piece["labels"][:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    losses = []
    counting = count_tokens("labels", shift=True)  # a piece weighs as many tokens as it has
    with MemoryBudget(BUDGET), ElasticMBS(model, count=counting) as mbs:  # for a small GPU
        mbs.verify(loss_fn, batch).raise_if_wrong()  # compares the whole loss with its pieces
        for _ in range(STEPS):
            result = mbs.backward(loss_fn, batch)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result))

    tokens = int((batch["labels"][:, 1:] != IGNORED).sum())
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, mean over {tokens} tokens, in {BUDGET}")
    print(
        f"{mbs.stats.ooms} out-of-memory errors survived, micro-batches of "
        f"{result.micro_batch_size}"
    )


if __name__ == "__main__":
    main()
