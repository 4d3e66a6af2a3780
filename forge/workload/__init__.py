"""Many requests made from a seed, ways of running them, and judges: for experiments, comparisons and benchmarks."""
