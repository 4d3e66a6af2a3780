"""The benchmarks of `forge bench`, one file each: options, run, figures, screen. Runners, workers: `forge.bench`."""
