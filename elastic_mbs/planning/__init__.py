"""The memory that a step will need, found without running it.

A step is traced on fake tensors, which have shapes and no memory; the live bytes after each of its
operations are counted.

```
  model, optimizer ──► fakes.py ─────┐
  pieces of the batch ───────────────┴──► trace.py: loss_fn, backward and step
                                             │      with timeline.py: bytes per operation,
                                             │      values.py: whole numbers that are known
                                             │      or ways.py: offloaded, checkpointed
                                             ▼
                                          lines.py: a line per operation ──► plan.py, report.py
```

Nothing is left behind: `interrupts.py` holds a Ctrl-C back until a trace has ended, `outside.py`
puts back what loss_fn brings along, and `kept.py` finds the fakes that a cache has kept.
"""
