"""Optional: teachers made from labelled texts, one per group of labels: for demos, benchmarks, specialised teachers."""
