"""What a step will need, found without running it: the live bytes after each operation of a step on fake tensors, which have shapes and no memory.

```
  model, optimizer ──► fakes.py ─────┐                      trace.py                     lines.py
  report.py pieces of the batch ───────────────┴──► loss_fn, backward, step, by timeline.py ──►
  lines per operation ──► table, start size
                                          and what kernels.py knows besides            ways.py:
                                          offloaded or checkpointed, and their time
```
"""
