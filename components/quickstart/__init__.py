"""The whole system on one machine: a small task, a small model, and a run of the shipped pipeline on them."""
