"""Which sizes of a deployment serve a workload best: a bounded search over real releases on one host."""
