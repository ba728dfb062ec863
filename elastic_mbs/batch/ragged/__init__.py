"""Fields whose rows belong to samples in unequal numbers: boxes, tokens, nodes, patches."""
