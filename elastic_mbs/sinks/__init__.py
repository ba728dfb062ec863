"""Sinks for `on_event`: a textfile for Prometheus, and a TensorBoard writer.

```python
prometheus = PrometheusTextfile("/var/lib/node_exporter/train.prom")
mbs = ElasticMBS(model, on_event=[prometheus, TensorBoard(SummaryWriter())])
```

`PrometheusTextfile` needs `pip install elastic-mbs[prometheus]`. An error in these sinks is never
raised into a step: the first one is logged. An error in a sink of your own ends the call.
"""

from elastic_mbs.sinks.prometheus import PrometheusTextfile
from elastic_mbs.sinks.tensorboard import TensorBoard

__all__ = ["PrometheusTextfile", "TensorBoard"]
