"""The memory that a step will need, found without running it.

A step is traced on fake tensors, which have shapes and no memory; the live bytes after each of its
operations are counted.

```
  model, optimizer ──► fakes.py ─────┐
  pieces of the batch ───────────────┴──► trace.py: loss_fn, backward and step
                                             │      with timeline.py: bytes per operation
                                             │      or ways.py: offloaded, checkpointed
                                             ▼
                                          lines.py: a line per operation ──► plan.py, report.py
```
"""
