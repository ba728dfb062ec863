"""The doors of `ElasticMBS` behind its signatures: calls, plain passes, figures, registry."""
