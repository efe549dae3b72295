"""Who goes next on a prefill replica: order, feasible set, batching, fairness."""
