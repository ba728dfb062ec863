"""Sinks for `on_event`: a textfile for Prometheus, and a TensorBoard writer.

    mbs = ElasticMBS(model, on_event=[PrometheusTextfile("/var/lib/node_exporter/train.prom"),
    TensorBoard(SummaryWriter())])

`PrometheusTextfile` needs `pip install elastic-mbs[prometheus]`. What goes wrong in these sinks is
logged once in the Python log and never raised into a step; errors in sinks of your own pass
through.
"""

from elastic_mbs.sinks.prometheus import PrometheusTextfile
from elastic_mbs.sinks.tensorboard import TensorBoard

__all__ = ["PrometheusTextfile", "TensorBoard"]
