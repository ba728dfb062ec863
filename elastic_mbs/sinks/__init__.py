"""Sinks for `on_event`: a textfile for Prometheus, and a TensorBoard writer.

    mbs = ElasticMBS(model, on_event=[PrometheusTextfile("/var/lib/node_exporter/train.prom"), TensorBoard(SummaryWriter())])

What goes wrong in them is said once in the Python log and never raised into a step. Sinks of your own raise what they raise.
"""

from elastic_mbs.sinks.prometheus import PrometheusTextfile
from elastic_mbs.sinks.tensorboard import TensorBoard

__all__ = ["PrometheusTextfile", "TensorBoard"]
